"""A request: its prompt, its limits, its sampling parameters, and its progress."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

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


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling the next token.

    The random draw at a position depends only on `seed` and the position. It is the same in any
    batch, after a preemption, and on any engine.

    Attributes:
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: number of most likely tokens to keep; 0 keeps all.
        top_p: keep the smallest set of the remaining most likely tokens whose probabilities sum to
            at least this fraction.
        seed: seed of the draws, a uint32.

    Raises:
        RequestError: for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if not isinstance(value := getattr(self, name), int | float | np.number):
                raise RequestError(f"{name} must be a number, got {value!r}")
        for name in ("top_k", "seed"):
            if not _is_integer(value := getattr(self, name)):
                raise RequestError(f"{name} must be an integer, got {value!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k must be at least 0 and below 2**31, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed must be at least 0 and below 2**32, got {self.seed}")


GREEDY = SamplingParams()

MAX_TOKENS: Final = 2**31 - 1
"""Limit of prompt and output together, because positions are int32."""


class Request:
    """A prompt to continue by up to ``max_new_tokens`` tokens.

    Attributes:
        request_id: unique among active requests.
        prompt: read-only int32 array.
        output_tokens: tokens generated so far, including a stop token.
        status, finish_reason: see `RequestStatus`; the reason is None until the request ends.
        max_kv_tokens: number of tokens that need KV at the limit; the last generated token does
            not.
        num_computed: number of leading tokens whose KV is in the cache; 0 without a lease.
        num_scheduled: number of leading tokens that are computed, or will be by steps in flight.
        num_hit_tokens: prompt tokens found on the device at the first admission.
        num_host_hit_tokens, num_storage_hit_tokens: prompt tokens that came from the host at the
            first admission, and from storage by way of the host.
        num_preemptions: number of times that the request lost its blocks.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Tokens,
        max_new_tokens: int,
        *,
        priority: int = 0,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: Sequence[int] = (),
        namespace: bytes = b"",
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

        Raises:
            RequestError: for an empty prompt, a limit below 1, or an argument of the wrong type.
            TokenError: for a prompt that is not token ids.
        """
        prompt = as_tokens(prompt)
        _check_texts(request_id, namespace, sampling)
        _check_numbers(request_id, len(prompt), max_new_tokens, priority, stop_token_ids)
        self.request_id = request_id
        self.max_new_tokens = int(max_new_tokens)
        self.priority = priority
        self.sampling = sampling
        self.stop_token_ids = frozenset(stop_token_ids)
        self.namespace = namespace
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
    def is_prefilling(self) -> bool:
        """Whether tokens from before the last admission have yet to be computed."""
        return self.num_computed < self.num_prefill_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether a step in flight computes some of its tokens."""
        return self.num_scheduled > self.num_computed

    def append(self, token: int) -> FinishReason | None:
        """Append a generated token; return the reason if the request ends with it."""
        self.num_tokens += 1
        self.output_tokens.append(token)
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
    if num_prompt + max_new_tokens > MAX_TOKENS:
        raise RequestError(
            f"{name}: {num_prompt} prompt tokens and {max_new_tokens} new ones are more than "
            f"{MAX_TOKENS}"
        )
    if not isinstance(stop, Iterable) or not all(map(_is_integer, stop)):
        raise RequestError(f"{name}: stop_token_ids must be token ids, got {stop!r}")
