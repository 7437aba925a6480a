"""A node in another process as its gateway knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .gateway_messages import NodeStatus
from .messages import NodeId

_MAX_BLOCKS: Final = 1 << 26
"""Of all nodes: the router follows their caches, for a dozen bytes a block."""


@dataclass(frozen=True, slots=True)
class RemoteNode:
    """A node that was heard of.

    Attributes:
        epoch: of its life.
        heard_at: when it said something last.
        refusal: why nothing is sent to it; empty if it serves.
    """

    status: NodeStatus
    epoch: int
    heard_at: float
    refusal: str = ""


def refusal_of(
    status: NodeStatus, nodes: Mapping[NodeId, RemoteNode], block_size: int, model: str | None
) -> str:
    """Return why a node that has come is not to serve beside others; empty if it is."""
    if model is not None and status.model != model:
        return f"its model is {_short(status.model)}, not {_short(model)}"
    if status.block_size != block_size:
        return f"it has blocks of {status.block_size} tokens, not {block_size}"
    served = sum(node.status.num_blocks for node in nodes.values() if not node.refusal)
    if served + status.num_blocks > _MAX_BLOCKS:
        return (
            f"it has {status.num_blocks} blocks, others have {served}, and the gateway "
            f"follows {_MAX_BLOCKS} in all"
        )
    for peer, node in nodes.items():
        other = node.status
        if not node.refusal and other.transport != status.transport:
            return f"its transport is {status.transport}, but that of {peer} is {other.transport}"
        if not node.refusal and other.model != status.model:
            return (
                f"its model is {_short(status.model)}, but that of {peer} is {_short(other.model)}"
            )
    return ""


def _short(model: str) -> str:
    """Leave of a model's name what is enough to tell it from another."""
    family, _, digest = model.partition(" ")
    return f"{family} {digest[:12]}"
