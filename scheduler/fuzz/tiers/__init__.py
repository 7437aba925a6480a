"""Adapter of our cache manager with tiers: its operations, events, snapshots and wrong calls."""
