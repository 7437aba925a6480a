"""Steps in flight: they run when the test decides."""

from __future__ import annotations

from dataclasses import dataclass

from ...model.ghost import POISON, GhostMemory, Tag


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


class Stream:
    """A queue of launched steps before a device, like an accelerator's stream.

    Steps take effect in the order of their launch, at the latest when a later one runs. The test
    decides when, in which order and how often completions are reported. A step reads and writes
    memory as it is when the step runs, not as it was at the launch.
    """

    def __init__(self, device: GhostMemory) -> None:
        self.device = device
        self.queue: list[Job] = []

    def run_through(self, job: Job, failing: bool = False) -> None:
        """Let all steps up to `job` take effect; `job` itself may fail."""
        while self.queue and not job.has_run:
            first = self.queue.pop(0)
            fails = failing and first is job
            self.device.read_sequence(first.table, first.reads, first.request)
            tags, start = [POISON] * len(first.tags) if fails else first.tags, len(first.reads)
            self.device.write_sequence(first.table, [*first.reads, *tags], start)
            first.has_run = True
