"""Where each prefix is, and where it may be after an operation.

A prefix is published on the device or not, and it is in one place below::

    host ◄─── offloading ◄─── device        offloading: a copy to the host is in flight
      └─────► promoting ───► device        promoting: moved off the host, in flight to the device

A `Step` says where each prefix is after an operation if the host has room for all of them. A state
is allowed if it is that one, less the copies that may be dropped for room. The step contains the
choices that are not the cache's own, such as which copies fail.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, TypeAlias

from ...rules import tiers as rules
from ...rules.rule import Rule, require
from ..ghost import Tag

Place: TypeAlias = Literal["host", "offloading", "promoting", "nowhere"]
Places: TypeAlias = tuple[tuple[Place, ...], Rule]
"""The places below the device where a prefix may be, and the rule that says so."""

NOWHERE: Final[Places] = ("nowhere",), rules.T15


@dataclass
class Prefixes:
    """The prefixes that end with a whole block, by tag.

    Attributes:
        content: the tags of the tokens in the last block.
        parent: the tag of the prefix without the last block.
        path: the tags of all prefixes of it, itself the last.
        depth: the number of blocks before the last one.
        key: the storage key.
    """

    content: dict[Tag, list[Tag]] = field(default_factory=dict)
    parent: dict[Tag, Tag] = field(default_factory=dict)
    path: dict[Tag, list[Tag]] = field(default_factory=dict)
    depth: dict[Tag, int] = field(default_factory=dict)
    key: dict[Tag, bytes] = field(default_factory=dict)

    def learn(self, root: Tag, tags: Sequence[Tag], block_size: int, keys: list[bytes]) -> None:
        """Enter the whole blocks of a token sequence.

        Args:
            root: the tag of the empty prefix.
            tags: the tag of the prefix that ends at each token.
            block_size: tokens of a block.
            keys: the storage key of each whole block; empty without storage.
        """
        path = tags[block_size - 1 :: block_size]
        for index, tag in enumerate(path):
            if tag not in self.content:
                self.content[tag] = list(tags[index * block_size : (index + 1) * block_size])
                self.parent[tag] = path[index - 1] if index else root
                self.path[tag], self.depth[tag] = list(path[: index + 1]), index
                self.key[tag] = keys[index] if keys else b""

    def root_of(self, tag: Tag) -> Tag:
        """Return the tag of the empty prefix of a prefix."""
        return self.parent[self.path[tag][0]]

    def paths_to(self, tags: Iterable[Tag]) -> Iterator[Tag]:
        """Yield the prefixes before each of `tags`, and `tags` themselves."""
        for tag in tags:
            yield from self.path.get(tag, ())


@dataclass(frozen=True)
class Residency:
    """Where each prefix is at one time.

    Attributes:
        device, host, offloading: the block of each prefix.
        promoting: prefixes that were moved off the host and are not on the device yet.
        num_free: number of free host blocks.
        order: host blocks that can be dropped, in eviction order.
    """

    device: Mapping[Tag, int]
    host: Mapping[Tag, int]
    offloading: Mapping[Tag, int]
    promoting: frozenset[Tag]
    num_free: int
    order: Sequence[int]

    @cached_property
    def below(self) -> dict[Tag, Place]:
        """The place of each prefix below the device."""
        found: dict[Tag, Place] = dict.fromkeys(self.promoting, "promoting")
        found.update(dict.fromkeys(self.offloading, "offloading"))
        found.update(dict.fromkeys(self.host, "host"))
        return found

    @cached_property
    def anywhere(self) -> set[Tag]:
        """Prefixes in any tier or in flight."""
        return {*self.device, *self.below}

    @cached_property
    def idle(self) -> dict[Tag, int]:
        """Prefixes whose copy on the host can be dropped, in eviction order, with its block."""
        tags = {block: tag for tag, block in self.host.items()}
        return {tags[block]: block for block in self.order if block in tags}


@dataclass
class Step:
    """An operation: the state before it, and where it moves prefixes below the device.

    Attributes:
        before: the state before it.
        write: the write policy.
        moves: the places of the prefixes that it moves; the others stay (see `expected`).
        takes_room: whether it takes host blocks, so that others may be dropped for them.
        is_eviction: whether it drops host blocks only for those that leave the device.
        otherwise: the rule that an unexpected copy breaks.
    """

    before: Residency
    write: str
    moves: dict[Tag, Places] = field(default_factory=dict)
    takes_room: bool = False
    is_eviction: bool = False
    otherwise: Rule = rules.T17

    # What an operation moves

    def copy_out(self, tags: Iterable[Tag]) -> None:
        """Copies of some prefixes to the host begin, as far as the host has none.

        If it had one and no other reads it, the publication of the prefix may have ended it before.
        """
        before = self.before
        for tag in tags:
            place = before.below.get(tag, "nowhere")
            ends = place == "promoting" or (self.write == "exclusive" and tag in before.idle)
            if place == "nowhere" or (ends and tag not in before.device):
                self.moves[tag] = ("offloading",), rules.T16

    def end_out(self, results: Mapping[Tag, bool], prefixes: Prefixes) -> None:
        """Copies to the host end; those that follow a failed one may be given up with it."""
        bad: set[Tag] = set()
        for tag in sorted(results, key=prefixes.depth.__getitem__):
            if not results[tag]:
                self.moves[tag] = NOWHERE
            elif prefixes.parent[tag] in bad:
                self.moves[tag] = ("host", "nowhere"), rules.T15
            else:
                self.moves[tag] = ("host",), rules.T14
                continue
            bad.add(tag)

    def move_in(self, tags: Iterable[Tag]) -> None:
        """Copies are moved off the host, and stay there only while something else reads them."""
        for tag in tags:
            held: tuple[Place, ...] = () if tag in self.before.idle else ("host",)
            self.moves[tag] = ("promoting", *held), rules.T25

    def end_in(self, tags: Iterable[Tag]) -> None:
        """Prefixes that were moved off the host have arrived on the device, or are lost."""
        self.moves.update(dict.fromkeys(self.before.promoting.intersection(tags), NOWHERE))

    def fetch(self, path: Sequence[Tag], num_known: int, num_good: int) -> list[Tag]:
        """Blocks of a path arrive from storage behind the known ones; return those that are new."""
        if not self.before.anywhere.issuperset(path[:num_known]):
            return []
        new = [tag for tag in path[num_known:][:num_good] if tag not in self.before.anywhere]
        self.moves.update(dict.fromkeys(new, (("host",), rules.T5)))
        return new

    def reset(self, kept: Collection[Tag]) -> None:
        """All operations end, and all prefixes go but the kept ones."""
        stays: dict[Place, tuple[Place, ...]] = {
            "host": ("host",), "promoting": ("promoting", "nowhere"), "offloading": ("nowhere",)
        }  # fmt: skip
        for tag in self.before.anywhere:
            place = self.before.below.get(tag, "offloading")  # of the device alone: not demoted
            self.moves[tag] = stays[place] if tag in kept else ("nowhere",), rules.T40

    # The state after it

    def expected(self, device: Collection[Tag]) -> dict[Tag, Places]:
        """The places of each prefix if the host has unlimited room.

        Args:
            device: the prefixes on the device after the operation.
        """
        evicted = self.before.device.keys() - device if self.write != "through" else ()
        expected: dict[Tag, Places] = {tag: (("offloading",), rules.T20) for tag in evicted}
        for tag, place in self.before.below.items():
            has_arrived = place == "promoting" and tag in device
            expected[tag] = NOWHERE if has_arrived else ((place,), rules.T24)
        expected.update(self.moves)
        if self.write == "exclusive":  # there a copy goes when nothing reads it
            for tag in expected.keys() & device:
                places, rule = expected[tag]
                if "host" in places:
                    expected[tag] = (*places, "nowhere"), rule
        return expected

    def allow(self, after: Residency, prefixes: Prefixes, held: Collection[Tag]) -> set[Tag]:
        """Check that the state after the operation is an allowed one.

        Args:
            after: the state after it.
            prefixes: the parent and depth of each prefix.
            held: prefixes that a prefetch holds.

        Returns:
            The prefixes that were dropped for room and are in no tier now; what follows them is
            gone with them and not among them.
        """
        self._check_order(after)
        dropped = self._missing(after, prefixes)
        for tag, rule in dropped.items():
            depth, was_found = prefixes.depth[tag], self.before.below.get(tag) == "host"
            require(tag not in held, rules.T5, "block {} is gone, which a prefetch follows", depth)
            can_drop = rule is rules.T20 or (rule is rules.T24 and was_found)
            require(can_drop and self.takes_room, rule, "block {} of a path is nowhere", depth)
        require(not dropped or not after.num_free, rules.T24, "{} blocks were dropped, and {} host "
                "blocks are free", len(dropped), after.num_free)  # fmt: skip
        lost = dropped.keys() - after.device.keys()
        if self.takes_room and self.write != "through":
            self._check_demoted(after, lost)
        return lost

    def _missing(self, after: Residency, prefixes: Prefixes) -> dict[Tag, Rule]:
        """The prefixes that should be below the device and are not, each with its rule."""
        expected = self.expected(after.device)
        for tag, place in after.below.items():
            require(tag in prefixes.depth, rules.T2, "a prefix is {} that nobody computed", place)
            places, rule = expected.get(tag, (("nowhere",), self.otherwise))
            if place == "host" and "offloading" in places:
                rule = rules.T3
            elif place != "host" and rule is rules.T15:
                rule = rules.T16
            require(place in places, rule, "block {} of a path is {}, not {}", prefixes.depth[tag],
                    place, " or ".join(places))  # fmt: skip
        return {
            tag: rule
            for tag, (places, rule) in expected.items()
            if "nowhere" not in places
            and tag not in after.below
            and (prefixes.depth[tag] == 0 or prefixes.parent[tag] in after.anywhere)
        }

    def _check_order(self, after: Residency) -> None:
        """Check that an eviction drops copies in the order in which they go."""
        if self.write == "through" or not self.is_eviction:
            return
        left = self.before.device.keys() - after.device.keys()  # their copies go last
        kept = [tag in after.host for tag in self.before.idle if tag not in left]
        require(kept == sorted(kept), rules.T22, "of {} host blocks in order, these are kept: {}",
                len(kept), [place for place, is_kept in enumerate(kept) if is_kept])  # fmt: skip

    def _check_demoted(self, after: Residency, lost: Collection[Tag]) -> None:
        """Check that as much as possible of what left the device is on its way to the host."""
        before = self.before
        copies = after.idle.keys() & after.device.keys() if lost else ()
        require(not copies, rules.T21, "{} blocks are lost, and {} copies of what the device has "
                "are kept", len(lost), len(copies))  # fmt: skip
        left = before.device.keys() - after.device.keys()
        nowhere = left - after.anywhere - before.below.keys()
        room = after.num_free + len(after.idle.keys() - left)
        require(not nowhere or not room, rules.T20, "{} blocks left the device for nowhere, with "
                "room for {}", len(nowhere), room)  # fmt: skip
