"""The network gateway's record of a node, and the check of a node that joins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..handoff.gateway_messages import IDLE, NodeLoad, NodeStatus
from ..handoff.messages import MAX_PART_BLOCKS, NodeId
from ..handoff.part_cut import PartCut

_MAX_BLOCKS: Final = 1 << 26
"""Most blocks of all nodes together: the router's copies of their caches take bytes per block."""


@dataclass(frozen=True, slots=True)
class RemoteNode:
    """A node that has joined.

    Attributes:
        epoch: epoch of the node.
        heard_at: time of its last message.
        refusal: why the gateway does not use it; empty if it does.
        load: what it did when it sent its last status.
    """

    status: NodeStatus
    epoch: int
    heard_at: float
    refusal: str = ""
    load: NodeLoad = IDLE

    @property
    def num_free(self) -> int:
        """Number of blocks for new requests; none while others wait for blocks."""
        return free_blocks(self.status.num_blocks, self.load)


def free_blocks(num_blocks: int, load: NodeLoad) -> int:
    """Return how many of its blocks a node has for new requests; none while others wait."""
    return 0 if load.num_waiting else num_blocks - load.num_used_blocks


def refusal_of(status: NodeStatus, nodes: Mapping[NodeId, RemoteNode], model: str | None) -> str:
    """Return why a node that joins cannot serve beside the others; empty if it can."""
    if model is not None and model not in (status.model, status.model.rpartition(" ")[0]):
        return f"its model is {short_name(status.model)}, not {short_name(model)}"
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
        if not node.refusal and other.role != status.role:
            cut = PartCut(other.block_size, status.block_size, 0, 0)
            if not cut.is_possible:
                return (
                    f"its blocks of {status.block_size} tokens, and those of {peer} of "
                    f"{other.block_size}, have no common end within {MAX_PART_BLOCKS} blocks"
                )
        if not node.refusal and other.model != status.model:
            return (
                f"its model is {short_name(status.model)}, but that of {peer} is "
                f"{short_name(other.model)}"
            )
    return ""


def short_name(model: str) -> str:
    """Shorten the digest in a model's name, which has the dtype of the KV at its end."""
    family, _, rest = model.partition(" ")
    digest, *dtype = rest.split(" ")
    return " ".join([family, digest[:12], *dtype])
