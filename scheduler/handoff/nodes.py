"""A simulated prefill node and decode node: real managers, and blocks that hold tags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...kvcache import CacheManager, Int32Array, Lease, OutOfBlocksError
from .actions import Start, Timing
from .decode_side import DecodeSide
from .messages import Hits, Key, Ticket
from .prefill_side import PrefillSide

VOCABULARY: Final = 50
TIMING: Final = Timing(retry_s=1, silence_s=5, transfer_s=12, remember_s=20)


class SimulationError(AssertionError):
    """The simulation has seen what must not happen."""


@dataclass(frozen=True)
class SimulationConfig:
    """Sizes of a simulation: blocks of each node, tokens of a block and a chunk, groups of layers.

    Attributes:
        max_attempts: of each request; see `FrontDesk`.
        timing: in ticks of the simulated clock.
    """

    prefill_blocks: int = 12
    decode_blocks: int = 12
    block_size: int = 2
    chunk: int = 5
    num_groups: int = 2
    max_attempts: int = 3
    timing: Timing = TIMING


def sample(seed: int, tokens: Int32Array) -> int:
    """Choose the token after some; it depends on the seed, its position and what is before."""
    return (seed * 31 + len(tokens) * 7 + int(tokens.sum())) % VOCABULARY


class GhostMemory:
    """What each block of a node holds: in each group of layers, the prefix written to it."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        self.tags: dict[tuple[int, int], bytes] = {}

    def write(self, lease: Lease, tokens: Int32Array, start: int, group: int) -> None:
        """Write the KV of the tokens from start on; never into what is shared."""
        size, table = self.block_size, lease.block_table
        first = max(start // size, lease.num_shared_blocks)
        for place in range(first, -(-len(tokens) // size)):
            self.tags[int(table[place]), group] = tokens[: (place + 1) * size].tobytes()

    def read(self, lease: Lease, tokens: Int32Array, group: int, who: str) -> None:
        """Read the KV of all of some tokens.

        Raises:
            SimulationError: if any of it is not that of their own prefix.
        """
        size, table = self.block_size, lease.block_table
        for place in range(-(-len(tokens) // size)):
            tag = self.tags.get((int(table[place]), group), b"")
            if not tag.startswith(tokens[: (place + 1) * size].tobytes()):
                raise SimulationError(f"{who} reads wrong content in its block {place}")


@dataclass
class _Prefill:
    lease: Lease
    tokens: Int32Array
    seed: int
    may_compute: bool = False
    done: int = 0
    group: int = 0


class PrefillNode:
    """P: computes prompts chunk by chunk, and serves what it has offered."""

    def __init__(self, config: SimulationConfig, epoch: int, now: int) -> None:
        self.config = config
        self.manager = CacheManager(config.prefill_blocks, config.block_size)
        self.memory = GhostMemory(config.num_groups, config.block_size)
        self.side = PrefillSide(
            self.manager, epoch=epoch, timing=config.timing, num_groups=config.num_groups
        )
        self.side.tick(now)
        self.work: dict[Key, _Prefill] = {}
        self.offers: dict[Ticket, tuple[list[tuple[int, int]], list[bytes]]] = {}
        self.withdrawn: list[Key] = []

    def begin(self, key: Key, prompt: Int32Array, seed: int) -> None:
        """Begin an attempt; see `PrefillSide.begin`."""
        self.work[key] = _Prefill(self.side.begin(key, prompt, seed=seed), prompt, seed)

    def may_compute(self, key: Key) -> None:
        """Let an attempt be computed: from its last token on, if all of it hit."""
        work = self.work[key]
        work.may_compute = True
        work.done = min(work.lease.num_ready_tokens, len(work.tokens) - 1)

    def computable(self) -> list[Key]:
        """Attempts with something to compute."""
        return [key for key, work in self.work.items() if work.may_compute]

    def compute(self, key: Key) -> None:
        """Compute one group of layers of one chunk."""
        work = self.work[key]
        stop = min(work.done + self.config.chunk, len(work.tokens))
        group = work.group
        self.memory.read(work.lease, work.tokens[: work.done], group, f"prefill of {key}")
        self.memory.write(work.lease, work.tokens[:stop], work.done, group)
        work.group = (group + 1) % self.config.num_groups
        if work.group == 0:
            work.done = stop
        self.side.computed(key, stop, group)
        if work.group == 0 and stop == len(work.tokens):
            del self.work[key]
            hits = Hits(device=min(work.lease.num_ready_tokens, stop - 1))
            self.side.sampled(key, sample(work.seed, work.tokens), hits)

    def offer(self, ticket: Ticket, blocks: tuple[int, ...], group: int) -> None:
        """Serve some blocks, in one group of layers, from now on."""
        places = [(block, group) for block in blocks]
        self.offers[ticket] = places, [self.memory.tags.get(place, b"") for place in places]

    def serve(self, ticket: Ticket) -> list[bytes] | None:
        """Return what is in the blocks of an offer; None if there is no such offer.

        Raises:
            SimulationError: if it is not what was offered: the blocks belong to others now.
        """
        if ticket not in self.offers:
            return None
        places, offered = self.offers[ticket]
        tags = [self.memory.tags.get(place, b"") for place in places]
        if tags != offered:
            raise SimulationError(f"{ticket} serves what was not offered")
        return tags

    def fence(self, key: Key) -> None:
        """Stop serving an attempt's offers, and say so."""
        self.withdrawn.remove(key)
        for ticket in [ticket for ticket in self.offers if ticket.key == key]:
            del self.offers[ticket]
        self.side.fenced(key)


@dataclass
class Decoding:
    """A request that D decodes."""

    lease: Lease
    tokens: Int32Array
    seed: int
    max_new_tokens: int
    outputs: list[int] = field(default_factory=list)


class DecodeNode:
    """D: decodes what has started, one token at a time, and caches it."""

    def __init__(self, config: SimulationConfig, epoch: int, now: int) -> None:
        self.config = config
        self.manager = CacheManager(config.decode_blocks, config.block_size)
        self.memory = GhostMemory(config.num_groups, config.block_size)
        self.side = DecodeSide(self.manager, epoch=epoch, timing=config.timing)
        self.side.tick(now)
        self.running: dict[Key, Decoding] = {}

    def start(self, start: Start, prompt: Int32Array, max_new_tokens: int) -> None:
        """Take over a lease; all of the prompt must be in it."""
        if any(key[0] == start.key[0] for key in self.running):
            raise SimulationError(f"{start.key} starts while an attempt of its request decodes")
        commit = start.commit
        running = Decoding(start.lease, prompt, commit.seed, max_new_tokens)
        self._read(start.key, running)
        self.running[start.key] = running
        self._append(running, commit.first_token)

    def _append(self, running: Decoding, token: int) -> None:
        running.tokens = np.append(running.tokens, np.int32(token))
        running.outputs.append(token)

    def _read(self, key: Key, running: Decoding) -> None:
        for group in range(self.config.num_groups):
            self.memory.read(running.lease, running.tokens, group, f"decode of {key}")

    def decode(self, key: Key) -> tuple[int, ...] | None:
        """Decode one token; return all of them if it was the last.

        Raises:
            OutOfBlocksError: if there is no room for it; the attempt has ended then.
        """
        running = self.running[key]
        if len(running.outputs) < running.max_new_tokens:
            try:
                self.manager.extend(running.lease, 1)
            except OutOfBlocksError:
                self.stop(key)
                raise
            for group in range(self.config.num_groups):
                self.memory.write(running.lease, running.tokens, len(running.tokens) - 1, group)
            self._read(key, running)
            self._append(running, sample(running.seed, running.tokens))
        if len(running.outputs) < running.max_new_tokens:
            return None
        self.manager.publish(running.lease, running.tokens[:-1])
        self.stop(key)
        return tuple(running.outputs)

    def stop(self, key: Key) -> None:
        """End an attempt, and give its blocks back."""
        running = self.running.pop(key, None)
        if running is not None:
            self.manager.release(running.lease)
            self.side.finished(key)
