"""Who takes requests in: tries the hand-off again where it failed, and answers each once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RequestError
from .messages import AttemptKey


@dataclass(frozen=True, slots=True)
class Begin:
    """Have P begin an attempt."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Cancel:
    """Have both nodes give up an attempt, where they know it."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the client how its request ended.

    Attributes:
        tokens: what was generated; None: it failed, for the reason.
    """

    request_id: str
    tokens: tuple[int, ...] | None
    reason: str = ""


@dataclass(slots=True)
class _Request:
    deadline: float
    attempt: int = 0
    num_failed: int = 0
    begins_at: float | None = 0.0  # None: an attempt is under way
    is_started: bool = False
    reason: str = "no attempt was begun"

    def is_trying(self, attempt: int) -> bool:
        """Whether this attempt is the one under way."""
        return self.begins_at is None and attempt == self.attempt


class RequestRetrier:
    """One final answer per request, whatever fails.

    A request has one attempt at a time. What an older one reports is ignored, and its node told to
    stop. Who says so that a node is lost passes on first what has come from it.
    """

    def __init__(self, *, max_attempts: int, backoff_s: float, request_s: float) -> None:
        """Make a gateway.

        Args:
            max_attempts: of a request, without those for which D had no room.
            backoff_s: between two attempts.
            request_s: after so long a request is answered as failed.
        """
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._request_s = request_s
        self._now = 0.0
        self._requests: dict[str, _Request] = {}
        self._actions: list[Begin | Cancel | Answer] = []

    @property
    def num_open(self) -> int:
        """Requests without an answer."""
        return len(self._requests)

    def take_actions(self) -> list[Begin | Cancel | Answer]:
        """Hand out what is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def submit(self, request_id: str) -> None:
        """Take a request in; its id is never used again.

        Raises:
            RequestError: if it is open.
        """
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} is open")
        self._requests[request_id] = _Request(self._now + self._request_s, begins_at=self._now)

    def cancel(self, request_id: str, reason: str = "cancelled by the client") -> None:
        """Answer a request as failed, now."""
        if request_id in self._requests:
            self._answer(request_id, None, reason)

    def started(self, key: AttemptKey) -> None:
        """D decodes an attempt."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt):
            request.is_started = True
        else:
            self._actions.append(Cancel(key))

    def finished(self, key: AttemptKey, tokens: tuple[int, ...]) -> None:
        """D has generated all of an attempt's tokens."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt):
            self._answer(key.request_id, tokens, "")

    def prefill_failed(
        self, key: AttemptKey, reason: str, *, is_final: bool = False, is_busy: bool = False
    ) -> None:
        """P has given an attempt up; D may have started it all the same. See `Failed`."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt) and not request.is_started:
            request.num_failed -= is_busy
            self._retry(key.request_id, request, reason, is_final)

    def decode_failed(self, key: AttemptKey, reason: str) -> None:
        """D has stopped an attempt that it had started."""
        request = self._requests.get(key.request_id)
        if request is not None and request.is_trying(key.attempt):
            self._retry(key.request_id, request, reason)

    def prefill_lost(self, keys: Iterable[AttemptKey]) -> None:
        """A prefill node that had these attempts is gone, and with it what has not started."""
        for key in keys:
            self.prefill_failed(key, "the prefill node was lost")

    def decode_lost(self, keys: Iterable[AttemptKey]) -> None:
        """A decode node that had these is gone; what it has started, it may not have said."""
        for key in keys:
            self.decode_failed(key, "the decode node was lost")

    def tick(self, now: float) -> None:
        """Let time pass: begin what has waited, and answer what has waited too long."""
        self._now = now
        for request_id, request in list(self._requests.items()):
            if now >= request.deadline:
                self._answer(request_id, None, f"not done in time: {request.reason}")
            elif request.begins_at is not None and now >= request.begins_at:
                request.begins_at = None
                request.attempt += 1
                request.is_started = False
                request.reason = f"attempt {request.attempt} has not ended"
                self._actions.append(Begin(AttemptKey(request_id, request.attempt)))

    def _retry(
        self, request_id: str, request: _Request, reason: str, is_final: bool = False
    ) -> None:
        request.reason = reason
        request.num_failed += 1
        if is_final or request.num_failed >= self._max_attempts:
            self._answer(request_id, None, reason)
            return
        self._actions.append(Cancel(AttemptKey(request_id, request.attempt)))
        request.begins_at = self._now + self._backoff_s

    def _answer(self, request_id: str, tokens: tuple[int, ...] | None, reason: str) -> None:
        request = self._requests.pop(request_id)
        if request.attempt and tokens is None:
            self._actions.append(Cancel(AttemptKey(request_id, request.attempt)))
        self._actions.append(Answer(request_id, tokens, reason))
