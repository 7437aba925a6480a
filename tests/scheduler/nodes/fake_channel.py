"""A gateway and nodes without a model, over channels in memory that lose messages."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from radixkv.kvcache import CacheManager
from radixkv.scheduler.gateway.cache_index import CacheReporter
from radixkv.scheduler.handoff import (
    AttemptKey,
    DecodeFailed,
    Finished,
    Header,
    PrefillFailed,
    Started,
    Timing,
)
from radixkv.scheduler.handoff.attempts import make_ask
from radixkv.scheduler.handoff.gateway_messages import (
    GATEWAY,
    CacheAsk,
    CacheUpdate,
    NodeLoad,
    NodeStatus,
)
from radixkv.scheduler.handoff.messages import Ack, Ask
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine
from radixkv.scheduler.nodes.channel import (
    ChannelStats,
    Packet,
    TooManyPeersError,
    UnknownPeerError,
    ZmqChannel,
)
from radixkv.scheduler.nodes.event_loop import NodeEventLoop
from radixkv.scheduler.nodes.node import PeerMessage
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.request import Request

TURN_S: Final = 0.25
SILENCE_S: Final = 5.0
TIMING: Final = Timing(retry_s=1.0, silence_s=SILENCE_S, transfer_s=30.0, remember_s=60.0)

IsLost: TypeAlias = Callable[[str, str, Any], bool]
"""Whether to lose a message, by sender, receiver and message."""


class FakeChannel(ZmqChannel):
    """A node's end of a channel in memory."""

    def __init__(
        self, ends: dict[str, FakeChannel], name: str, is_lost: IsLost, epoch: int = 1
    ) -> None:
        self.name, self.epoch, self.address = name, epoch, f"127.0.0.1:{len(ends) + 1}"
        self.done = ChannelStats()
        self._ends, self._is_lost = ends, is_lost
        self._arrived: deque[Packet] = deque()
        self.connected: list[str] = []
        self.max_peers = 100
        ends[name] = self

    def connect(self, peer: str, address: str) -> None:
        if peer not in self.connected:
            if not self.has_room:
                raise TooManyPeersError(peer, self.max_peers)
            self.connected.append(peer)

    @property
    def has_room(self) -> bool:
        return len(self.connected) < self.max_peers

    def disconnect(self, peer: str) -> None:
        if peer in self.connected:
            self.connected.remove(peer)

    def send(self, peer: str, message: Any, pull_info: Any = None) -> bool:
        if peer not in self.connected:
            raise UnknownPeerError(peer)
        if not self._is_lost(self.name, peer, message):
            packet = Packet(self.name, peer, self.epoch, 0, message, pull_info)
            self._ends[peer]._arrived.append(packet)
        return True

    def receive(self) -> list[Packet]:
        packets = list(self._arrived)
        self._arrived.clear()
        return packets

    def wait(self, timeout_s: float) -> bool:
        return bool(self._arrived)

    def stats(self) -> ChannelStats:
        return self.done


class Prefill(PrefillEngine):
    """A prefill engine that sends ASK once, unless it has a failure to report."""

    def __init__(self) -> None:
        self.manager, self.model_name, self.max_model_len = CacheManager(8, 4), "m", 24
        self.scheduler: Any = SimpleNamespace(num_open=0, set_time=lambda now: None)
        self.begun: Counter[Any] = Counter()
        self.failures: list[str] = []
        self.given_up: list[Any] = []
        self._outbox, self._reports = [], []
        self._unanswered: dict[AttemptKey, float | None] = {}  # when it was begun

    def load(self) -> NodeLoad:
        return NodeLoad(num_running=len(self._unanswered), hit_tokens=7)

    def begin(self, request: Request, peer: str, attempt: int = 1) -> None:
        key = AttemptKey(request.request_id, attempt)
        self.begun[key] += 1
        if self.failures:
            self._reports.append(PrefillFailed(key, self.failures.pop()))
        else:
            self._outbox.append(PeerMessage(peer, make_ask(Header(key, 1, None, 0), request, 4, 1)))
            self._unanswered[key] = None

    def receive(self, message: PeerMessage) -> None:
        assert isinstance(message.message, Ack)
        self._unanswered.pop(message.message.header.key, None)

    def give_up(self, key: Any, reason: str) -> None:
        self.given_up.append(key)
        self._unanswered.pop(key, None)

    def poll(self, now: float) -> bool:
        for key, begun_at in list(self._unanswered.items()):
            if begun_at is None:
                self._unanswered[key] = now
            elif now - begun_at >= SILENCE_S:
                del self._unanswered[key]
                self._reports.append(PrefillFailed(key, "silence", is_lost=True))
        return False

    def step(self) -> bool:
        return False


class Decode(DecodeEngine):
    """A decode engine that starts each ASK, and ends it at once, or token by token."""

    def __init__(self) -> None:
        self.manager, self.model_name, self.max_model_len = CacheManager(8, 4), "m", 24
        self.scheduler: Any = SimpleNamespace(num_open=0, set_time=lambda now: None)
        self.failures: list[str] = []
        self.given_up: list[Any] = []
        self._running: list[Ask] = []
        self.is_slow = False
        self._slow: list[tuple[AttemptKey, Request]] = []
        self._outbox, self._reports = [], []

    def load(self) -> NodeLoad:
        return NodeLoad(num_running=len(self._slow))

    def receive(self, message: PeerMessage) -> None:
        ask = message.message
        assert isinstance(ask, Ask)
        self._running.append(ask)
        self._outbox.append(PeerMessage(message.peer, Ack(ask.header)))

    def give_up(self, key: Any, reason: str) -> None:
        self.given_up.append(key)

    def poll(self, now: float) -> bool:
        return False

    def step(self) -> bool:
        for key, request in self._slow[:]:
            tokens = tokens_of(key.request_id)
            if len(request.output_tokens) < len(tokens):
                request.output_tokens.append(tokens[len(request.output_tokens)])
            else:
                self._slow.remove((key, request))
                self._reports.append(Finished(key, request))
        for ask in self._running:
            key = ask.header.key
            request = Request(key.request_id, [1], 2)
            self._reports.append(Started(key, request, 0))
            if self.failures:
                self._reports.append(DecodeFailed(key, self.failures.pop()))
            elif self.is_slow:
                self._slow.append((key, request))
            else:
                request.output_tokens.extend(tokens_of(key.request_id))
                self._reports.append(Finished(key, request))
        self._running.clear()
        return False


def tokens_of(request_id: str) -> tuple[int, int]:
    """The output tokens of a request."""
    return len(request_id.split(" ")[0]), 7


class Deployment:
    """A gateway with nodes of each role; each turn advances the clock."""

    def __init__(
        self,
        is_lost: IsLost = lambda *_: False,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        transports: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.now = 0.0
        self.ends: dict[str, FakeChannel] = {}
        self._is_lost = is_lost
        self.nodes = self.new_gateway(1, **options)
        self.engines: dict[str, Any] = {
            **{f"prefill-{place}": Prefill() for place in range(num_prefill)},
            **{f"decode-{place}": Decode() for place in range(num_decode)},
        }
        self.prefill: Prefill = self.engines["prefill-0"]
        self.decode: Decode = self.engines["decode-0"]
        self.caches = {name: CacheReporter() for name in self.engines}
        self.loops = {
            name: NodeEventLoop(
                engine,
                FakeChannel(self.ends, name, is_lost),
                gateway=self.ends[GATEWAY].address,
                transport=(transports or {}).get(name, "jax"),
                timing=TIMING,
                cache=self.caches[name],
                clock=lambda: self.now,
            )
            for name, engine in self.engines.items()
        }

    def new_gateway(self, epoch: int, **options: Any) -> RemoteNodes:
        """Replace the gateway by a new one."""
        channel = FakeChannel(self.ends, GATEWAY, self._is_lost, epoch)
        self.nodes = RemoteNodes(channel, silence_s=SILENCE_S, clock=lambda: self.now, **options)
        return self.nodes

    def turn(self, num_turns: int = 1) -> list[Request]:
        ended = []
        for _ in range(num_turns):
            self.now += TURN_S
            for loop in self.loops.values():
                loop.run_once()
            ended += self.nodes.step()
        return ended

    def complete(self, requests: Sequence[Request], *, num_turns: int = 400) -> list[Request]:
        """Run until the requests have ended and every message was acknowledged."""
        ended = []
        for request in requests:
            self.nodes.add_request(request)
        while self.nodes.has_work or self.num_unacked:
            ended += self.turn()
            num_turns -= 1
            assert num_turns, "no end"
        return ended

    @property
    def num_unacked(self) -> int:
        at_nodes = sum(loop._reporter.num_unacked for loop in self.loops.values())
        return self.nodes._gateway.num_unacked + at_nodes


def is_of_request(message: Any) -> bool:
    """Whether a message is neither periodic, nor about a cache, nor one between nodes."""
    periodic = NodeStatus | CacheUpdate | CacheAsk
    return not isinstance(message, periodic | Ask | Ack)
