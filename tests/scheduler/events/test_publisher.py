"""The publisher of KV events and its subscriber, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from radixkv.kvcache import BlockRemoved, BlockStored, CountError, EventBatch, ReplayBuffer
from radixkv.scheduler.events import (
    EventAddressError,
    EventFormatError,
    EventPublisher,
    EventSubscriber,
    decode_batch,
    encode_batch,
    publisher,
)
from radixkv.scheduler.events.subscriber import Message, _message

from ...costs.injection import injections

ANY = "tcp://127.0.0.1:0"
LATE_S = 60.0
"""Nothing ends by it."""
CLOSE = zmq.Socket.close


def batch(seq: int) -> EventBatch:
    return EventBatch(seq, (BlockRemoved("GPU", (seq,)),))


@pytest.fixture
def published() -> Iterator[EventPublisher]:
    with closing(EventPublisher(ANY, replay_endpoint=ANY, num_kept=3)) as made:
        yield made


def subscribe(source: EventPublisher) -> EventSubscriber:
    return EventSubscriber(source.endpoint, source.replay_endpoint)


def wait_until_connected(source: EventPublisher, subscriber: EventSubscriber) -> int:
    """Publish until a message comes; return the number of the next one."""
    seq = 0
    while True:
        source.publish(batch(seq))
        seq += 1
        message = subscriber.receive(0.05)
        if message is not None:
            while message.seq < seq - 1:  # from then on, all come
                message = subscriber.receive(LATE_S)
                assert message is not None
            return seq


def numbers(messages: Iterator[Message]) -> list[int]:
    return [message.seq for message in messages]


def planted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int) -> None:
    """Let one call of a method raise, counted from 0."""
    calls, method = count(), getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise RuntimeError("planted")
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@contextmanager
def requester(endpoint: str, most: int = 0) -> Iterator[zmq.Socket[bytes]]:
    """A client that asks for replays, and takes so many messages before it reads; 0 for any."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, most)
        socket.setsockopt(zmq.RCVTIMEO, int(LATE_S) * 1_000)
        socket.connect(endpoint)
        yield socket
    finally:
        context.destroy(linger=0)


def test_a_subscriber_gets_batches_in_order(published: EventPublisher) -> None:
    with subscribe(published) as subscriber:
        first = wait_until_connected(published, subscriber)
        for seq in range(first, first + 3):
            published.publish(batch(seq))
        for seq in range(first, first + 3):
            message = subscriber.receive(LATE_S)
            assert message is not None and message.seq == seq
            assert decode_batch(message.payload).events[0].block_hashes == [seq]  # type: ignore[union-attr]
        assert subscriber.receive(0.0) is None


def test_a_replay_has_the_last_batches(published: EventPublisher) -> None:
    with subscribe(published) as subscriber:
        end = wait_until_connected(published, subscriber)
        while end < 5:
            published.publish(batch(end))
            end += 1
            assert subscriber.receive(LATE_S) is not None  # it is kept before it is sent
        assert numbers(subscriber.replay(0)) == [end - 3, end - 2, end - 1]
        assert numbers(subscriber.replay(end - 1)) == [end - 1]
        assert numbers(subscriber.replay(end)) == []


def test_a_replay_that_is_not_read_to_its_end_leaves_nothing_to_the_next(
    published: EventPublisher,
) -> None:
    with subscribe(published) as subscriber:
        end = wait_until_connected(published, subscriber)
        while end < 5:
            published.publish(batch(end))
            end += 1
            assert subscriber.receive(LATE_S) is not None
        assert next(iter(subscriber.replay(0))).seq == end - 3
        assert numbers(subscriber.replay(end - 1)) == [end - 1]


def test_messages_and_replays_begin_with_the_topic() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(EventPublisher(ANY, replay_endpoint=ANY, topic="kv")) as source:
        assert source.replay_endpoint is not None
        with closing(context.socket(zmq.SUB)) as socket, requester(source.replay_endpoint) as asked:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(source.endpoint)
            for seq in count():
                source.publish(batch(seq))
                if socket.poll(50):
                    break
            message = socket.recv_multipart()
            asked.send_multipart([b"", message[1]])
            assert asked.poll(int(LATE_S) * 1_000)
            assert asked.recv_multipart() == [b"", *message]
    context.term()
    assert message[0] == b"kv"


def test_a_subscriber_asks_for_its_topic_alone() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(context.socket(zmq.XPUB)) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with EventSubscriber(f"tcp://127.0.0.1:{port}", topic="kv@1"):
            assert socket.poll(int(LATE_S) * 1_000)
            assert socket.recv() == b"\x01kv@1"
    context.term()


def test_a_client_that_reads_late_gets_the_whole_replay() -> None:
    """More than the sockets hold by default, and more than the buffers of the network."""
    number, payload = 1_500, bytes(20_000)
    with closing(EventPublisher(ANY, replay_endpoint=ANY, num_kept=number)) as source:
        assert source.replay_endpoint is not None
        for seq in range(number):
            source._kept.add(seq, payload)
        with requester(source.replay_endpoint, most=1) as late:
            late.send_multipart([b"", bytes(8)])
            assert late.poll(int(LATE_S) * 1_000)
            with subscribe(source) as other:  # which is answered after all that the first one gets
                assert numbers(other.replay(number)) == []
            found = []
            while (frames := late.recv_multipart())[3]:
                found.append(int.from_bytes(frames[2], "big"))
    assert found == list(range(number))


def test_requests_that_are_none_get_no_answer(published: EventPublisher) -> None:
    assert published.replay_endpoint is not None
    with requester(published.replay_endpoint) as socket:
        for frames in ([b""], [b"", b"short"], [b"", bytes(9)], [b"", bytes(8), b"more"]):
            socket.send_multipart(frames)
        socket.send_multipart([b"", bytes(8)])  # only this one
        assert socket.poll(int(LATE_S) * 1_000)
        assert socket.recv_multipart() == [b"", b"", (2**64 - 1).to_bytes(8, "big"), b""]
        assert not socket.poll(0)


def test_what_waits_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_LINGER_MS", int(LATE_S) * 1_000)
    source = EventPublisher(ANY, replay_endpoint=ANY)
    with subscribe(source) as subscriber:
        first = wait_until_connected(source, subscriber)
        for seq in range(first, first + 100):
            source.publish(batch(seq))
        source.close()
        source.close()
        found = []
        while (message := subscriber.receive(LATE_S)) is not None:
            found.append(message.seq)
            if message.seq == first + 99:
                break
    assert found == list(range(first, first + 100))


def close_socket(socket: zmq.Socket[bytes], linger: int | None = None) -> None:
    own = threading.current_thread().name.startswith("kv-events")
    assert own, "a socket is closed under the thread that uses it"
    CLOSE(socket, linger)


@pytest.mark.parametrize("after", [(), ("put", "join", "term", "is_alive")])
def test_a_close_that_was_interrupted_goes_on(
    monkeypatch: pytest.MonkeyPatch, after: tuple[str, ...]
) -> None:
    monkeypatch.setattr(zmq.Socket, "close", close_socket)
    before = threading.enumerate()
    for injector in injections(publisher, errors=[KeyboardInterrupt], after=after):
        source = EventPublisher(ANY, replay_endpoint=ANY)
        source.publish(batch(0))
        injector.call(source.close)
        source.close()
        assert threading.enumerate() == before, f"a thread is left: {injector}"
        assert source._context.closed and source._kept.since(0), str(injector)


def test_what_is_published_after_the_end_is_dropped() -> None:
    source = EventPublisher(ANY)
    source.close()
    for number in range(3):
        source.publish(batch(number))
    assert source.num_dropped == 3
    assert source._queue.qsize() == 0, "batches wait that nobody will send"


def test_a_full_queue_drops_batches_and_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, is_held = threading.Event(), threading.Event()
    encode = encode_batch

    def held(ts: float, events: tuple[BlockStored, ...]) -> bytes:
        is_held.set()
        assert goes_on.wait(LATE_S)
        return encode(ts, events)

    monkeypatch.setattr(publisher, "encode_batch", held)
    with closing(EventPublisher(ANY, replay_endpoint=ANY, max_waiting=2)) as source:
        source.publish(batch(0))
        assert is_held.wait(LATE_S)  # the first one is not in the queue any more
        for seq in range(1, 5):
            source.publish(batch(seq))
        assert source.num_dropped == 2
        goes_on.set()
        with subscribe(source) as subscriber:
            while numbers(subscriber.replay(0))[-1:] != [2]:
                pass
            source.publish(batch(5))
            while (found := numbers(subscriber.replay(0)))[-1] != 5:
                pass
    assert found == [0, 1, 2, 5]  # everybody sees that 3 and 4 are missing


def test_a_batch_has_the_time_at_which_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, encode, now = threading.Event(), encode_batch, 5.0

    def held(ts: float, events: tuple[BlockStored, ...]) -> bytes:
        assert goes_on.wait(LATE_S)
        return encode(ts, events)

    monkeypatch.setattr(publisher, "encode_batch", held)
    monkeypatch.setattr(publisher, "time", SimpleNamespace(time=lambda: now))
    with closing(EventPublisher(ANY, replay_endpoint=ANY)) as source:
        for seq in range(2):
            source.publish(batch(seq))
            now += 1.0
        goes_on.set()
        with subscribe(source) as subscriber:
            while len(messages := list(subscriber.replay(0))) < 2:
                pass
    assert [decode_batch(each.payload).ts for each in messages] == [5.0, 6.0]


@pytest.mark.parametrize("error", [MemoryError(), zmq.ZMQError(zmq.EFSM)])
@pytest.mark.parametrize("place", ["encode_batch", "send_multipart"])
def test_a_batch_that_cannot_be_sent_is_dropped_and_the_next_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    owner = publisher if place == "encode_batch" else zmq.Socket
    call, is_wrong = getattr(owner, place), threading.Event()

    def fail(*arguments: Any) -> Any:
        if not is_wrong.is_set() and threading.current_thread().name == "kv-events":
            is_wrong.set()
            raise error
        return call(*arguments)

    monkeypatch.setattr(owner, place, fail)
    with closing(EventPublisher(ANY, replay_endpoint=ANY)) as source:
        for seq in range(3):
            source.publish(batch(seq))
        with subscribe(source) as subscriber:
            while (found := numbers(subscriber.replay(0)))[-1:] != [2]:
                pass
        assert source.num_dropped == 1
    # One that was encoded is kept: it comes by a replay.
    assert found == ([1, 2] if place == "encode_batch" else [0, 1, 2])


def test_a_replay_that_cannot_be_sent_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, published: EventPublisher
) -> None:
    planted(monkeypatch, ReplayBuffer, "since", 0)
    assert published.replay_endpoint is not None
    with requester(published.replay_endpoint) as socket:
        for _ in range(2):
            socket.send_multipart([b"", bytes(8)])
        assert socket.poll(int(LATE_S) * 1_000)
        assert socket.recv_multipart() == [b"", b"", (2**64 - 1).to_bytes(8, "big"), b""]
        assert not socket.poll(0)
    warning = "a replay of KV events was not answered: RuntimeError('planted')"
    assert caplog.messages == [warning]


def test_addresses_that_cannot_work_are_refused() -> None:
    with closing(EventPublisher(ANY)) as source:
        assert source.replay_endpoint is None
        with EventSubscriber(source.endpoint) as subscriber:
            assert numbers(subscriber.replay(0)) == []
        for endpoint, replay in ((source.endpoint, None), (ANY, source.endpoint)):
            with pytest.raises(EventAddressError, match="KV events cannot be bound to 'tcp://127"):
                EventPublisher(endpoint, replay_endpoint=replay)
    with pytest.raises(EventAddressError, match="KV events cannot be bound to 'nowhere':"):
        EventPublisher("nowhere")
    for endpoint, replay in (("nowhere", None), ("tcp://127.0.0.1:1", "nowhere")):
        with pytest.raises(EventAddressError, match="'nowhere' cannot be connected to:"):
            EventSubscriber(endpoint, replay)
    with pytest.raises(CountError, match="num_kept must be at least 0, got -1"):
        EventPublisher(ANY, num_kept=-1)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (zmq.Context, "socket"),
        (zmq.Socket, "bind"),
        (zmq.Socket, "getsockopt_string"),
        (threading.Thread, "start"),
    ],
)
def test_a_publisher_that_cannot_be_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int
) -> None:
    before = threading.enumerate()
    contexts = recorded_contexts(monkeypatch)
    planted(monkeypatch, owner, name, number)
    with pytest.raises(RuntimeError, match="planted"):
        EventPublisher(ANY, replay_endpoint=ANY)
    assert threading.enumerate() == before
    assert [context.closed for context in contexts] == [True]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("owner", "name"), [(zmq.Context, "socket"), (zmq.Socket, "connect")])
def test_a_subscriber_that_cannot_be_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int
) -> None:
    contexts = recorded_contexts(monkeypatch)
    planted(monkeypatch, owner, name, number)
    with pytest.raises(RuntimeError, match="planted"):
        EventSubscriber("tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    assert [context.closed for context in contexts] == [True]


def recorded_contexts(monkeypatch: pytest.MonkeyPatch) -> list[zmq.Context[Any]]:
    """Return the contexts that are made from now on."""
    contexts: list[zmq.Context[Any]] = []
    made = zmq.Context

    def make() -> zmq.Context[Any]:
        contexts.append(made())
        return contexts[-1]

    monkeypatch.setattr(zmq, "Context", make)
    return contexts


def test_a_publisher_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.scheduler.events.subscriber.REPLAY_TIMEOUT_S", 0.01)
    nobody = "tcp://127.0.0.1:1"
    with (
        EventSubscriber(nobody, nobody) as subscriber,
        pytest.raises(TimeoutError, match=r"^tcp://127.0.0.1:1 did not answer in 0.01 s$"),
    ):
        list(subscriber.replay(0))


@pytest.mark.parametrize("frames", [[], [b"x"], [b"short", b""], [b"", bytes(9), b""], [b""] * 4])
def test_frames_that_are_no_message(frames: list[bytes]) -> None:
    sizes = [len(frame) for frame in frames]
    with pytest.raises(EventFormatError) as caught:
        _message(frames)
    assert str(caught.value) == (f"a message has frames of {sizes} bytes, not topic, 8 and a batch")


def test_a_message_of_an_old_replay_has_no_topic() -> None:
    assert _message([bytes(8), b"x"]) == _message([b"topic", bytes(8), b"x"]) == (0, b"x")


def test_tokens_are_python_integers_on_the_wire(published: EventPublisher) -> None:
    stored = BlockStored("GPU", (1,), None, np.array([1, 2], np.int32), 2, b"")
    published.publish(EventBatch(0, (stored,)))
    with subscribe(published) as subscriber:
        while not (messages := list(subscriber.replay(0))):
            pass
    assert decode_batch(messages[0].payload).events[0].token_ids == [1, 2]  # type: ignore[union-attr]
