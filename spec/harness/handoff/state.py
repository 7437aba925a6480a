"""The state of a hand-off's world: nodes, messages, pulls and copies, all with names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from ...adapters.cache import call
from ...adapters.handoff import (
    GATEWAY,
    REMEMBER,
    SILENCE,
    Chunk,
    Copy,
    DecodeNode,
    Gateway,
    HandoffFactory,
    Message,
    Node,
    Part,
    PrefillNode,
    StorageOperation,
)
from ...model.handoff import DecodeModel, Place, PrefillModel, Request, Requests, Tokens, untagged
from ...rules.handoff import X25
from ..engine import Config, Operation

System = TypeVar("System")


class _Guard:
    """Calls a node or a gateway; its exceptions break a rule."""

    def __init__(self, guarded: Any) -> None:
        self.guarded = guarded

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            return call(self.guarded, name, arguments, X25)

        setattr(self, name, ask)
        return ask


def guard(system: System) -> System:
    """Return a node or gateway whose exceptions break X25."""
    return cast(System, _Guard(system))


def guarded(system: Any) -> Any:
    """Return the node or gateway behind `guard`, for tests."""
    return system.guarded


@dataclass(eq=False)
class Envelope:
    """A message in the network.

    Attributes:
        epoch: of the sender.
        sent_at: time at which it was sent.
        is_held: whether it stays in the network until it is released.
    """

    name: str
    source: str
    to: str
    epoch: int
    sent_at: int
    message: Message
    is_held: bool = False

    @property
    def is_status(self) -> bool:
        """Whether it is only a sign of life."""
        return self.message.kind == "NodeStatus"


@dataclass(eq=False)
class Transfer:
    """A pull that is not fenced.

    Attributes:
        node, peer: D, and P.
        num_pieces: pieces in which it travels.
        arrived: pieces whose bytes were written.
        ended: whether its end was reported to D.
        hangs: whether it ends only when it is cancelled.
        may_fence: whether it has ended or was cancelled.
        num_skipped: leading tokens of the part that are not written.
        crashed_source: contents of P's blocks when it crashed, which may still be written.
    """

    name: str
    node: str
    peer: str
    part: Part
    blocks: list[int]
    group: int
    num_skipped: int
    num_pieces: int
    arrived: set[int] = field(default_factory=set)
    ended: bool = False
    hangs: bool = False
    may_fence: bool = False
    crashed_source: list[Tokens] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all pieces have arrived."""
        return len(self.arrived) == self.num_pieces

    @property
    def is_torn(self) -> bool:
        """Whether some pieces have arrived, and others have not."""
        return bool(self.arrived) and not self.is_whole


@dataclass(eq=False)
class CopyInFlight:
    """A copy between tiers, or an operation on storage, with the contents that it has read."""

    copy: Copy | StorageOperation
    content: dict[Place, Tokens]


@dataclass(eq=False)
class LiveNode:
    """A node since its last start.

    Attributes:
        system: the node under test, for questions; operations call `target`.
        model: its memories, and what it has published.
        flights: chunks of each step in flight, in order; num_written groups of layers of the first
            one are written.
        withdrawn: attempts whose offers are still served and wait for the fence.
        copies: copies in flight, by name.
        num_faults: number of its copies and lookups that have failed, and of its evictions and
            resets.
        is_draining: whether it is to reset its cache.
        has_evicted, is_touched: whether it has evicted blocks, and was called, in this operation.
        room: blocks that it could give to a request refused earlier, after its last actions.
    """

    name: str
    epoch: int
    system: Node
    model: PrefillModel | DecodeModel
    flights: deque[Sequence[Chunk]] = field(default_factory=deque)
    num_written: int = 0
    withdrawn: list[str] = field(default_factory=list)
    copies: dict[str, CopyInFlight] = field(default_factory=dict)
    num_copies: int = 0
    num_faults: int = 0
    is_draining: bool = False
    has_evicted: bool = False
    is_touched: bool = True
    room: int = 0

    @property
    def target(self) -> Node:
        """The node under test; what it wants to do is asked after the operation."""
        self.is_touched = True
        return self.system

    @property
    def prefill(self) -> PrefillNode:
        """The same, of a prefill node."""
        return cast("PrefillNode", self.target)

    @property
    def decode(self) -> DecodeNode:
        """The same, of a decode node."""
        return cast("DecodeNode", self.target)

    @property
    def decode_model(self) -> DecodeModel:
        """The model of a decode node."""
        assert isinstance(self.model, DecodeModel), f"{self.name} is no decode node"
        return self.model

    def num_cached(self, kv: Tokens) -> int:
        """Return how many leading tokens of a prompt's KV the device has published."""
        namespace, tokens = untagged(kv)
        return self.system.num_cached(tokens, namespace)


class HandoffState(ABC):
    """The nodes, the gateway, the network and the clients.

    Attributes:
        now: the clock, in ticks.
        in_tick: whether time passes in the current operation.
        network: messages in the network, oldest first.
        prefill_names, decode_names: of all nodes: "p0", ..., "d0", ...
        nodes: by name; None if a node has crashed.
        left: names of nodes that do not come back.
        gateway: the gateway since its last restart.
        transfers: pulls that may still write.
        severed: directions in which messages are lost, such as "p0>d0", and the time at which they
            arrive again; None if it is not known yet.
        storage: contents of each value, by name; all groups of layers of a block.
        num_lost: number of values that storage has lost.
        num_shards: pieces of a part, each with some of the heads of its blocks.
        model: requests and their attempts.
        situations: number of events, by kind.
    """

    in_tick: bool

    def __init__(self, config: Config, factory: HandoffFactory) -> None:
        self.config = config
        self.system = factory(config)
        self.block_size: int = config["block_size"]
        self.decode_block_size: int = config.get("decode_block_size") or self.block_size
        self.num_groups: int = config["num_groups"]
        self.num_shards: int = config.get("num_shards", 1)
        self.now = 0
        self.network: list[Envelope] = []
        self.transfers: list[Transfer] = []
        self.severed: dict[str, int | None] = {}
        self.left: set[str] = set()
        self.storage: dict[str, list[Tokens]] = {}
        self.num_lost = 0
        self.situations: Counter[str] = Counter()
        self.model = Requests(config["max_attempts"])
        self.prefill_names = [f"p{number}" for number in range(config["num_prefill"])]
        self.decode_names = [f"d{number}" for number in range(config["num_decode"])]
        self.names = [*self.prefill_names, *self.decode_names]
        self.epochs = dict.fromkeys((*self.names, GATEWAY), 0)
        self.nodes: dict[str, LiveNode | None] = {name: self.new_node(name) for name in self.names}
        self.gateway = self.new_gateway_side()
        self._num_named: Counter[str] = Counter()

    @abstractmethod
    def apply(self, operation: Operation) -> bool:
        """Do one operation and all that follows; False if it does not apply."""

    @property
    def requests(self) -> dict[str, Request]:
        """The requests of clients, by name."""
        return self.model.requests

    def new_node(self, name: str) -> LiveNode:
        """Make a node without memory."""
        self.epochs[name] = epoch = self.epochs[name] + 1
        role: Final = "prefill" if name in self.prefill_names else "decode"
        target = guard(self.system.node(name, role, epoch, self.now))
        model: PrefillModel | DecodeModel
        if role == "prefill":
            model = PrefillModel(name, self.num_groups, self.block_size)
        else:
            most = self.system.max_overtaken
            sizes = self.num_groups, self.decode_block_size
            model = DecodeModel(name, *sizes, most, patience=SILENCE, memory=REMEMBER)
        return LiveNode(name, epoch, target, model)

    def new_gateway_side(self) -> Gateway:
        """Make a gateway without memory."""
        self.epochs[GATEWAY] += 1
        return guard(self.system.gateway(self.epochs[GATEWAY], self.now))

    def live(self) -> list[LiveNode]:
        """Return the nodes that have not crashed."""
        return [node for node in self.nodes.values() if node is not None]

    def is_severed(self, one: str, other: str) -> bool:
        """Whether one of two ends, or both, do not hear the other."""
        return f"{one}>{other}" in self.severed or f"{other}>{one}" in self.severed

    def down(self) -> list[str]:
        """Return the names of the nodes that have crashed and come back."""
        return [name for name in self.names if self.nodes[name] is None and name not in self.left]

    def check_caches(self) -> None:
        """Let all caches check their invariants."""
        for node in self.live():
            node.system.check()

    def unique(self, name: str) -> str:
        """Return a name that was not given before: it depends only on events of the same name."""
        self._num_named[name] += 1
        return f"{name}.{self._num_named[name]}"
