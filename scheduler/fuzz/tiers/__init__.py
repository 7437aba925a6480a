"""Adapter of our cache manager with tiers, and its events, snapshots and wrong calls."""
