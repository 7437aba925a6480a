"""Protocol of a hand-off under test: its nodes, its gateway, and what they tell and are told.

The specification owns the network, the clock, the memories and the transports. It passes messages
on without looking into their `Message.body`; the other fields of a message are what a rule needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

GATEWAY: Final = "gateway"
"""Name of the gateway among the nodes."""

RETRY: Final = 1
SILENCE: Final = 5
TRANSFER: Final = 12
REMEMBER: Final = 20
BACKOFF: Final = 2
"""Times of a hand-off, in ticks of the clock: until a message is repeated, until a silent peer
counts as gone, the longest wait for a transfer, until an ended attempt is forgotten, and the pause
between two attempts."""

VOCABULARY: Final = 50
"""Number of different tokens."""

Role: TypeAlias = Literal["prefill", "decode"]
Tokens: TypeAlias = tuple[int, ...]


def request_of(attempt: str) -> str:
    """Return the client's name for the request of an attempt: the part before the first dot."""
    return attempt.partition(".")[0]


@dataclass(frozen=True, eq=False)
class Message:
    """A message between nodes, or between a node and the gateway.

    Attributes:
        kind: ``"RunPrefill"``, which begins an attempt, ``"NodeStatus"``, a sign of life,
            ``"DeliveryAck"``, ``"Ask"``, ``"Grant"``, ``"Refuse"``, ``"Commit"``, ``"Abort"``,
            ``"PrefillFailed"``, or any other word.
        attempt: unique name of the attempt: the client's name of its request, a dot, and more.
        body: the message itself, for the receiver.
        is_repeated: whether it is repeated until a DeliveryAck answers it.
        of: kind of the message that a DeliveryAck acknowledges.
        grant, first_block: number of a grant, and the first block that D lacks.
        position, hits: of a Commit: length of the prompt, and how many of its tokens P had cached.
        is_final: whether a PrefillFailed says that every other attempt would fail too.
        has_no_room: whether a Refuse or a PrefillFailed is for lack of room now.
        reports: of a message from D to the gateway: the attempts of which it has tokens before
            their ends.
        follows: whether it asks D for such reports on its attempt.
        tokens: of a RunPrefill: the prompt that P is to compute; of a Preempted, with which D says
            that an attempt waits for blocks: all tokens that it has generated.
        cancels: whether it ends its attempt on the node that gets it.
        is_failure: whether it says that a node has given the attempt up, and neither for lack of
            room nor because the other node is lost.
    """

    kind: str
    attempt: str = ""
    body: Any = None
    is_repeated: bool = False
    of: str = ""
    grant: int = 0
    first_block: int = 0
    position: int = 0
    hits: int = 0
    is_final: bool = False
    has_no_room: bool = False
    is_failure: bool = False
    reports: tuple[str, ...] = ()
    follows: bool = False
    tokens: Tokens = ()
    cancels: bool = False


class Part(NamedTuple):
    """A part of a prompt's KV, which P offers and D pulls.

    Attributes:
        attempt: the attempt.
        number: number of the part.
        key: identifies the part for ever: equal for P and D, and different from all other parts.
    """

    attempt: str
    number: int
    key: Hashable


class Send(NamedTuple):
    """A node or the gateway sends a message."""

    to: str
    message: Message


class Begun(NamedTuple):
    """P begins an attempt."""

    attempt: str


class Offer(NamedTuple):
    """P serves these blocks, in one group of layers."""

    part: Part
    blocks: Sequence[int]
    group: int


class Withdraw(NamedTuple):
    """P stops to serve the offers of an attempt, and waits for the fence."""

    attempt: str


class Pull(NamedTuple):
    """D reads a part from P into these blocks, in one group of layers.

    Attributes:
        num_skipped: leading tokens of the part that D has and does not write.
    """

    peer: str
    part: Part
    blocks: Sequence[int]
    group: int
    num_skipped: int = 0


class CancelPull(NamedTuple):
    """D needs a pull no more."""

    part: Part


class Started(NamedTuple):
    """D has all of a prompt's KV, in the blocks of the table, and decodes.

    Attributes:
        num_cached: tokens that D had cached.
        hits: tokens that P had cached on its device, as D heard.
    """

    attempt: str
    table: Sequence[int]
    num_cached: int
    hits: int


class Ended(NamedTuple):
    """D reports the end of an attempt that has started, and uses its blocks no more."""

    attempt: str


Action: TypeAlias = Send | Begun | Offer | Withdraw | Pull | CancelPull | Started | Ended


@dataclass(frozen=True)
class Chunk:
    """Tokens from ``start`` to ``stop - 1`` that a step computes.

    Attributes:
        name: of the attempt.
        tokens: the tokens of the request that are known; steps in flight may sample others, up to
            ``stop``.
        table: its blocks; the first num_shared are published, and are not written.
        seed: of the request.
        namespace: of the request; see `Gateway.submit`.
    """

    name: str
    start: int
    stop: int
    tokens: Tokens
    table: Sequence[int]
    num_shared: int
    seed: int
    namespace: int


class Admitted(NamedTuple):
    """A request that got its blocks in a step.

    Attributes:
        name: as of a `Chunk`.
        tokens: all tokens of the request.
        num_hit: tokens found on the device.
        namespace: of the request.
    """

    name: str
    tokens: Tokens
    num_hit: int
    namespace: int


class Plan(NamedTuple):
    """The decisions of a step.

    Attributes:
        chunks: what to compute; without any, there is no step.
        admitted: requests that got their blocks.
        preempted: names of requests that lost their blocks.
    """

    chunks: Sequence[Chunk]
    admitted: Sequence[Admitted]
    preempted: Sequence[str]


class Copy(NamedTuple):
    """A copy from the device to the host tier, or back.

    Attributes:
        id: for `Node.copied`.
        is_down: whether it goes to the host.
    """

    id: Hashable
    is_down: bool
    sources: Sequence[int]
    destinations: Sequence[int]


class StorageOperation(NamedTuple):
    """An operation on storage, which all nodes share.

    Attributes:
        id: for `Node.copied`.
        kind: whether it looks keys up, stores host blocks, or fetches values into host blocks.
        blocks: host blocks, one for each key; none for a lookup.
        keys: names of the values.
    """

    id: Hashable
    kind: Literal["lookup", "store", "fetch"]
    blocks: Sequence[int]
    keys: Sequence[str]


class NodeCounts(NamedTuple):
    """What a node says of itself.

    Attributes:
        num_blocks, available: blocks in total, and those that are free or can be evicted.
        held: leases and parked requests.
        num_open: open attempts.
        num_unacked: reports that the gateway has not acknowledged.
        hits: tokens counted as hits of computed attempts, in all tiers.
        on_device: tokens of the blocks that the cache counts as hits of these attempts.
    """

    num_blocks: int
    available: int
    held: int
    num_open: int
    num_unacked: int
    hits: int
    on_device: int


class Node(Protocol):
    """A prefill or decode node: its scheduler, cache, hand-offs and reports, without I/O."""

    def status(self) -> Message:
        """Return a sign of life, and of room, which the node sends to the gateway every tick."""

    def receive(self, source: str, message: Message) -> None:
        """Take a message from the gateway or another node."""

    def tick(self, now: int) -> None:
        """Advance the clock."""

    def take_actions(self) -> Sequence[Action]:
        """Return what to do since the last call, in order."""

    def take_copies(self) -> Sequence[Copy | StorageOperation]:
        """Return the copies since the last call; their sources are read now."""

    def copied(self, copy: Hashable, ok: Sequence[bool]) -> None:
        """Report the end of a copy: for each block or key, whether it was copied or found."""

    def storage_keys(self, tokens: Tokens, namespace: int) -> Sequence[str]:
        """Return the names in storage of the full blocks of tokens; none without storage."""

    def schedule(self) -> Plan:
        """Plan a step; it is in flight until its `update`."""

    def update(self, tokens: Sequence[int]) -> Sequence[bool]:
        """End the first step in flight, with the token after each chunk; -1 within a prompt.

        Returns:
            Whether each chunk counts: not if its request ended while the step was in flight.
        """

    def drain(self) -> None:
        """Give up all hand-offs, as the weights change, and begin none."""

    def reset(self) -> bool:
        """Drop all KV, and begin hand-offs again.

        Returns:
            False if a hand-off holds blocks, or a step is in flight.
        """

    def evict(self, num_blocks: int) -> None:
        """Evict blocks that nobody uses."""

    def num_free(self) -> int:
        """Return the number of blocks that hold nothing."""

    def num_cached(self, tokens: Tokens, namespace: int) -> int:
        """Return how many leading tokens the device has published; changes nothing."""

    def num_evicted(self) -> int:
        """Return the number of blocks evicted from the device since the node was made."""

    def cached_blocks(self, tokens: Tokens, namespace: int) -> Sequence[int]:
        """Return the blocks of these tokens, as of a request that hits them."""

    def has_work(self) -> bool:
        """Return whether a step would be of use."""

    def counts(self) -> NodeCounts:
        """Return the counts of the node."""

    def check(self) -> None:
        """Let the cache check its own invariants."""


class PrefillNode(Node, Protocol):
    """A node that computes prompts and offers their blocks."""

    def wrote(self, group: int) -> None:
        """Report that a group of layers of the step is written, except the last one."""

    def fenced(self, attempt: str) -> None:
        """Report that nobody reads the offers of an attempt any more."""


class DecodeNode(Node, Protocol):
    """A node that pulls offered blocks and decodes."""

    def pulled(self, part: Part) -> None:
        """Report that a part has arrived."""

    def pull_failed(self, part: Part, fenced: bool) -> None:
        """Report that a pull has failed; unless it is fenced, it may still write."""

    def pull_fenced(self, part: Part) -> None:
        """Report that a pull writes no more."""


class Answer(NamedTuple):
    """The gateway's answer to a client.

    Attributes:
        name: the client's name of the request.
        tokens: generated tokens; None if the request failed.
        reason: why it failed.
        hits: tokens of the prompt that P had cached, in all tiers.
    """

    name: str
    tokens: Tokens | None
    reason: str
    hits: int


class Told(NamedTuple):
    """The gateway tells a client its tokens before the answer.

    Attributes:
        name: the client's name of the request.
        tokens: all tokens so far.
    """

    name: str
    tokens: Tokens


class Gateway(Protocol):
    """The gateway: it finds nodes for each request, and answers it."""

    def submit(
        self,
        name: str,
        prompt: Tokens,
        max_new_tokens: int,
        seed: int,
        namespace: int,
        stop: Tokens,
    ) -> None:
        """Take a client's request.

        It shares KV only with others of its namespace, 0 or 1, and ends with a token of ``stop``.
        """

    def cancel(self, name: str) -> None:
        """End a request at its client's wish, without an answer."""

    def receive(self, source: str, epoch: int, message: Message) -> None:
        """Take a message of one epoch of a node."""

    def tick(self, now: int) -> None:
        """Advance the clock."""

    def take_messages(self) -> Sequence[Send]:
        """Return the messages since the last call, in order."""

    def take_told(self) -> Sequence[Told]:
        """Return what clients were told since the last call; nothing if they do not stream."""

    def take_answers(self) -> Sequence[Answer]:
        """Return the answers since the last call."""

    def epoch_of(self, node: str) -> int | None:
        """Return the epoch of a node that the gateway knows."""

    def state_of(self, node: str) -> Hashable:
        """Return what the gateway knows of a node, and its counts: equal if nothing changed."""

    def num_open(self) -> int:
        """Return the number of requests without an answer."""

    def num_unacked(self) -> int:
        """Return the number of messages that no node has acknowledged."""

    def loads(self) -> dict[str, int]:
        """Return the load that is counted on each node."""


class HandoffSystem(Protocol):
    """Makes the nodes and gateways of one world."""

    max_overtaken: int
    """Largest number of later requests that D admits before a refused one without regard to it."""

    depth: int
    """Most steps that D has in flight; P has one."""

    def gateway(self, epoch: int, now: int) -> Gateway:
        """Make a gateway without memory."""

    def node(self, name: str, role: Role, epoch: int, now: int) -> Node:
        """Make a `PrefillNode` or a `DecodeNode` without memory.

        Its epoch is higher than in any earlier life.
        """


HandoffFactory: TypeAlias = Callable[[dict[str, Any]], HandoffSystem]
"""Makes the system from a configuration, as ``radixkv.spec.harness.handoff.configuration`` draws
it."""
