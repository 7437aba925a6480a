"""The simulated device: ghost memory, and steps that run when the test decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..rules.cache import C1
from ..rules.rule import Violation
from .ghost import Tag

UNWRITTEN: Final = 0  # a prefix has this tag with probability 2**-64
POISON: Final = 1  # the contents after a failed step


@dataclass(slots=True)
class Job:
    """A step in flight: it reads and writes through the block table of its launch.

    Attributes:
        name: name of the request and a number, such as ``"r1.2"``.
        request: the request whose tokens it computes.
        admission: number of the request's admission; a completion of an older one is late and
            does not concern the current one.
        table: the block table at its launch.
        reads: tags of the tokens before, which it reads when it runs.
        tags: tags that it writes.
        has_run: whether it has taken effect.
    """

    name: str
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
    """Ghost memory behind a queue, like an accelerator's stream.

    Steps take effect in the order of their launch, at the latest when a later one runs. The test
    decides when, in which order and how often completions are reported. A step reads and writes
    memory as it is when the step runs, not as it was at the launch.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.memory: dict[int, list[Tag]] = {}
        self.queue: list[Job] = []

    def launch(self, job: Job) -> None:
        """Enqueue a step."""
        self.queue.append(job)

    def run_through(self, job: Job, failing: bool = False) -> None:
        """Let all steps up to `job` take effect; `job` itself may fail."""
        while self.queue and not job.has_run:
            first = self.queue.pop(0)
            fails = failing and first is job
            self.read(first.request, first.table, first.reads)
            for position, tag in enumerate(first.tags, len(first.reads)):
                self.write(first.table, position, POISON if fails else tag)
            first.has_run = True

    def write(self, table: Sequence[int], position: int, tag: Tag) -> None:
        """Write the KV of one token."""
        index, offset = divmod(position, self.block_size)
        block = table[index]
        if block not in self.memory:
            self.memory[block] = [UNWRITTEN] * self.block_size
        self.memory[block][offset] = tag

    def append(self, table: Sequence[int], position: int, tag: Tag) -> None:
        """Write the KV of one token; what its block held behind it is lost."""
        self.write(table, position, tag)
        index, offset = divmod(position, self.block_size)
        self.memory[table[index]][offset + 1 :] = [UNWRITTEN] * (self.block_size - offset - 1)

    def read(self, name: str, table: Sequence[int], tags: Sequence[Tag]) -> None:
        """Check that a request reads the KV of its own prefix, for all `tags`.

        Raises:
            Violation: C1, for the first token that holds other contents.
        """
        size = self.block_size
        for index in range(-(-len(tags) // size)):
            wanted = tags[index * size : (index + 1) * size]
            block = table[index]
            found = self.memory.get(block)
            if found is None or found[: len(wanted)] != wanted:
                raise _wrong(name, block, index * size, wanted, found or [])


def _wrong(
    name: str, block: int, start: int, wanted: Sequence[Tag], found: Sequence[Tag]
) -> Violation:
    found = [*found, *[UNWRITTEN] * len(wanted)]
    offset = next(i for i, tag in enumerate(wanted) if found[i] != tag)
    what = {UNWRITTEN: "was never written", POISON: "holds what a failed step left"}
    state = what.get(found[offset], "holds another prefix")
    return Violation(C1, f"{name} reads token {start + offset} in block {block}, which {state}")
