"""The model of a cache with a host tier: that of the cache, and who has each host block."""

from __future__ import annotations

from collections.abc import Sequence

from ..rules import tiers as rules
from ..rules.rule import require
from .blocks import EVICTED, FREE
from .cache import CacheModel


class TierModel(CacheModel):
    """A `CacheModel` that also hears what happens without a request asking for it.

    Attributes:
        host: who has each host block that is not free: ``"new"`` until the operation that is to
            write it is taken, then ``"op 5"`` until that is fenced, then ``"cache"``.
        read: host blocks that an operation still reads, and which one.
        lifted: the operation that is being fenced by the present call.
        resetting: whether the present call is a reset.
    """

    host: dict[int, str]
    read: dict[int, str]
    lifted: str
    resetting: bool

    def __init__(self, num_blocks: int, block_size: int, lru: bool, exactly: bool) -> None:
        super().__init__(num_blocks, block_size, lru, exactly)
        self.host, self.read = {}, {}
        self.lifted, self.resetting = "", False

    # A lease ends where nobody asked for it

    def ends(self, name: str) -> None:
        """The lease of a request ends here: what is freed now was its."""
        self.actor, self.needed, self.ending = name, 0, True

    def ended(self, name: str) -> None:
        """It has ended."""
        self.release(name)
        self.ending = False

    def orphan(self, name: str, heir: str) -> None:
        """A request ends while its private blocks are written: an operation has them now."""
        holding = self.holdings[name]
        held = type(holding)([], holding.root, private=holding.private)
        for block in held.private:
            self.owner[block] = heir
        holding.private = []
        self.holdings[heir] = held

    def bequeath(self, name: str, heir: str) -> None:
        """A request ends while it is loaded: an operation has all that it held now."""
        holding = self.holdings[heir] = self.holdings[name]
        for block in holding.private:
            self.owner[block] = heir
        self.holdings[name] = type(holding)([], holding.root)

    def forgotten(self, name: str) -> None:
        """An operation that had inherited blocks has only its private ones, from here on."""
        holding = self.holdings[name]
        private, holding.private = holding.private, []
        self.release(name)
        self.holdings[name] = type(holding)([], holding.root, private=private)

    def abandoned(self, op: str) -> None:
        """What an operation wrote for nobody is free."""
        require(op in self.holdings, rules.T29, "{} is abandoned, and has ended before", op)
        self.release(op)

    def freed(self, blocks: Sequence[int]) -> None:
        """Blocks belong to nobody now; in a reset, those that were published, too."""
        if self.resetting:
            for block in blocks:
                owner = self.owner.get(block, FREE)
                if not isinstance(owner, str):
                    del self.published_at[owner]
                    self.owner[block] = EVICTED
        super().freed(blocks)

    # Host blocks

    def host_allocated(self, blocks: Sequence[int]) -> None:
        """Host blocks that were free are taken."""
        for block in blocks:
            owner = self.host.get(block)
            require(owner is None, rules.T31, "host block {} is taken from {}", block, owner)
            self.host[block] = "new"

    def host_freed(self, blocks: Sequence[int]) -> None:
        """Host blocks are free."""
        for block in blocks:
            owner = self.host.get(block)
            require(owner is not None, rules.T31, "host block {} is freed, and was free", block)
            require(
                not str(owner).startswith("op ") or owner == self.lifted,
                rules.T3,
                "host block {} is freed, and {} writes it",
                block,
                owner,
            )
            reader = self.read.get(block, self.lifted)
            require(
                reader == self.lifted,
                rules.T2,
                "host block {} is freed, and {} reads it",
                block,
                reader,
            )
            del self.host[block]

    def dispatched(self, op: str, destinations: Sequence[int], reads: Sequence[int]) -> None:
        """An operation begins to write host blocks, and to read others at any time."""
        for block in destinations:
            owner = self.host.get(block)
            require(owner == "new", rules.T3, "{} writes host block {} of {}", op, block, owner)
            self.host[block] = op
        for block in reads:
            require(block in self.host, rules.T2, "{} reads host block {}, that is free", op, block)
            self.read[block] = op

    def written(self, op: str, blocks: Sequence[int]) -> None:
        """Some host blocks of an operation are written, and nobody writes them any more."""
        for block in blocks:
            if self.host.get(block) == op:
                self.host[block] = "cache"

    def fenced(self, op: str) -> None:
        """Nobody uses the host blocks of an operation any more."""
        self.written(op, list(self.host))
        self.read = {block: reader for block, reader in self.read.items() if reader != op}
