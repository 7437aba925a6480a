"""`Backend`: what `radixkv serve` puts its server in front of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...serving import AsyncEngine

if TYPE_CHECKING:
    from ...nodes.remote_nodes import RemoteNodes


@dataclass(frozen=True)
class Backend:
    """One engine in this process, or nodes.

    Attributes:
        start: starts the thread that steps it; to call once.
        max_model_len: length of the longest sequence in tokens.
        nodes: the nodes, or None for one engine.
    """

    start: Callable[[], AsyncEngine]
    max_model_len: int
    nodes: RemoteNodes | None = None
