"""Retries of failed attempts: each request gets exactly one answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from math import inf

from ..errors import RequestError
from ..handoff.messages import AttemptKey


@dataclass(frozen=True, slots=True)
class Begin:
    """Let P begin an attempt."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Cancel:
    """Let all nodes give up an attempt, if they know it."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer to a request.

    Attributes:
        tokens: all generated tokens; None if the request failed.
        reason: why it failed.
    """

    request_id: str
    tokens: tuple[int, ...] | None
    reason: str = ""


@dataclass(slots=True)
class _Request:
    """A request without an answer.

    Attributes:
        losing_since: when an attempt was lost first; None if none was.
        begins_at: when the next attempt begins; None while one is in progress.
        is_started: whether D decodes the attempt in progress.
        reason: answer if the request fails now.
    """

    deadline: float
    attempt: int = 0
    num_failed: int = 0
    losing_since: float | None = None
    begins_at: float | None = 0.0
    is_started: bool = False
    reason: str = "no attempt was begun"

    def is_trying(self, attempt: int) -> bool:
        """Whether this attempt is in progress."""
        return self.begins_at is None and attempt == self.attempt


class RequestRetrier:
    """Runs the attempts of requests one after another, and answers each request exactly once.

    Reports on an older attempt are ignored, and its nodes are told to stop. Before you report a
    node as lost, pass on all of its earlier reports.

    Attributes:
        num_lost: number of attempts that were lost with a node or a connection.
    """

    def __init__(
        self, *, max_attempts: int, backoff_s: float, request_s: float, lost_s: float = inf
    ) -> None:
        """Create one without requests.

        Args:
            max_attempts: failed attempts of a request, without those that D refused for a
                temporary reason, that moved, or that were lost with a node or a connection.
            backoff_s: pause between two attempts.
            request_s: time limit of a request, after which it has failed.
            lost_s: time after its first lost attempt from which on another lost one fails a
                request: it may be what ends the nodes.
        """
        self.num_lost = 0
        self._max_attempts = max_attempts
        self._lost_s = lost_s
        self._backoff_s = backoff_s
        self._request_s = request_s
        self._now = 0.0
        self._requests: dict[str, _Request] = {}  # by deadline, as all have the same time limit
        self._pausing: dict[str, _Request] = {}  # those whose next attempt has not begun
        self._actions: list[Begin | Cancel | Answer] = []

    @property
    def num_open(self) -> int:
        """Number of requests without an answer."""
        return len(self._requests)

    def take_actions(self) -> list[Begin | Cancel | Answer]:
        """Return the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def submit(self, request_id: str) -> None:
        """Add a request; never reuse its id.

        Raises:
            RequestError: if it is open.
        """
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} is open")
        request = _Request(self._now + self._request_s, begins_at=self._now)
        self._requests[request_id] = self._pausing[request_id] = request

    def cancel(self, request_id: str, reason: str = "cancelled by the client") -> None:
        """Answer a request as failed, now."""
        if request_id in self._requests:
            self._answer(request_id, None, reason)

    def started(self, key: AttemptKey) -> None:
        """Note that D decodes an attempt."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt):
            request.is_started = True
        else:
            self._actions.append(Cancel(key))

    def finished(self, key: AttemptKey, tokens: tuple[int, ...]) -> None:
        """Note that D has generated all tokens of an attempt."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt):
            self._answer(key.request_id, tokens, "")

    def prefill_failed(
        self,
        key: AttemptKey,
        reason: str,
        *,
        is_final: bool = False,
        is_busy: bool = False,
        is_lost: bool = False,
    ) -> None:
        """Note that P has given an attempt up. Ignored if D has started it; see `PrefillFailed`."""
        request = self._requests.get(key.request_id)
        if request is None or not request.is_trying(key.attempt) or request.is_started:
            return
        if is_lost:
            self._lose(key.request_id, request, reason)
        else:
            request.num_failed -= is_busy
            self._retry(key.request_id, request, reason, is_final)

    def put_off(self, key: AttemptKey, reason: str) -> None:
        """Note that no node could take an attempt: it begins again after the pause."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt):
            request.attempt -= 1  # no node knows it, so that there is nothing to cancel
            self._pause(key.request_id, request, reason)

    def decode_failed(self, key: AttemptKey, reason: str) -> None:
        """Note that D has stopped an attempt that it had started."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt):
            self._retry(key.request_id, request, reason)

    def moved(self, key: AttemptKey) -> None:
        """End the attempt in progress of an open request, and begin the next one at once."""
        request = self._requests[key.request_id]
        request.num_failed -= 1  # which it is not
        self._retry(key.request_id, request, "it was preempted")
        request.begins_at = self._now

    def prefill_lost(self, key: AttemptKey) -> None:
        """Note that the prefill node of an attempt is gone; a started attempt continues."""
        self.prefill_failed(key, "the prefill node was lost", is_lost=True)

    def decode_lost(self, key: AttemptKey) -> None:
        """Note that the decode node of an attempt is gone; it may have started unreported."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt):
            self._lose(key.request_id, request, "the decode node was lost")

    def tick(self, now: float) -> None:
        """Advance the clock: begin the attempts that are due, and fail requests that are late."""
        self._now = now
        late = takewhile(lambda each: now >= each[1].deadline, self._requests.items())
        for request_id, request in list(late):
            self._answer(request_id, None, f"not done in time: {request.reason}")
        for request_id, request in list(self._pausing.items()):
            if request.begins_at is not None and now >= request.begins_at:
                del self._pausing[request_id]
                request.begins_at = None
                request.attempt += 1
                request.is_started = False
                request.reason = f"attempt {request.attempt} has not ended"
                self._actions.append(Begin(AttemptKey(request_id, request.attempt)))

    def _lose(self, request_id: str, request: _Request, reason: str) -> None:
        """Retry an attempt that was lost with a node or a connection; it does not count."""
        self.num_lost += 1
        if request.losing_since is None:
            request.losing_since = self._now
        lost_for_s = self._now - request.losing_since
        is_final = lost_for_s >= self._lost_s
        if is_final:
            reason = f"attempts were lost for {lost_for_s:.0f} s: {reason}"
        request.num_failed -= 1
        self._retry(request_id, request, reason, is_final)

    def _retry(
        self, request_id: str, request: _Request, reason: str, is_final: bool = False
    ) -> None:
        request.num_failed += 1
        if is_final or request.num_failed >= self._max_attempts:
            self._answer(request_id, None, reason)
            return
        self._actions.append(Cancel(AttemptKey(request_id, request.attempt)))
        self._pause(request_id, request, reason)

    def _pause(self, request_id: str, request: _Request, reason: str) -> None:
        request.reason = reason
        request.begins_at = self._now + self._backoff_s
        self._pausing[request_id] = request

    def _answer(self, request_id: str, tokens: tuple[int, ...] | None, reason: str) -> None:
        request = self._requests.pop(request_id)
        self._pausing.pop(request_id, None)
        if request.attempt and tokens is None:
            self._actions.append(Cancel(AttemptKey(request_id, request.attempt)))
        self._actions.append(Answer(request_id, tokens, reason))
