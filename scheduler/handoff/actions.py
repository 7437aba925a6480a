"""Actions that the two sides of a hand-off hand out, and reports to the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from ...kvcache import CountError
from ..request import Request
from .gateway_messages import PrefillFailed
from .messages import AttemptKey, Commit, Message, NodeId, PartId


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts, in seconds of the driver's clock.

    Attributes:
        retry_s: interval at which an unanswered message, or a heartbeat, is sent again.
        silence_s: silence after which a peer counts as gone.
        transfer_s: longest duration of asking, of a pull, and from COMMIT to ACK.
        remember_s: how long D remembers an attempt that has ended. A later copy of its messages
            costs only a short reservation.

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
    """P: compute the prompt of an attempt into the lease that `PrefillSide.begin` returned."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Offer:
    """P: offer these blocks, in one group of layers, to D under this part id."""

    peer: NodeId
    part_id: PartId
    blocks: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """P: stop serving the offers of an attempt, and call `PrefillSide.fenced`.

    The call may be left out if the attempt has ended.

    Attributes:
        was_read: whether D has received all of them.
    """

    key: AttemptKey
    was_read: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """Blocks of P that a part has.

    Attributes:
        num_blocks, block_size: of P.
        num_skipped_tokens: leading tokens that D has already.
    """

    num_blocks: int
    block_size: int
    num_skipped_tokens: int


@dataclass(frozen=True, slots=True)
class Pull:
    """D: read a part from P into these blocks, in one of num_groups groups of layers.

    Attributes:
        blocks: blocks of D, for the tokens of the part that D lacks.
        sent: the blocks of P, whose size may differ.
    """

    peer: NodeId
    part_id: PartId
    blocks: tuple[int, ...]
    group: int
    num_groups: int
    sent: Sent


@dataclass(frozen=True, slots=True)
class CancelPull:
    """D: cancel a pull that is no longer needed, and still report its end."""

    part_id: PartId


@dataclass(frozen=True, slots=True)
class Start:
    """D: decode. The scheduler owns the request's lease now; its prompt is published.

    Attributes:
        request: as D admitted it.
        commit: has the first token, the sampling state and P's hits.
        num_cached_tokens: prompt tokens that D had in its cache, and P did not send.
    """

    key: AttemptKey
    request: Request
    commit: Commit
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Stop:
    """D: stop decoding an attempt, release its lease and call `DecodeSide.finished`."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """D reports that an attempt decodes; its request's output grows from now on.

    Attributes:
        num_cached_tokens: as in `Start`.
    """

    key: AttemptKey
    request: Request
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """D reports that a request has lost its blocks, and that its KV is in storage.

    Until D resumes it, another D may continue it.
    """

    key: AttemptKey
    request: Request


@dataclass(frozen=True, slots=True)
class Finished:
    """D reports that an attempt has finished; its request has all of its tokens."""

    key: AttemptKey
    request: Request


PrefillAction = Post | Compute | Offer | Withdraw | PrefillFailed
"""What P is to do."""
DecodeAction = Post | Pull | CancelPull | Start | Stop
"""What D is to do."""
