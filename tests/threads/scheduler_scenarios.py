"""Scenarios of `scheduler`: what its threads do at once, and what must hold."""

from __future__ import annotations

from asyncio import _set_running_loop
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from radixkv.kvcache import EventBatch
from radixkv.scheduler.errors import EngineClosedError, EngineFailedError, RequestError
from radixkv.scheduler.handoff.messages import AttemptKey, PartId
from radixkv.scheduler.nodes.transport.base import (
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    Received,
    Withdrawn,
)
from radixkv.scheduler.nodes.transport.descriptors import describe
from radixkv.scheduler.nodes.transport.transfer_engine import (
    EngineOffer,
    EnginePull,
    TransferEngine,
)

from .baton import Task, active
from .explore import Scenario
from .primitives import SimpleQueue, now, result_of, sleep, together

SOON_S = 2.0  # virtual time, of which the fakes below use milliseconds


class OneThread:
    """Asserts that one thread makes all calls."""

    def __init__(self) -> None:
        self._caller: Task | None = None

    def check_caller(self) -> None:
        self._caller = self._caller or active().current
        assert self._caller is active().current, "two threads use the engine"


# The transport


class LoopEngine(OneThread, TransferEngine):
    """A transfer engine within one process."""

    name = "loop"
    copies_offers = True
    quarantined_bytes = 0
    maintain_every_s = None

    def __init__(self) -> None:
        super().__init__()
        self.offers: list[LoopOffer] = []
        self.num_open = 0
        self.closed = 0

    def offer(self, arrays: Sequence[Any]) -> LoopOffer:
        self.check_caller()
        self.num_open += 1
        self.offers.append(LoopOffer(self, tuple(arrays)))
        self.offers[-1].route = bytes([len(self.offers) - 1])
        return self.offers[-1]

    def pull(self, route: bytes, descriptor: object, digest_key: bytes) -> LoopPull:
        self.check_caller()
        self.num_open += 1
        return LoopPull(self, self.offers[route[0]].arrays, digest_key)

    def maintain(self) -> None:
        self.check_caller()

    def close(self) -> None:
        self.check_caller()
        self.closed += 1


class LoopOffer(EngineOffer):
    def __init__(self, engine: LoopEngine, arrays: tuple[Any, ...]) -> None:
        self.arrays = arrays
        self._engine = engine

    def is_ready(self) -> bool:
        return True

    def was_read(self) -> bool:
        return False

    def withdraw(self, was_read: bool) -> None:
        self._engine.check_caller()
        self._engine.num_open -= 1

    def is_withdrawn(self) -> bool:
        return True


class LoopPull(EnginePull):
    def __init__(self, engine: LoopEngine, arrays: tuple[Any, ...], digest_key: bytes) -> None:
        self.arrays = arrays
        self.digest_key = digest_key
        self._engine = engine
        self._is_first = True

    def advance(self) -> int:
        self._engine.check_caller()
        self._is_first, was_first = False, self._is_first
        return 0 if was_first else len(self.arrays)

    def free(self) -> None:
        self._engine.check_caller()
        self._engine.num_open -= 1

    abandon = free


ATTEMPT = AttemptKey("request", 1)
PARTS = [PartId(ATTEMPT, 1, 1, 1, number) for number in range(3)]


class Node:
    """The loop of a node."""

    def __init__(self, code: ModuleType) -> None:
        self.engine = LoopEngine()
        self.transport = code.ThreadedTransport(self.engine)
        self.events: list[Any] = []
        self.arrays = [np.arange(4, dtype=np.uint8)]
        self.descriptor = describe(self.arrays, num_blocks=1)

    def until(self, kind: Any, count: int = 1) -> list[Any]:
        """Poll until there are events of a kind, and take them."""
        before = now()
        while len([each for each in self.events if isinstance(each, kind)]) < count:
            self.events += self.transport.poll()
            active().operation()
            self.events += self.transport.poll()
            sleep(0.0005)
            assert now() < before + SOON_S, f"no {kind}"
        found = [each for each in self.events if isinstance(each, kind)]
        self.events = [each for each in self.events if not isinstance(each, kind)]
        return found


def threaded_transport(table: ModuleType, code: ModuleType) -> None:
    node = Node(code)
    transport = node.transport
    for part in PARTS:
        transport.offer(part, node.arrays, node.descriptor, ttl_s=100.0)
    infos = [event.info for event in node.until(Offered, 3)]
    for part, info in zip(PARTS, infos, strict=True):
        transport.pull(part, info, node.descriptor, timeout_s=SOON_S)
    transport.cancel(PARTS[2])
    [failed] = node.until(PullFailed)
    assert (failed.part_id, failed.fault) == (PARTS[2], Fault.CANCELLED)
    for received in node.until(Received, 2):
        assert received.arrays[0].tolist() == [0, 1, 2, 3]
        transport.release(received.part_id)
    transport.withdraw(ATTEMPT, was_read=True)
    node.until(Withdrawn)
    sleep(0.1)
    assert not node.events and not transport.poll()
    assert not node.engine.num_open, "a transfer is left"
    transport.close()
    assert node.engine.closed == 1


def transport_when_idle(table: ModuleType, code: ModuleType) -> None:
    """Each call wakes the thread from a wait without an end; nothing else wakes it."""
    node = Node(code)
    transfers, num_steps = node.transport._table, 0
    step = transfers.step

    def counted() -> bool:
        nonlocal num_steps
        num_steps += 1
        return bool(step())

    transfers.step = counted
    for part in PARTS[:2]:
        sleep(1.0)
        num_steps = 0
        sleep(1.0)
        assert num_steps == 0, "the thread wakes, and nothing moves"
        node.transport.offer(part, node.arrays, node.descriptor, ttl_s=100.0)
        assert isinstance(node.until((Offered, OfferFailed))[0], Offered)
    sleep(1.0)
    num_steps = 0
    sleep(1.0)
    assert num_steps == 0, "the thread wakes, and nothing moves"
    before = now()
    node.transport.close()
    assert now() < before + 1.0, "the thread was not woken by close"
    assert node.engine.closed == 1


# The thread of an engine


class Prompt:
    """A request, as far as `EngineThread` looks at it."""

    def __init__(self, request_id: str, num_tokens: int = 2) -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.output_tokens: list[int] = []
        self.finish_reason: str | None = None


class FakeEngine(OneThread):
    """An engine that computes a token of each request per step."""

    def __init__(self, fails_after: int = 1_000, step_s: float = 0.001) -> None:
        super().__init__()
        self.active: dict[str, Prompt] = {}
        self.advanced: list[Prompt] = []
        self.scheduler = SimpleNamespace(running=[], waiting=[])
        self.manager = SimpleNamespace(block_size=4)
        self.closed = self.num_steps = 0
        self._steps_left = fails_after
        self._step_s = step_s

    @property
    def has_work(self) -> bool:
        return bool(self.active)

    def stats(self) -> str:
        return "stats"

    def add_request(self, request: Prompt) -> None:
        self.check_caller()
        if request.request_id == "refused":
            raise RequestError("too long")
        self.active[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        self.check_caller()
        request = self.active.pop(request_id, None)
        if request is not None:
            request.finish_reason = "abort"
        return request is not None

    def step(self) -> list[Prompt]:
        self.check_caller()
        self.num_steps += 1
        self._steps_left -= 1
        if self._steps_left < 0:
            raise ValueError("broken")
        sleep(self._step_s)
        self.advanced = list(self.active.values())
        for request in self.advanced:
            request.output_tokens.append(0)
            if len(request.output_tokens) == request.num_tokens:
                request.finish_reason = "length"
                del self.active[request.request_id]
        return [request for request in self.advanced if request.finish_reason]

    def close(self, timeout_s: float) -> bool:
        self.check_caller()
        self.closed += 1
        return True


class Waiter:
    def __init__(self) -> None:
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: None) -> None:
        self._is_done = True


class Loop:
    """An event loop with one task, which waits for a consumer as `OutputStream` does."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, function: Callable[..., None], *args: object) -> None:
        self._calls.put(lambda: function(*args))

    def consume(self, consumer: Any) -> Any:
        """Return the last finish reason, or the error."""
        consumer.loop = self
        active().operation()
        for delivery in consumer.deliveries:
            num_seen = 0
            while True:
                if delivery.error is not None:
                    return delivery.error
                reason = delivery.finish_reason
                active().operation()
                num_tokens = delivery.num_tokens
                assert num_tokens >= num_seen, "tokens vanish"
                num_seen = num_tokens
                if reason is not None:
                    assert num_tokens == len(delivery.request.output_tokens), "tokens are lost"
                    break
                consumer.waiter = Waiter()
                while not consumer.waiter.done():
                    self._calls.get(timeout=SOON_S)()
                consumer.waiter = None
        return reason


class Observer:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def request_submitted(self, request: Prompt) -> None:
        self.seen.append(f"submitted {request.request_id}")

    def step_begins(self) -> None:
        pass

    def step_ended(self, engine: object, running: object) -> None:
        pass

    def request_ended(self, request: Prompt, reason: str) -> None:
        self.seen.append(f"ended {request.request_id}")

    def engine_ended(self, engine: object) -> None:
        self.seen.append("engine ended")


def engine_thread(code: ModuleType) -> None:
    engine = FakeEngine()
    thread = code.EngineThread(engine)
    observers = [Observer(), Observer()]
    together(*(lambda each=each: thread.observe(each) for each in observers))
    ends: dict[str, Any] = {}

    def ask(*ids: str) -> None:
        consumer = thread.submit([Prompt(each) for each in ids])
        ends[ids[0]] = Loop().consume(consumer)

    def abort() -> None:
        consumer = thread.submit([Prompt("aborted", 500)])
        thread.abort(consumer.deliveries[0])
        ends["aborted"] = Loop().consume(consumer)

    def call() -> None:
        assert result_of(thread.call(lambda engine: engine.stats()), SOON_S) == "stats"

    together(lambda: ask("one", "two"), lambda: ask("refused"), abort, call)
    assert ends["one"] == "length" and ends["aborted"] == "abort", ends
    assert isinstance(ends["refused"], RequestError), ends
    thread.close(drain=True, timeout_s=1.0)
    assert result_of(thread.ended, SOON_S) is True
    assert engine.closed == 1
    assert not thread._deliveries and not thread._calls, "something is kept"
    for observer in observers:
        seen = set(observer.seen)
        assert len(observer.seen) == len(seen) == 9, observer.seen
        for name in ("one", "two", "refused", "aborted"):
            assert {f"submitted {name}", f"ended {name}"} <= seen, observer.seen
        assert observer.seen[-1] == "engine ended"


def engine_read(code: ModuleType) -> None:
    """A consumer looks at any time, not only when it is woken."""
    thread = code.EngineThread(FakeEngine(step_s=0.0))
    [delivery] = thread.submit([Prompt("one", 1)]).deliveries
    for _ in range(30):
        reason = delivery.finish_reason
        active().operation()
        assert reason is None or delivery.num_tokens == 1, "tokens are lost"
    thread.close(drain=True, timeout_s=1.0)
    assert result_of(thread.ended, SOON_S) is True


def engine_polls(code: ModuleType) -> None:
    """An engine without work is stepped as often as it is said, and does not spin."""
    engine = FakeEngine(step_s=0.0)
    thread = code.EngineThread(engine, poll_s=0.25)
    sleep(1.1)
    assert 4 <= engine.num_steps <= 5, f"{engine.num_steps} steps"
    thread.close(drain=True, timeout_s=1.0)
    assert result_of(thread.ended, SOON_S) is True


def engine_closes(code: ModuleType) -> None:
    """It is closed while requests and calls come."""
    engine = FakeEngine()
    thread = code.EngineThread(engine)

    def ask() -> None:
        for number in range(2):
            try:
                consumer = thread.submit([Prompt(str(number))])
            except EngineClosedError:
                return
            assert Loop().consume(consumer) in ("length", "abort")

    def call() -> None:
        for _ in range(2):
            try:
                future = thread.call(lambda engine: engine.stats())
            except EngineClosedError:
                return
            assert result_of(future, SOON_S) == "stats"

    together(ask, call, lambda: thread.close(drain=False, timeout_s=1.0))
    assert result_of(thread.ended, SOON_S) is True
    assert engine.closed == 1


def engine_fails(code: ModuleType) -> None:
    """The first step raises while requests and calls come."""
    engine = FakeEngine(fails_after=0)
    thread = code.EngineThread(engine)
    observers = [Observer(), Observer()]

    def ask(name: str) -> None:
        try:
            consumer = thread.submit([Prompt(name, 500)])
        except EngineFailedError:
            return
        assert isinstance(Loop().consume(consumer), EngineFailedError)

    def call() -> None:
        for _ in range(2):
            try:
                future = thread.call(lambda engine: engine.stats())
                assert result_of(future, SOON_S) == "stats"
            except EngineFailedError:
                return

    def observe() -> None:
        for observer in observers:
            try:
                thread.observe(observer)
            except EngineFailedError:
                return

    together(lambda: ask("one"), lambda: ask("two"), call, observe)
    assert result_of(thread.ended, SOON_S) is True
    assert engine.closed == 1


class Taken:
    """What one sample has given its reader, in place of a `Completion`."""

    def __init__(self, request: Prompt) -> None:
        self._request = request
        self._num_tokens = 0

    def take(self, num_tokens: int, reason: str | None) -> SimpleNamespace | None:
        assert num_tokens >= self._num_tokens, "tokens vanish"
        if num_tokens == self._num_tokens and reason is None:
            return None
        self._num_tokens = num_tokens
        assert reason is None or num_tokens == len(self._request.output_tokens), "tokens are lost"
        return SimpleNamespace(finish_reason=reason)


class ReadingLoop(Loop):
    """An event loop whose one task reads a real `OutputStream`."""

    def create_future(self) -> Any:
        return AwaitedWaiter()

    def read(self, stream: Any) -> str | None:
        """Return the next finish reason, or "more"; None at the end."""
        task = stream.__anext__()
        _set_running_loop(self)  # type: ignore[arg-type]  # of this thread
        try:
            while True:
                waiter = task.send(None)
                while not waiter.done():
                    self._calls.get(timeout=SOON_S)()
        except StopIteration as end:
            return end.value.finish_reason or "more"
        except StopAsyncIteration:
            return None
        finally:
            _set_running_loop(None)


class AwaitedWaiter(Waiter):
    def __await__(self) -> Generator[AwaitedWaiter, None, None]:
        yield self


def output_streams(thread_code: ModuleType, code: ModuleType) -> None:
    """Streams of one and of two samples are read to their ends."""
    thread = thread_code.EngineThread(FakeEngine(step_s=0.0))
    reasons: dict[str, list[str | None]] = {}

    def ask(*ids: str) -> None:
        requests = [Prompt(each, 1 + number) for number, each in enumerate(ids)]
        consumer = thread.submit(requests)
        engine = SimpleNamespace(_thread=thread)
        stream = code.OutputStream(engine, consumer, [*map(Taken, requests)], ids[0])
        loop = ReadingLoop()
        seen = reasons[ids[0]] = []
        while (reason := loop.read(stream)) is not None:
            seen.append(reason)

    together(lambda: ask("one"), lambda: ask("two", "three"))
    found = {name: [each for each in seen if each != "more"] for name, seen in reasons.items()}
    assert found == {"one": ["length"], "two": ["length", "length"]}, reasons
    thread.close(drain=True, timeout_s=1.0)
    assert result_of(thread.ended, SOON_S) is True


# The publisher of KV events


class Terminated(Exception):
    pass


class Socket:
    """A socket of ZeroMQ, whose other side is `inbox` and `sent`."""

    def __init__(self, context: Context) -> None:
        self.inbox: list[list[bytes]] = []
        self.sent: list[tuple[bytes, ...]] = []
        self._context = context

    def setsockopt(self, option: int, value: int) -> None:
        pass

    def getsockopt_string(self, option: int) -> str:
        return "endpoint"

    def bind(self, endpoint: str) -> None:
        pass

    def recv_multipart(self) -> list[bytes]:
        active().wait_until(lambda: bool(self.inbox) or self._context.closed)
        if not self.inbox:
            raise Terminated
        return self.inbox.pop(0)

    def send_multipart(self, frames: tuple[bytes, ...]) -> None:
        self.sent.append(frames)
        active().operation()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Context:
    def __init__(self) -> None:
        self.closed = False
        self.sockets: list[Socket] = []

    def socket(self, kind: int) -> Socket:
        self.sockets.append(Socket(self))
        return self.sockets[-1]

    def term(self) -> None:
        self.closed = True
        active().operation()


def event_publisher(events: ModuleType, code: ModuleType) -> None:
    context = Context()
    options = dict.fromkeys(("PUB", "ROUTER", "LINGER", "SNDHWM", "LAST_ENDPOINT"), 1)
    code.zmq = SimpleNamespace(  # type: ignore[attr-defined]
        Context=lambda: context, ContextTerminated=Terminated, ZMQError=OSError, **options
    )
    publisher = code.EventPublisher("tcp://a", replay_endpoint="tcp://b", num_kept=8)
    publish, router = context.sockets

    def ask() -> None:
        """Ask for all that was sent so far, as a subscriber that has missed it."""
        for _ in range(2):
            num_sent, num_answers = len(publish.sent), len(router.sent)
            router.inbox.append([b"client", b"", bytes(8)])
            before = now()
            while not (router.sent[num_answers:] and router.sent[-1][3] == code.END_OF_REPLAY):
                sleep(0.001)
                assert now() < before + SOON_S, "no answer"
            numbers = [frames[3] for frames in router.sent[num_answers:-1]]
            expected = [number.to_bytes(8, "big") for number in range(len(numbers))]
            assert numbers == expected, numbers
            assert len(numbers) >= num_sent, "sent, and not kept"

    together(lambda: [publisher.publish(EventBatch(number, ())) for number in range(4)], ask)
    publisher.close()
    assert [frames[1] for frames in publish.sent] == [n.to_bytes(8, "big") for n in range(4)]


# Small ones


def metrics_recorder(code: ModuleType) -> None:
    recorder = code.Recorder(now, {}, is_told=False)
    engine = FakeEngine()
    asked: list[Future[Any]] = []

    def ask() -> None:
        asked.extend(recorder.ask() for _ in range(2))

    def run() -> None:
        recorder.step_ended(engine, ())
        recorder.answer(engine)
        recorder.engine_ended(engine)

    together(ask, ask, run)
    for future in asked:
        snapshot = result_of(future, SOON_S)
        assert snapshot is not None and snapshot.stats == "stats", snapshot
    assert recorder.has_ended


def metrics_of_idle_engine(thread_code: ModuleType, recorder: ModuleType, code: ModuleType) -> None:
    """Each scrape of an engine without steps gets counts that are read after it has asked."""

    class Async:
        def __init__(self) -> None:
            self.thread = thread_code.EngineThread(FakeEngine())
            self.observe, self.submit_call = self.thread.observe, self.thread.call

    code.AsyncEngine = Async  # type: ignore[attr-defined]
    engine = Async()
    metrics = code.EngineMetrics(engine, clock=now)

    def scrape() -> None:
        before = now()
        snapshot = result_of(metrics._ask(), SOON_S)
        assert snapshot.stats == "stats" and snapshot.read_s >= before, snapshot

    together(scrape, scrape)
    engine.thread.close(drain=True, timeout_s=1.0)
    assert result_of(engine.thread.ended, SOON_S) is True
    scrape_of_ended = result_of(metrics._ask(), SOON_S)
    assert scrape_of_ended.stats == "stats", scrape_of_ended


def compilation_counter(code: ModuleType) -> None:
    listeners: list[Any] = []
    code.jax = SimpleNamespace(  # type: ignore[attr-defined]
        monitoring=SimpleNamespace(register_event_duration_secs_listener=listeners.append)
    )
    counter = code.CompilationCounter()

    def compile_two() -> None:
        for _ in range(2):
            listeners[0](code._COMPILE_EVENT, 1.0)

    together(compile_two, compile_two)
    assert counter.count == 4


def tokenizer_guides(code: ModuleType) -> None:
    made: list[object] = []
    starting: list[str] = []

    class Maker:
        def __init__(self, tokenizer: object, ends: frozenset[int]) -> None:
            made.append(ends)
            sleep(0.001)
            self.is_whole = True

        def start(self, guided: str) -> Future[str]:
            assert self.is_whole and not starting
            starting.append(guided)
            sleep(0.001)
            starting.clear()
            future: Future[str] = Future()
            future.set_result(guided)
            return future

    code.GuideMaker = Maker  # type: ignore[attr-defined]
    tokenizer = code.TextTokenizer.__new__(code.TextTokenizer)
    tokenizer._tokenizer, tokenizer._guide_makers = None, {}
    tokenizer._lock = code.threading.Lock()
    together(*[lambda: tokenizer.guide("json", [1, 2])] * 3)
    assert len(made) == 1, "the vocabulary was read more than once"


_TRANSPORT = [f"scheduler.nodes.transport.{name}" for name in ("transfer_table", "threaded")]

SCENARIOS = [
    *(Scenario(_TRANSPORT, each) for each in (threaded_transport, transport_when_idle)),
    *(
        Scenario(["scheduler.serving.engine_thread"], each)
        for each in (engine_thread, engine_read, engine_polls, engine_closes, engine_fails)
    ),
    Scenario(["scheduler.serving.engine_thread", "scheduler.serving.async_engine"], output_streams),
    Scenario(["kvcache.events", "scheduler.events.publisher"], event_publisher),
    Scenario(["scheduler.metrics.recorder"], metrics_recorder),
    Scenario(
        [
            "scheduler.serving.engine_thread",
            "scheduler.metrics.recorder",
            "scheduler.metrics.engine_metrics",
        ],
        metrics_of_idle_engine,
    ),
    Scenario(["scheduler.engine.compilations"], compilation_counter),
    Scenario(["scheduler.text.tokenizer"], tokenizer_guides),
]
