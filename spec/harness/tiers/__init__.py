"""The world of the tiers: a manager with host and storage tiers, and a virtual executor."""
