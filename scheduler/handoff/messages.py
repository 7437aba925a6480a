"""What a prefill node (P) and a decode node (D) say to each other about one attempt of a request.

::

    P ── ASK ───────────────────────────► D     D matches its own tree, and admits
      ◄────────── GRANT (or REFUSE) ─────       what it lacks: blocks from one on
      ── SEND, SEND, ... ──────────────►        parts are there to be pulled, as they are computed
      ── COMMIT (first token) ─────────►        D publishes and decodes when it has every part
      ◄──────────────────────────── ACK ─       D reads nothing of P's any more

Either may say ABORT until then, and RENEW to show that it is alive. Any of these may come late,
twice, in another order or never: what a message says is true whenever it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from ..errors import RefusalReason
from ..request import GREEDY, SamplingParams

PROTOCOL_VERSION: Final = 2
"""Another after a change of any message: of its name, its fields, their types or their limits."""

MAX_PART_BLOCKS: Final = 32
"""P sends no more blocks in one part: D has staging memory for some parts, whatever a prompt."""

MAX_MISSING: Final = 1024
"""D names no more missing parts in one message; the rest comes with the next."""

MAX_REASON_CHARS: Final = 1024
"""D's own words in REFUSE are no longer."""

NodeId: TypeAlias = str
"""Names a node, prefill or decode, among all nodes of a deployment."""

BUSY: Final[frozenset[RefusalReason]] = frozenset(
    ("out of blocks", "out of slots", "others wait", "draining")
)
"""Not now: the same may be granted later, or elsewhere."""


class AttemptKey(NamedTuple):
    """Names an attempt, on all nodes.

    Attributes:
        request_id: as the gateway calls the request.
        attempt: of the request, counted from 1.
    """

    request_id: str
    attempt: int

    def __str__(self) -> str:
        """Name it for people."""
        return f"attempt {self.attempt} of request {self.request_id!r}"


class Ticket(NamedTuple):
    """Names one part of one attempt, for the transport; never used again.

    Attributes:
        key: the attempt.
        epoch: of P, which offers the part.
        peer_epoch: of D, which pulls it.
        grant: for which it was made.
        part: counted from 0.
    """

    key: AttemptKey
    epoch: int
    peer_epoch: int
    grant: int
    part: int


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens that P did not compute, by the tier that had them."""

    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What every message carries.

    Attributes:
        key: whom it is about; a newer attempt of a request ends an older one.
        epoch: of the sender; another after each restart.
        peer_epoch: of the receiver, as far as the sender knows; None: it has not heard of it.
        grant: number of D's grant, unique in D's epoch; 0: none yet.
        version: of the protocol.
    """

    key: AttemptKey
    epoch: int
    peer_epoch: int | None = None
    grant: int = 0
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Message:
    """Any message."""

    header: Header


@dataclass(frozen=True, slots=True)
class Ask(Message):
    """P to D: may I send you this?

    Attributes:
        prompt: int32 tokens, little-endian.
        namespace: requests share blocks only inside one.
        block_size: of P; D refuses another than its own.
        num_groups: into how many groups of layers P cuts each part of the prompt.
        max_new_tokens, priority: of the request; D admits by them.
    """

    prompt: bytes
    namespace: bytes
    block_size: int
    num_groups: int
    max_new_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """D to P: blocks are reserved; send those of the prompt from first_block on."""

    first_block: int


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """D to P: nothing is reserved, and why.

    ================  ==============================================================================
    reason            needed and available
    ================  ==============================================================================
    "out of blocks"   blocks, with what is kept for those that were admitted before
    "out of slots"    requests that run or are received
    "others wait"     requests that wait for room and go before, and 0
    "draining"        0 and 0: D takes nothing on
    "too large"       blocks, to the end of the request, and of the whole pool
    "block size"      the block sizes of P and D
    "malformed"       0 and 0: it is no request, or none for D's model; `detail` says why
    "version"         the versions of P and D
    ================  ==============================================================================
    """

    reason: RefusalReason
    needed: int
    available: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Send(Message):
    """P to D: a part can be pulled: some blocks of the prompt, in one group of layers."""

    part: int
    first_block: int
    num_blocks: int
    group: int


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """P to D: that was all; decode on from here.

    Attributes:
        num_parts: how many were sent.
        first_token: sampled by P.
        position: of that token in the sequence. With the seed, all of the sampling's state.
        hits: of P, by tier.
        sampling: of the request, with the seed of its draws.
        stop_token_ids: of the request.
    """

    num_parts: int
    first_token: int
    position: int
    hits: Hits
    sampling: SamplingParams = GREEDY
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """D to P: all parts have arrived, D decodes and reads nothing of P's any more."""


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Either: the attempt is over for me.

    Attributes:
        reason: for people.
        fenced: D alone: none of its pulls reads P's blocks any more.
    """

    reason: str
    fenced: bool


@dataclass(frozen=True, slots=True)
class Renew(Message):
    """Either: I am alive and at it. D names the parts that it lacks after COMMIT.

    Before GRANT, D says so of a prompt that it will answer for when a block that it lacks of it has
    arrived for another request.
    """

    missing: tuple[int, ...] = ()
