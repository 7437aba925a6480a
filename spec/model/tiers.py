"""The model of a cache with a host tier: `CacheModel` and the owner of each host block."""

from __future__ import annotations

from collections.abc import Sequence

from ..rules import tiers as rules
from ..rules.rule import require
from .blocks import CACHED
from .cache import CacheModel
from .promises import Promises


class TierModel(CacheModel):
    """A `CacheModel` with host blocks, and with leases that end when an operation does.

    Attributes:
        host: owner of each host block that is not free: ``"new"`` until the operation that writes
            it is taken, then ``"op 5"`` until that is fenced, then ``"cache"``.
        read: host blocks that an operation still reads, with the operation.
        fenced_op: the operation that the current call fences.
        resetting: whether the current call is a reset.
    """

    host: dict[int, str]
    read: dict[int, str]
    fenced_op: str
    resetting: bool

    def __init__(self, num_blocks: int, block_size: int, promises: Promises) -> None:
        super().__init__(num_blocks, block_size, promises)
        self.host, self.read = {}, {}
        self.fenced_op, self.resetting = "", False

    # Leases that end with an operation

    def ends(self, name: str) -> None:
        """The lease of a request begins to end; blocks freed until `ended` belong to it."""
        self.actor, self.needed, self.ending = name, 0, True

    def ended(self, name: str) -> None:
        """The lease of a request has ended."""
        self.release(name)
        self.ending = False

    def detach_private(self, name: str, op: str) -> None:
        """A request ends while its private blocks are written; the operation owns them now."""
        holding = self.holdings[name]
        held = type(holding)([], holding.root, table=holding.take_private())
        for block in held.table:
            self.owner[block] = op
        self.holdings[op] = held

    def detach_all(self, name: str, op: str) -> None:
        """A request ends while it is loaded; the operation owns all its blocks now."""
        holding = self.holdings[op] = self.holdings[name]
        for block in holding.private:
            self.owner[block] = op
        self.holdings[name] = type(holding)([], holding.root)

    def forgotten(self, name: str) -> None:
        """A reset takes the shared blocks of an operation that continues without its request."""
        holding = self.holdings[name]
        private = holding.take_private()
        self.release(name)
        self.holdings[name] = type(holding)([], holding.root, table=private)

    def abandoned(self, op: str) -> None:
        """Free the blocks of an operation that continued without its request."""
        require(op in self.holdings, rules.T29, "{} is abandoned, and has ended before", op)
        self.release(op)

    def freed(self, blocks: Sequence[int]) -> None:
        """Blocks became free; in a reset also published ones."""
        if self.resetting:
            for block in blocks:
                if self.owner.get(block) == CACHED:
                    self._withdraw(block)
        super().freed(blocks)

    # Host blocks

    def host_allocated(self, blocks: Sequence[int]) -> None:
        """Free host blocks were allocated."""
        for block in blocks:
            owner = self.host.get(block)
            require(owner is None, rules.T31, "host block {} is taken from {}", block, owner)
            self.host[block] = "new"

    def host_freed(self, blocks: Sequence[int]) -> None:
        """Host blocks became free."""
        for block in blocks:
            owner = self.host.get(block)
            require(owner is not None, rules.T31, "host block {} is freed, and was free", block)
            require(
                not str(owner).startswith("op ") or owner == self.fenced_op,
                rules.T3,
                "host block {} is freed, and {} writes it",
                block,
                owner,
            )
            reader = self.read.get(block, self.fenced_op)
            require(
                reader == self.fenced_op,
                rules.T2,
                "host block {} is freed, and {} reads it",
                block,
                reader,
            )
            del self.host[block]

    def dispatched(self, op: str, destinations: Sequence[int], reads: Sequence[int]) -> None:
        """An operation begins to write host blocks and may read others at any time."""
        for block in destinations:
            owner = self.host.get(block)
            require(owner == "new", rules.T3, "{} writes host block {} of {}", op, block, owner)
            self.host[block] = op
        for block in reads:
            require(block in self.host, rules.T2, "{} reads host block {}, that is free", op, block)
            self.read[block] = op

    def written(self, op: str, blocks: Sequence[int]) -> None:
        """Host blocks of an operation were written and are not written any more."""
        for block in blocks:
            if self.host.get(block) == op:
                self.host[block] = "cache"

    def fenced(self, op: str) -> None:
        """An operation is fenced: it can no longer touch its host blocks."""
        self.written(op, list(self.host))
        self.read = {block: reader for block, reader in self.read.items() if reader != op}
