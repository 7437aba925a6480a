"""The executable specification of the cache: a model to test cache managers against.

Imports nothing else of this library, and no JAX.
"""

from .ghost import ContentError, GhostMemory, Tag, prefix_tags

__all__ = ["ContentError", "GhostMemory", "Tag", "prefix_tags"]
