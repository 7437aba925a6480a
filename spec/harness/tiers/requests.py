"""Records of loading, parked and prefetching requests, and of where each prefix was last seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...model.ghost import Tag


@dataclass(slots=True)
class Load:
    """A request that is being loaded: a hit on the device, then blocks of the host, then a tail.

    Attributes:
        tail: the tokens of a last block that is not whole, and was parked; 0 if there is none.
        path: of its whole blocks, those of the hit and those that are loaded.
        tags: of the tokens that are loaded.
        left: the prefixes that the host gave up for it, and that are nowhere yet.
    """

    copy: int
    num_hit: int
    num_host: int
    tail: int
    path: list[Tag]
    tags: list[Tag]
    left: set[Tag]


@dataclass(slots=True)
class Parked:
    """What a parked request left.

    Attributes:
        num_tokens: those that were computed.
        copy: the operation that saves what no other did, or None.
        blocks: host blocks that it may need.
        writers: the operations that still write some of them: that one, and others.
        failed: whether some were not saved.
        is_void: whether a reset has dropped its namespace.
        keeps_tail: whether its last block can be loaded if that is not whole.
    """

    where: str
    path: list[Tag]
    num_tokens: int
    copy: int | None = None
    blocks: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)
    failed: bool = False
    is_void: bool = False
    keeps_tail: bool = True


@dataclass(slots=True)
class Prefetch:
    """A question to storage, and then its answer on the way to the host.

    Attributes:
        path: of all whole blocks of its tokens; the first num_known are cached.
        stage: what comes next: "lookup", "found" (with num_found), "fetch" or "done".
        blocks: host blocks that it may need.
        held: of the cached ones those that only the host had.
    """

    path: list[Tag]
    num_known: int
    stage: str = "lookup"
    num_found: int = 0
    is_wanted: bool = True
    is_old: bool = False
    blocks: set[int] = field(default_factory=set)
    held: list[Tag] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """Where each prefix was, at one time.

    Attributes:
        device, host, landing: the block of each prefix.
        leaving: the prefixes that were moved towards the device, and are not there yet.
        num_free: free host blocks.
        order: host blocks that can be dropped, the next one first.
    """

    device: dict[Tag, int]
    host: dict[Tag, int]
    landing: dict[Tag, int]
    leaving: set[Tag]
    num_free: int
    order: tuple[int, ...]

    @property
    def idle(self) -> set[int]:
        """The host blocks that can be dropped."""
        return set(self.order)

    @property
    def spare(self) -> set[Tag]:
        """The prefixes whose copy on the host can be dropped, and the device has them too."""
        idle = self.idle
        return {tag for tag, block in self.host.items() if tag in self.device and block in idle}

    @property
    def anywhere(self) -> set[Tag]:
        """The prefixes that are somewhere."""
        return {*self.device, *self.host, *self.landing, *self.leaving}
