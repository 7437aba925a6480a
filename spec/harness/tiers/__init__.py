"""The world of a cache manager with host and storage tiers, on a virtual executor.

`TierSubject` makes its worlds; operations end well, badly, late, twice or never, as drawn.
"""
