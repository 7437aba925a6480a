"""The model of a cache with tiers: its state, and which states each operation allows.

It is pure: it knows neither the system under test nor how operations are drawn.
"""
