"""Parked requests: the KV that preempted requests keep on the host or in storage."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ..ids import OpId
from ..prefix.lease import Lease
from .host_tier import HostRun

ParkedIn: TypeAlias = Literal["host", "storage"]
"""Tier that keeps the KV of a preempted request."""


class Parked:
    """A preempted request's KV.

    ::

        tokens computed   | block | block | ... | block | tail |
        on the host       | copies of nodes of the tree | own  |

    Attributes:
        num_tokens: all tokens that were computed.
        where: "host", or "storage": then the host may drop what is stored.
        saved: its device blocks are free, and it can be resumed. Until then some of it is being
            copied: for it, or for whoever had begun to copy the same blocks before.
        failed: a copy failed in part: what is missing is computed again.
    """

    def __init__(self, lease: Lease, num_tokens: int, where: ParkedIn) -> None:
        self.num_tokens = num_tokens
        self.where = where
        self.saved = False
        self.failed = False
        self.lease = lease
        self.epoch = lease.epoch
        self.op_id: OpId | None = None  # copies what nobody else does
        self.runs: list[HostRun] = []  # held
        self.tail_block: int | None = None

    @property
    def is_copied(self) -> bool:
        """Whether an operation writes some of it, its own or another that had begun before."""
        is_landing = any(run.landing and run.node is not None for run in self.runs)
        return is_landing or self.op_id is not None
