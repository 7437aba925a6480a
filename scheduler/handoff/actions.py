"""What the two sides of a hand-off want done, by whoever drives them."""

from __future__ import annotations

from dataclasses import dataclass

from ...kvcache import CountError
from ..request import Request
from .messages import (
    AttemptKey,
    Commit,
    Message,
    NodeId,
    Ticket,
)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long anybody waits, in seconds of the driver's clock.

    Attributes:
        retry_s: after this a message without an answer is sent again, or a sign of life.
        silence_s: a peer not heard of for so long has gone.
        transfer_s: the longest that asking, or a pull, or COMMIT until ACK may take.
        remember_s: how long D knows an attempt that has ended; later copies of its messages cost
            a reservation that is soon given back, and nothing else.

    Raises:
        CountError: unless ``0 < retry_s < silence_s <= transfer_s`` and ``remember_s >= 0``.
    """

    retry_s: float = 1.0
    silence_s: float = 5.0
    transfer_s: float = 30.0
    remember_s: float = 60.0

    def __post_init__(self) -> None:
        if not (0 < self.retry_s < self.silence_s <= self.transfer_s and self.remember_s >= 0):
            raise CountError(
                "needs 0 < retry_s < silence_s <= transfer_s and remember_s >= 0, got "
                f"{self.retry_s}, {self.silence_s}, {self.transfer_s} and {self.remember_s}"
            )


@dataclass(frozen=True, slots=True)
class Post:
    """Send a message to a peer."""

    peer: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Compute:
    """P: compute the prompt of an attempt, into the lease that `begin` returned."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Offer:
    """P: let D read these blocks, in one group of layers, by this ticket."""

    peer: NodeId
    ticket: Ticket
    blocks: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """P: stop serving what was offered for an attempt, and report `PrefillSide.fenced`.

    Of an attempt that has ended nobody waits for the report.

    Attributes:
        was_read: D has said that all of it has arrived.
    """

    key: AttemptKey
    was_read: bool = False


@dataclass(frozen=True, slots=True)
class Pull:
    """D: read a part from P into these blocks, in one group of layers."""

    peer: NodeId
    ticket: Ticket
    blocks: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True)
class CancelPull:
    """D: nobody wants a pull any more; report its end all the same."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Start:
    """D: decode. The request's lease is the scheduler's from now on; its prompt is published.

    Attributes:
        request: as D admitted it.
        commit: has the first token, the state of the sampling and P's hits.
        num_own_tokens: how many tokens of the prompt were in D's cache, and not sent.
    """

    key: AttemptKey
    request: Request
    commit: Commit
    num_own_tokens: int


@dataclass(frozen=True, slots=True)
class Stop:
    """D: stop decoding an attempt, release its lease and call `DecodeSide.finished`."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """P: the attempt has come to nothing, as far as P knows.

    Attributes:
        is_final: no attempt can do better.
        is_busy: D has refused it for now, and nothing is wrong.
    """

    key: AttemptKey
    reason: str
    is_final: bool = False
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """D: an attempt decodes; its request's output grows from now on.

    Attributes:
        num_own_tokens: as in `Start`.
    """

    key: AttemptKey
    request: Request
    num_own_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """D: an attempt has ended well; its request has all of its tokens."""

    key: AttemptKey
    request: Request


@dataclass(frozen=True, slots=True)
class Stopped:
    """D: an attempt that had started has come to nothing."""

    key: AttemptKey
    reason: str


PrefillAction = Post | Compute | Offer | Withdraw | Failed
DecodeAction = Post | Pull | CancelPull | Start | Stop
