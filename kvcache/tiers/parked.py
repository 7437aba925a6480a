"""Parked requests: the KV that preempted requests keep on the host or in storage."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ..ids import OpId
from ..prefix.lease import Lease
from .host_tier import HostRun

ParkedIn: TypeAlias = Literal["host", "storage"]
"""Tier that keeps the KV of a preempted request."""


class Parked:
    """The KV of a preempted request.

    ::

        tokens computed   | block | block | ... | block | tail  |
        on the host       | copies of nodes of the tree | alone |

    Attributes:
        num_tokens: number of tokens that were computed.
        where: "host", or "storage": then the host may drop blocks that are stored.
        saved: whether the request can be resumed and its device blocks are free. Until then an
            operation still copies some of them: its own, or an earlier one of the same blocks.
        failed: whether a copy failed in part. The missing blocks are computed again.
    """

    def __init__(self, lease: Lease, num_tokens: int, where: ParkedIn) -> None:
        self.num_tokens = num_tokens
        self.where = where
        self.saved = False
        self.failed = False
        self.lease = lease
        self.epoch = lease.epoch
        self.op_id: OpId | None = None  # copies the blocks that no other operation copies
        self.runs: list[HostRun] = []  # held
        self.tail_block: int | None = None

    @property
    def is_saving(self) -> bool:
        """Whether an operation writes some of it: its own, or an earlier one."""
        is_in_flight = any(run.in_flight and run.node is not None for run in self.runs)
        return is_in_flight or self.op_id is not None
