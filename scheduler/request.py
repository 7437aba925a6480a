"""A request: its prompt, its limits, and how far it has come."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ..kvcache import (
    Int32Array,
    Lease,
    Match,
    Parked,
    Prefetch,
    Tokens,
    as_tokens,
)
from .errors import RequestError

FinishReason = Literal["length", "stop", "abort"]


class RequestStatus(enum.Enum):
    """Where a request is.

    ::

        WAITING ──┬──────────────► RUNNING ──► FINISHED      LOADING: holds blocks, into which KV
                  └──► LOADING ──►   │  ▲                        is copied from the host
                          ▲          ▼  │                    PREEMPTED: holds none; is resumed
                          └────── PREEMPTED                      before new ones start

    It may become ABORTED from any of the first four.
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
    """How the next token is chosen.

    The draw for a place in a sequence depends on `seed` and that place alone, so it is the same
    in any batch, after a preemption, and on any engine.

    Attributes:
        temperature: 0 takes the most likely token; else logits are divided by it.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: of those, keep the smallest set of most likely tokens with at least this part of
            their probability.
        seed: of the draws, a uint32.

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
"""Of prompt and output together: positions are int32."""


class Request:
    """One prompt to be continued by up to `max_new_tokens` tokens.

    Attributes:
        request_id: unique among live requests.
        prompt: int32, never changed.
        output_tokens: what was generated so far; a stop token is included.
        status, finish_reason: see `RequestStatus`; the reason is None until the end.
        num_computed: leading tokens whose KV is in the cache; 0 without a lease.
        num_hit_tokens: prompt tokens found on the device when it was first admitted.
        num_host_hit_tokens, num_storage_hit_tokens: those that came from the host then, and from
            storage by way of the host.
        num_preemptions: how often it lost its blocks.
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
        """Make a request; the prompt is copied.

        Args:
            request_id: unique among live requests.
            prompt: token ids, at least one.
            max_new_tokens: at least 1.
            priority: for `Priority`: a lower number goes first.
            sampling: how tokens are chosen.
            stop_token_ids: any of these ends the request.
            namespace: requests share blocks only inside one; see `make_namespace`.

        Raises:
            RequestError: for an empty prompt, a limit below 1, or an argument of the wrong type.
            TokenError: for a prompt that is not int32.
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
        self.num_computed = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self.num_storage_hit_tokens = 0
        self.num_preemptions = 0
        self._tokens = np.empty(len(prompt) + self.max_new_tokens, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._read_only = self._tokens.view()
        self._read_only.flags.writeable = False
        self.prompt = self.tokens
        # Set and read by the scheduler.
        self.arrival = 0
        self.has_begun = False  # and its hits have been counted
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
        return self._read_only[: self.num_tokens]

    @property
    def max_kv_tokens(self) -> int:
        """How many tokens need KV if it runs to its limit: the last one generated does not."""
        return self.num_prompt_tokens + self.max_new_tokens - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens that it had at its admission have yet to be computed."""
        return self.num_computed < self.num_prefill_tokens

    def append(self, token: int) -> FinishReason | None:
        """Add a generated token; return the reason if the request ends with it."""
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.output_tokens.append(token)
        if token in self.stop_token_ids:
            return "stop"
        return "length" if len(self.output_tokens) == self.max_new_tokens else None

    def __repr__(self) -> str:
        """Name it and say how far it is."""
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_prompt_tokens} prompt "
            f"and {len(self.output_tokens)} of {self.max_new_tokens} output tokens)"
        )


def lease_of(request: Request) -> Lease:
    """Return what a request holds, which must be something."""
    assert request.lease is not None, f"{request!r} has no lease"
    return request.lease


def _check_texts(request_id: object, namespace: object, sampling: object) -> None:
    """Refuse what is no text, or no `SamplingParams`."""
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
    """Refuse numbers that are none, and lengths that cannot be, before anything is allocated."""
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
