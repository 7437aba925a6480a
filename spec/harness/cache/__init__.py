"""The world of a cache manager: requests that match, are admitted, compute and end.

`CacheSubject` makes its worlds; `state` is below the operations, `world` above them.
"""
