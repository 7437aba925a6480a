"""The simulated device: ghost memory, and steps that run when the test decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..rules.cache import C1
from ..rules.rule import Rule, require
from .ghost import POISON, UNWRITTEN, ContentError, GhostMemory, Tag


@dataclass(slots=True)
class Job:
    """A step in flight: it reads and writes through the block table of its launch.

    Attributes:
        request: the request whose tokens it computes.
        admission: number of the request's admission; a completion of an older one is late and
            does not concern the current one.
        table: the block table at its launch.
        reads: tags of the tokens before, which it reads when it runs.
        tags: tags that it writes.
        has_run: whether it has taken effect.
    """

    request: str
    admission: int
    table: list[int]
    reads: list[Tag]
    tags: list[Tag]
    has_run: bool = False

    @property
    def end(self) -> int:
        """Position after the last token that it writes."""
        return len(self.reads) + len(self.tags)


class Device:
    """Ghost memory behind a queue of launched steps, like an accelerator's stream.

    Steps take effect in the order of their launch, at the latest when a later one runs. The test
    decides when, in which order and how often completions are reported. A step reads and writes
    memory as it is when the step runs, not as it was at the launch.
    """

    def __init__(self, block_size: int) -> None:
        self.memory = GhostMemory(block_size)
        self.queue: list[Job] = []

    def run_through(self, job: Job, failing: bool = False) -> None:
        """Let all steps up to `job` take effect; `job` itself may fail."""
        while self.queue and not job.has_run:
            first = self.queue.pop(0)
            fails = failing and first is job
            self.read(first.request, first.table, first.reads)
            tags = [POISON] * len(first.tags) if fails else first.tags
            self.memory.write_sequence(first.table, [*first.reads, *tags], start=len(first.reads))
            first.has_run = True

    def append(self, table: Sequence[int], position: int, tag: Tag) -> None:
        """Write the KV of one token; what its block held behind it is lost."""
        size = self.memory.block_size
        index, offset = divmod(position, size)
        self.memory.write(table[index], offset, tag)
        self.memory.blocks[table[index]][offset + 1 :] = [UNWRITTEN] * (size - offset - 1)

    def read(self, who: str, table: Sequence[int], tags: Sequence[Tag], rule: Rule = C1) -> None:
        """Check that a request reads the KV of its own prefix, for all `tags`.

        Raises:
            Violation: `rule`, for the first token that holds other contents.
        """
        try:
            self.memory.read_sequence(table, tags)
        except ContentError as error:
            why = f"{who} reads token {error.position} in block {error.block}, which {error.found}"
            require(False, rule, "{}", why)
