"""A request: its prompt, its limits, its sampling parameters, and its progress."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np

from ..kvcache import Int32Array, Lease, Match, Parked, Prefetch, Tokens, as_tokens
from .errors import RequestError

FinishReason = Literal["length", "stop", "abort"]


class RequestStatus(enum.Enum):
    """State of a request.

    ::

        WAITING ──┬──────────────► RUNNING ──► FINISHED
                  └──► LOADING ──►   │  ▲
                          ▲          ▼  │
                          └────── PREEMPTED

    A LOADING request holds blocks into which KV is copied from the host. A PREEMPTED request holds
    no blocks, and is resumed before new requests start. An active request in any state may become
    ABORTED.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_integer_type(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and kind is not bool


MIN_FACTOR: Final = 1e-6
MAX_FACTOR: Final = 1e6
"""Limits of what divides or multiplies logits. Products with logits up to 1e32 are float32 numbers,
and an infinite logit would make its row NaN."""

_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling the next token.

    The random draw at a position depends only on `seed` and the position. It is the same in any
    batch, after a preemption, and on any engine.

    Attributes:
        temperature: divisor of the logits, 1e-6 to 1e6; 0 takes the most likely token.
        top_k: number of most likely tokens to keep; 0 keeps all.
        top_p: keep the smallest set of the remaining most likely tokens whose probabilities sum to
            at least this fraction.
        seed: seed of the draws, a uint32.
        min_p: drop tokens whose probability is less than this fraction of the highest one, before
            top_k and top_p; 0 keeps all.
        repetition_penalty: divides the positive logits of tokens in prompt and output, and
            multiplies the negative ones, 1e-6 to 1e6; 1 changes nothing.
        presence_penalty: subtracted from the logit of each token in the output; -2 to 2.
        frequency_penalty: subtracted from it once for each time; -2 to 2.
        min_tokens: number of output tokens before which no stop token is chosen.
        num_continued: number of last prompt tokens that an earlier request generated, which this
            one continues: penalties and min_tokens count them as output.

    Raises:
        RequestError: for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    num_continued: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):  # nodes send Python's numbers
            if isinstance(value := getattr(self, field.name), np.number):
                object.__setattr__(self, field.name, value.item())
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            if not isinstance(value := getattr(self, name), int | float):
                raise RequestError(f"{name} must be a number, got {value!r}")
        for name in ("top_k", "seed", "min_tokens", "num_continued"):
            if not _is_integer(value := getattr(self, name)):
                raise RequestError(f"{name} must be an integer, got {value!r}")
        if self.temperature != 0 and not MIN_FACTOR <= self.temperature <= MAX_FACTOR:
            raise RequestError(
                f"temperature must be 0, or at least 1e-6 and at most 1e6, got {self.temperature}"
            )
        if not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k must be at least 0 and below 2**31, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed must be at least 0 and below 2**32, got {self.seed}")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be at least 0 and at most 1, got {self.min_p}")
        if not MIN_FACTOR <= self.repetition_penalty <= MAX_FACTOR:
            raise RequestError(
                "repetition_penalty must be at least 1e-6 and at most 1e6, "
                f"got {self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (value := getattr(self, name)) <= 2:
                raise RequestError(f"{name} must be at least -2 and at most 2, got {value}")
        if not 0 <= self.min_tokens < 2**31:
            raise RequestError(
                f"min_tokens must be at least 0 and below 2**31, got {self.min_tokens}"
            )
        if not 0 <= self.num_continued < 2**31:
            raise RequestError(
                f"num_continued must be at least 0 and below 2**31, got {self.num_continued}"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


GREEDY = SamplingParams()

MAX_LOGPROBS: Final = 20
"""Most likely tokens that are reported of each position, at most; as in OpenAI's API."""


class TokenLogprob(NamedTuple):
    """Log probability of a token, as the model computed it: before temperature and penalties.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token.
        top: token and log probability of the most likely tokens, as many as were asked for; this
            one need not be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


MAX_STOP_TOKEN_IDS: Final = 1024
"""Stop tokens that a server and nodes take, at most."""

MAX_TOKENS: Final = 2**31 - 1
"""Limit of prompt and output together, because positions are int32."""


class Guide(Protocol):
    """Says which tokens may follow an output: the state of a guided request, on the host.

    Attributes:
        has_failed: whether it does not know what may follow; the next token ends the request.
    """

    has_failed: bool

    def allow(self, output_tokens: Sequence[int], words: Int32Array) -> None:
        """Write the tokens that may come next, at least one.

        Args:
            output_tokens: the whole output so far; it begins with that of the last call.
            words: int32 ``[words]`` to write: a bit for each token of the model, 32 per word.
        """


class Request:
    """A prompt to continue by up to ``max_new_tokens`` tokens.

    Attributes:
        request_id: unique among active requests.
        prompt: read-only int32 array.
        output_tokens: tokens generated so far, including a stop token.
        late_token_ids: tokens that are not chosen before ``sampling.min_tokens``: those that stop.
        status, finish_reason: see `RequestStatus`; the reason is None until the request ends.
        max_kv_tokens: number of tokens that need KV at the limit; the last generated token does
            not.
        num_computed: number of leading tokens whose KV is in the cache; 0 without a lease.
        num_scheduled: number of leading tokens that are computed, or will be by steps in flight.
        num_hit_tokens: prompt tokens that were not computed at the first admission, as the device
            had their KV; the last one is always computed.
        num_host_hit_tokens, num_storage_hit_tokens: prompt tokens that were not computed either, as
            their KV came from the host, and from storage by way of the host.
        num_preemptions: number of times that the request lost its blocks.
        guide: restricts the output, or None.
        logprobs, prompt_logprobs: number of most likely tokens to report, or None for no records.
        output_logprobs: the record of each output token.
        prompt_records: None for the first token of the prompt, then the record of each one that was
            computed so far; empty if not asked for.
        sample_of: the first sample of the same prompt, or None.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Tokens,
        max_new_tokens: int,
        *,
        priority: int = 0,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: Collection[int] = (),
        namespace: bytes = b"",
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        guide: Guide | None = None,
        sample_of: Request | None = None,
    ) -> None:
        """Make a request from a copy of the prompt.

        Args:
            request_id: unique among active requests.
            prompt: token ids, at least one.
            max_new_tokens: limit of the output, at least 1.
            priority: for the policy `Priority`; lower numbers go first.
            sampling: sampling parameters; default: greedy.
            stop_token_ids: tokens that end the request.
            namespace: only requests of the same namespace share blocks; see `make_namespace`.
            logprobs: record the log probability of each output token, and of this many most likely
                ones; 0 to 20.
            prompt_logprobs: the same of each prompt token. The whole prompt is computed, without
                hits.
            guide: says which tokens the output may have. Its state is this request's alone.
            sample_of: a request with the same prompt and namespace. If it has computed the prompt
                when this one is admitted, this one copies its last block, where that is not whole.

        Raises:
            RequestError: for an empty prompt, a limit below 1, an argument of the wrong type, or a
                sample of another prompt.
            TokenError: for a prompt that is not token ids.
        """
        prompt = as_tokens(prompt)
        _check_texts(request_id, namespace, sampling)
        _check_numbers(request_id, len(prompt), max_new_tokens, priority, stop_token_ids)
        if sampling.num_continued >= len(prompt):
            raise RequestError(
                f"request {request_id!r}: num_continued must be less than the {len(prompt)} prompt "
                f"tokens, got {sampling.num_continued}"
            )
        for name, number in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if number is not None and not (_is_integer(number) and 0 <= number <= MAX_LOGPROBS):
                raise RequestError(
                    f"request {request_id!r}: {name} must be an integer from 0 to {MAX_LOGPROBS}, "
                    f"got {number!r}"
                )
        # Nodes send Python's numbers.
        self.logprobs = None if logprobs is None else int(logprobs)
        self.prompt_logprobs = None if prompt_logprobs is None else int(prompt_logprobs)
        self.guide = guide
        self.output_logprobs: list[TokenLogprob] = []
        self.prompt_records: list[TokenLogprob | None] = [None] * (prompt_logprobs is not None)
        self.request_id = request_id
        self.max_new_tokens = int(max_new_tokens)
        self.priority = int(priority)
        self.sampling = sampling
        is_plain = set(map(type, stop_token_ids)) <= {int}  # then samples share the set
        self.stop_token_ids = frozenset(stop_token_ids if is_plain else map(int, stop_token_ids))
        self.late_token_ids = self.stop_token_ids
        self.namespace = namespace
        self.sample_of = sample_of
        self.output_tokens: list[int] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_tokens = self.num_prompt_tokens = len(prompt)
        self.max_kv_tokens = len(prompt) + self.max_new_tokens - 1
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self.num_storage_hit_tokens = 0
        self.num_preemptions = 0
        self._tokens = np.empty(len(prompt) + self.max_new_tokens, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._num_written = len(prompt)  # the rest of the output is written when it is read
        self._read_only = self._tokens.view()
        self._read_only.flags.writeable = False
        self.prompt = self.tokens
        if sample_of is not None:
            _check_sample(self, sample_of)
        # State of the scheduler.
        self.arrival = 0
        self.has_begun = False  # set when the hits are counted
        self.num_prefill_tokens = 0
        self.num_lost_tokens = 0
        self.lease: Lease | None = None
        self.match: Match | None = None
        self.prefetch: Prefetch | None = None
        self.prefetch_is_put_off = False
        self.fetches_after: Prefetch | None = None
        self.parked: Parked | None = None
        self.num_copies = 0  # of its last block, in flight

    @property
    def tokens(self) -> Int32Array:
        """Prompt and output: a read-only int32 view."""
        written, stop = self._num_written, self.num_tokens
        if written < stop:
            self._tokens[written:stop] = self.output_tokens[written - self.num_prompt_tokens :]
            self._num_written = stop
        return self._read_only[:stop]

    def max_blocks(self, block_size: int) -> int:
        """Return the number of blocks that the request holds at its limit."""
        return -(-self.max_kv_tokens // block_size)

    @property
    def max_hit_tokens(self) -> int | None:
        """Most tokens that may be hits, or None: those after them have yet to get their records."""
        num_records = len(self.prompt_records)
        return num_records - 1 if 0 < num_records < self.num_prompt_tokens else None

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens from before the last admission have yet to be computed."""
        return self.num_computed < self.num_prefill_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether a step in flight computes some of its tokens, or copies a block of it."""
        return self.num_scheduled > self.num_computed or self.num_copies > 0

    def append(self, token: int) -> FinishReason | None:
        """Append a generated token; return the reason if the request ends with it."""
        self.num_tokens += 1
        self.output_tokens.append(token)
        if self.guide is not None and self.guide.has_failed:
            return "abort"
        if token in self.stop_token_ids:
            return "stop"
        return "length" if self.num_tokens > self.max_kv_tokens else None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_prompt_tokens} prompt "
            f"and {len(self.output_tokens)} of {self.max_new_tokens} output tokens)"
        )


def lease_of(request: Request) -> Lease:
    """Return the lease of a request that has one."""
    assert request.lease is not None, f"{request!r} has no lease"
    return request.lease


def _check_sample(request: Request, first: Request) -> None:
    """Check that two requests have the same prompt in the same namespace."""
    same = np.array_equal(request.prompt, first.prompt) and request.namespace == first.namespace
    if not same:
        raise RequestError(
            f"request {request.request_id!r} is a sample of {first.request_id!r}, which has "
            "another prompt or namespace"
        )


def _check_texts(request_id: object, namespace: object, sampling: object) -> None:
    """Check the types of the arguments that are not numbers."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a str, got {request_id!r}")
    if not isinstance(namespace, bytes):
        raise RequestError(f"request {request_id!r}: namespace must be bytes, got {namespace!r}")
    if not isinstance(sampling, SamplingParams):
        raise RequestError(
            f"request {request_id!r}: sampling must be SamplingParams, got {sampling!r}"
        )


def _check_numbers(
    request_id: str, num_prompt: int, max_new_tokens: int, priority: object, stop: object
) -> None:
    """Reject non-numbers and impossible lengths before allocating anything."""
    name = f"request {request_id!r}"
    if num_prompt == 0:
        raise RequestError(f"{name} has an empty prompt")
    for field, value in (("max_new_tokens", max_new_tokens), ("priority", priority)):
        if not _is_integer(value):
            raise RequestError(f"{name}: {field} must be an integer, got {value!r}")
    if max_new_tokens < 1:
        raise RequestError(f"{name}: max_new_tokens must be at least 1, got {max_new_tokens}")
    if num_prompt + int(max_new_tokens) > MAX_TOKENS:
        raise RequestError(
            f"{name}: {num_prompt} prompt tokens and {max_new_tokens} new ones are more than "
            f"{MAX_TOKENS}"
        )
    if not isinstance(stop, Iterable) or not all(map(_is_integer_type, set(map(type, stop)))):
        raise RequestError(f"{name}: stop_token_ids must be token ids, got {stop!r}")
