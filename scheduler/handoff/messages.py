"""Messages between a prefill node (P) and a decode node (D) about one attempt of a request.

::

    P ── ASK ───────────────────────────► D     D matches its own tree and reserves blocks
      ◄────────── GRANT (or REFUSE) ─────       from the first block that D lacks
      ── SEND, SEND, ... ──────────────►        parts that D can pull, as P computes them
      ── COMMIT (first token) ─────────►        D has every part: it publishes and decodes
      ◄──────────────────────────── ACK ─       D no longer reads P's blocks

Until ACK, either node may send ABORT, or RENEW as a heartbeat. Messages may arrive late, twice,
out of order or never. The content of a message is true whenever it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from ..errors import RefusalReason
from ..request import GREEDY, Request, SamplingParams

PROTOCOL_VERSION: Final = 3
"""Version of all messages: raise it with any change of a name, a field, a type or a limit."""

MAX_PART_BLOCKS: Final = 32
"""Most blocks of P in one part; it bounds D's staging memory, however long the prompt is."""

MAX_MISSING: Final = 1024
"""Most missing parts that one RENEW names; the next RENEW names the rest."""

MAX_REASON_CHARS: Final = 1024
"""Most characters of ``Refuse.detail``."""

NodeId: TypeAlias = str
"""Name of a prefill or decode node, unique in a deployment."""

BUSY: Final[frozenset[RefusalReason]] = frozenset(
    ("out of blocks", "out of slots", "others wait", "draining")
)
"""Temporary reasons: D may grant the same request later, or another node may grant it now."""


class AttemptKey(NamedTuple):
    """Identifies an attempt on all nodes.

    Attributes:
        request_id: the gateway's name for the request.
        attempt: number of the attempt of this request, from 1.
    """

    request_id: str
    attempt: int

    def __str__(self) -> str:
        """Return the name used in messages to people."""
        return f"attempt {self.attempt} of request {self.request_id!r}"


class PartId(NamedTuple):
    """Identifies one part of one attempt to the transport; never reused.

    Attributes:
        key: the attempt.
        epoch: P's epoch; P offers the part.
        peer_epoch: D's epoch; D pulls the part.
        grant: the grant that the part belongs to.
        part: number of the part, from 0.
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

    @classmethod
    def of(cls, request: Request) -> Hits:
        """Return the hits of a computed request."""
        return cls(
            request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens
        )


@dataclass(frozen=True, slots=True)
class Header:
    """Fields that every message carries.

    Attributes:
        key: the attempt; a newer attempt of a request ends an older one.
        epoch: the sender's epoch, which changes at each restart.
        peer_epoch: the receiver's epoch as the sender knows it; None before it is known.
        grant: number of D's grant, unique in D's epoch; 0 before the grant.
        version: protocol version.
    """

    key: AttemptKey
    epoch: int
    peer_epoch: int | None = None
    grant: int = 0
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages."""

    header: Header


@dataclass(frozen=True, slots=True)
class Ask(Message):
    """P asks D to reserve blocks for a prompt.

    Attributes:
        prompt: little-endian int32 tokens.
        namespace: requests share blocks only within a namespace.
        block_size: P's block size; a part has whole blocks of this size.
        num_groups: number of layer groups that P sends separately.
        max_new_tokens, priority: of the request; D's admission uses them.
    """

    prompt: bytes
    namespace: bytes
    block_size: int
    num_groups: int
    max_new_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """D has reserved blocks; P sends the rest of the prompt.

    Attributes:
        first_block: first block that D lacks, of D's size.
        block_size: D's block size; each part but the last ends where blocks of both sizes end.
    """

    first_block: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """D has reserved nothing.

    ================  ==============================================================================
    reason            needed and available
    ================  ==============================================================================
    "out of blocks"   blocks, including the reserve of the requests admitted before
    "out of slots"    running and receiving requests
    "others wait"     number of requests that wait for room ahead of it, and 0
    "draining"        0 and 0: D admits nothing
    "too large"       blocks of the request at its full length, and blocks of the pool
    "block size"      block sizes of P and D: a part would need too many blocks to end with both
    "malformed"       0 and 0: not a request, or not one that D's model can take; see ``detail``
    "version"         protocol versions of P and D
    ================  ==============================================================================
    """

    reason: RefusalReason
    needed: int
    available: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Send(Message):
    """P serves a part: consecutive blocks of the prompt, of P's size, in one group of layers."""

    part: int
    first_block: int
    num_blocks: int
    group: int


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """P has sent every part, and the state from which D decodes on.

    Attributes:
        num_parts: number of parts sent.
        first_token: token that P sampled.
        position: position of that token in the sequence; with the seed, the whole sampling state.
        hits: P's hits, by tier.
        sampling: of the request, including the seed.
        stop_token_ids: of the request.
        first_record: log probabilities of the first token, if the request asks for them; see
            ``records``. D reports as many most likely tokens of the others.
    """

    num_parts: int
    first_token: int
    position: int
    hits: Hits
    sampling: SamplingParams = GREEDY
    stop_token_ids: tuple[int, ...] = ()
    first_record: bytes = b""


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """D has every part, decodes, and no longer reads P's blocks."""


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """The sender has given the attempt up.

    Attributes:
        reason: text for people.
        fenced: from D only: none of its pulls reads P's blocks any more.
        is_lost: from D only: it has not heard P.
    """

    reason: str
    fenced: bool
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Renew(Message):
    """The sender is alive and still works on the attempt.

    Attributes:
        missing: from D after COMMIT: parts that D has not received. Before GRANT, D sends RENEW
            with no parts while it defers its answer, until another request has received a block
            that this prompt needs.
    """

    missing: tuple[int, ...] = ()
