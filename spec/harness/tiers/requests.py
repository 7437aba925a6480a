"""Records of loading, parked and prefetching requests, and of where each prefix was last seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...model.ghost import Tag


@dataclass(slots=True)
class Load:
    """A request that is being loaded: a hit on the device, then blocks of the host, then a tail.

    Attributes:
        tail: number of tokens in a parked last block that is not whole, or 0.
        path: tags of the whole blocks that were hit or are loaded.
        tags: tags of the loaded tokens.
        left: prefixes moved off the host for it that are in no tier yet.
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
    """The saved KV of a parked request.

    Attributes:
        num_tokens: number of computed tokens.
        copy: the operation that saves the remaining blocks, or None.
        blocks: host blocks that the request may need.
        writers: operations that still write some of them: `copy` and others.
        failed: whether some blocks were not saved.
        is_void: whether a reset dropped its namespace.
        keeps_tail: whether a last block that is not whole can be loaded.
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
    """A lookup in storage, then a fetch of the found blocks to the host.

    Attributes:
        path: tags of all whole blocks of its tokens; the first `num_known` are cached.
        stage: the next event: "lookup", "found" (with `num_found`), "fetch" or "done".
        blocks: host blocks that it may need.
        held: cached prefixes that only the host had.
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
    """Location of each prefix at one time.

    Attributes:
        device, host, landing: block of each prefix.
        leaving: prefixes that were moved off the host and are in flight to the device.
        num_free: number of free host blocks.
        order: host blocks that can be dropped, in eviction order.
    """

    device: dict[Tag, int]
    host: dict[Tag, int]
    landing: dict[Tag, int]
    leaving: set[Tag]
    num_free: int
    order: tuple[int, ...]

    @property
    def idle(self) -> set[int]:
        """Host blocks that can be dropped."""
        return set(self.order)

    @property
    def duplicates(self) -> set[Tag]:
        """Prefixes on the device whose copy on the host can be dropped."""
        idle = self.idle
        return {tag for tag, block in self.host.items() if tag in self.device and block in idle}

    @property
    def anywhere(self) -> set[Tag]:
        """Prefixes in any tier or in flight."""
        return {*self.device, *self.host, *self.landing, *self.leaving}
