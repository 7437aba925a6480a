"""Paged attention for ragged rows of query tokens: prefill chunks and decode tokens in one step.

Public: `paged_extend`. The modules are its two backends and what they need.
"""

from .api import paged_extend

__all__ = ["paged_extend"]
