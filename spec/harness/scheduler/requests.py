"""Requests of a scheduler's world, the deterministic model that continues them, and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ...adapters.scheduler import Reason, Submission
from ...model.ghost import Tag, next_tag
from ..engine import Config

Phase: TypeAlias = Literal["waiting", "running", "preempted", "ended"]


def root_tag(namespace_index: int) -> Tag:
    """Tag of the empty prefix; the hash of an int, unlike bytes, is the same in each process."""
    return hash((namespace_index, -1))


def next_token(tag: Tag, alphabet: int) -> int:
    """The deterministic model: the token that follows a prefix."""
    return (tag >> 11) % alphabet


class Tracked:
    """A request as the specification knows it.

    Attributes:
        tokens: prompt and generated tokens; `tags` has the tag of each prefix.
        outputs, reason: the complete output of the model, and why it ends.
        order: rank in the policy.
        computed: leading tokens with KV in the cache; `reached` is the maximum so far.
        target: number of tokens at the last admission, up to which the request prefills.
        hit: cached tokens at the last admission.
    """

    __slots__ = (
        "computed", "hit", "max_kv_tokens", "name", "num_output", "num_preemptions", "order",
        "outputs", "phase", "reached", "reason", "submission", "tags", "target", "tokens",
    )  # fmt: skip

    def __init__(
        self, submission: Submission, namespace_index: int, arrival: int, config: Config
    ) -> None:
        self.submission = submission
        self.name = submission.name
        self.tokens = list(submission.prompt)
        self.order: tuple[int, ...] = (arrival,)
        if config["policy"] == "priority":
            self.order = (submission.priority, arrival)
        self.max_kv_tokens = len(self.tokens) + submission.max_new_tokens - 1
        self.tags: list[Tag] = []
        tag = root_tag(namespace_index)
        for token in self.tokens:
            tag = next_tag(tag, token)
            self.tags.append(tag)
        self.outputs: list[int] = []
        self.reason: Reason = "length"
        self._generate(config["alphabet"])
        self.phase: Phase = "waiting"
        self.num_output = self.num_preemptions = 0
        self.computed = self.reached = self.target = self.hit = 0

    def _generate(self, alphabet: int) -> None:
        """Generate the complete output of the model, and its tags."""
        submission = self.submission
        while len(self.outputs) < submission.max_new_tokens:
            token = next_token(self.tags[-1], alphabet)
            self.outputs.append(token)
            if token in submission.stop:
                self.reason = "stop"
                return
            self.tags.append(next_tag(self.tags[-1], token))

    @property
    def prefilling(self) -> bool:
        """Whether tokens from before the admission are not computed yet."""
        return self.computed < self.target

    @property
    def is_live(self) -> bool:
        """Whether the request has not ended."""
        return self.phase != "ended"

    def shared_blocks(self, block_size: int) -> int:
        """Number of leading blocks that were hit, or computed and thus published."""
        return max(self.hit, self.computed) // block_size

    def append_next(self) -> Reason | None:
        """Add the token that follows; return the reason if the request ends with it."""
        self.tokens.append(self.outputs[self.num_output])
        self.num_output += 1
        return self.reason if self.num_output == len(self.outputs) else None


@dataclass
class Books:
    """Expected counters, to compare with those that the scheduler reports."""

    steps: int = 0
    admitted: int = 0
    resumed: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0


@dataclass(slots=True)
class Step:
    """One step, as observed from outside.

    Attributes:
        chunks: computed requests, with start and length.
        running: running requests, in order of admission.
        growth: blocks that decoding requests need for the step.
        admitted, preempted: requests that changed state.
        available: available blocks before the step.
        available_now: available blocks after its plan.
    """

    chunks: list[tuple[Tracked, int, int]]
    running: list[Tracked]
    growth: int
    available: int
    available_now: int
    admitted: list[Tracked] = field(default_factory=list)
    preempted: list[Tracked] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(length for _, _, length in self.chunks)
