"""Paged attention for decode steps: one query token per row.

Public: `paged_decode`. The modules are its two backends and what they need.
"""

from .api import paged_decode

__all__ = ["paged_decode"]
