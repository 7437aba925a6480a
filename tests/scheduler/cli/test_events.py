"""`radixkv events check` as a process of its own, and the commands that publish KV events."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from radixkv.kvcache import BlockRemoved, CacheManager, EventBatch
from radixkv.scheduler.cli import events, nodes
from radixkv.scheduler.events import EventPublisher, EventSubscriber, encode_batch
from radixkv.scheduler.events.subscriber import Message
from radixkv.scheduler.fuzz.kv_events import as_event
from radixkv.scheduler.gateway.cache_index import CacheReporter
from radixkv.spec.model.events import Consumer

CHECK = [sys.executable, "-m", "radixkv.scheduler.cli.main", "events", "check"]
ANY = "tcp://127.0.0.1:0"


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with closing(EventPublisher(ANY, replay_endpoint=ANY)) as made:
        yield made


def publish(publisher: EventPublisher, manager: CacheManager, *tokens: int) -> None:
    """Serve a request with a manager, and publish its events."""
    lease = manager.admit(manager.match(tokens))
    manager.publish(lease, tokens)
    manager.release(lease)
    batch = manager.take_events()
    assert batch is not None
    publisher.publish(batch)


def wait_until_kept(publisher: EventPublisher, number: int) -> None:
    """Wait until so many batches are sent to whoever asks: a thread publishes them."""
    with EventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        while len(list(subscriber.replay(0))) < number:
            pass


def check(publisher: EventPublisher, *options: object) -> subprocess.Popen[str]:
    assert publisher.replay_endpoint is not None
    replay = ["--replay", publisher.replay_endpoint]
    return subprocess.Popen(
        [*CHECK, publisher.endpoint, *replay, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_true_stream_in_another_process(publisher: EventPublisher) -> None:
    manager = CacheManager(4, 2, record_events=True)
    for number in range(3):
        publish(publisher, manager, number, number, number, 9)
    with check(publisher, "--batches", 6, "--json", "-") as process:
        number = 3
        while True:  # it may not be connected yet: a gap is closed by a replay
            try:
                process.wait(timeout=0.02)
                break
            except subprocess.TimeoutExpired:
                publish(publisher, manager, number, number, number, 9)
                number += 1
        out, err = process.communicate()
    assert (process.returncode, err) == (0, f"radixkv: checking {publisher.endpoint}\n")
    document = json.loads(out)
    assert document["findings"] == {} and not document["joined_late"]
    assert document["counts"]["GPU blocks"] == 4
    assert document["counts"]["batches"] >= 6


def test_a_false_stream_ends_with_status_1(publisher: EventPublisher) -> None:
    manager = CacheManager(4, 2, record_events=True)
    publish(publisher, manager, 1, 1)
    publisher.publish(EventBatch(1, (BlockRemoved("CPU", (7,)),)))
    wait_until_kept(publisher, 2)
    with check(publisher, "--batches", 2) as process:
        out, _ = process.communicate()
    assert process.returncode == 1
    assert "K5 remove-what-is-there: 1\n  CPU removes 7, which it does not have\n" in out
    assert "A restart of the publisher that cannot be seen breaks K3, K4 and K5, too.\n" in out


def test_a_message_with_other_frames_is_counted_and_the_check_goes_on(radixkv: Any) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscriptions: list[bytes] = []
    with closing(context.socket(zmq.XPUB)) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def publish() -> None:
            subscriptions.append(socket.recv())
            for frames in ([b"x"], [b"xy", bytes(8), encode_batch(1.0, [])]):
                socket.send_multipart(frames)

        thread = Thread(target=publish)
        thread.start()
        endpoint = f"tcp://127.0.0.1:{port}"
        outcome = radixkv("events", "check", endpoint, "--batches", 1, "--topic", "x")
        thread.join()
    context.term()
    assert subscriptions == [b"\x01x"]
    assert outcome.status == 1
    assert (
        "malformed message: 1\n  a message has frames of [1] bytes, not topic, 8 and a batch\n"
    ) in outcome.stdout


def test_an_interrupt_is_the_usual_end(publisher: EventPublisher) -> None:
    publish(publisher, CacheManager(4, 2, record_events=True), 1, 1)
    wait_until_kept(publisher, 1)
    with check(publisher) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"radixkv: checking {publisher.endpoint}\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "No finding.\n" in out


def test_an_interrupt_ends_the_command_wherever_it_arrives(
    radixkv: Any, publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised in the callback of a weak reference is printed and lost."""
    publish(publisher, CacheManager(4, 2, record_events=True), 1, 1)
    wait_until_kept(publisher, 1)
    lost: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: lost.append(each.exc_type))
    num_calls = iter(range(3))

    class Referent:
        pass

    def receive(*_: object) -> None:
        assert next(num_calls) == 0, "the command goes on"
        referent = Referent()
        reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGINT))
        del referent
        assert reference() is None

    monkeypatch.setattr(EventSubscriber, "receive", receive)
    outcome = radixkv(
        *("events", "check", publisher.endpoint, "--replay", publisher.replay_endpoint)
    )
    assert (outcome.status, outcome.stderr.count("\n")) == (0, 1)
    assert KeyboardInterrupt not in lost
    assert "No finding.\n" in outcome.stdout


def test_a_second_interrupt_ends_a_command_that_waits(
    radixkv: Any, publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replay(*_: object) -> Iterator[Message]:
        signal.raise_signal(signal.SIGINT)
        yield Message(0, b"the first one changes nothing here")
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the command goes on")

    monkeypatch.setattr(EventSubscriber, "replay", replay)
    outcome = radixkv("events", "check", publisher.endpoint, "--replay", ANY[:-1] + "1")
    assert outcome.status == 1
    assert "malformed message: 1\n" in outcome.stdout


@pytest.mark.parametrize("seconds", [0, 0.05, 0.2, 3])
def test_a_check_ends_when_its_time_is_over(
    radixkv: Any, publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Even if that is at once, what was published before is checked."""
    publish(publisher, CacheManager(4, 2, record_events=True), 1, 1)
    wait_until_kept(publisher, 1)
    begin = now = 1000.0

    def receive(subscriber: EventSubscriber, timeout_s: float) -> None:
        nonlocal now
        now += timeout_s + 0.001
        assert now < begin + seconds + 1.0, "the command goes on"

    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(EventSubscriber, "receive", receive)
    command = ["events", "check", publisher.endpoint, "--replay", publisher.replay_endpoint]
    outcome = radixkv(*command, "--seconds", seconds, "--json", "-")
    assert outcome.status == 0
    assert json.loads(outcome.stdout)["counts"]["batches by replay"] == 1
    assert begin + seconds <= now < begin + seconds + 0.01


def test_a_late_start_is_told(radixkv: Any, publisher: EventPublisher) -> None:
    publisher.publish(EventBatch(5, (BlockRemoved("GPU", (7,)),)))
    wait_until_kept(publisher, 1)
    outcome = radixkv(
        *("events", "check", publisher.endpoint, "--replay", publisher.replay_endpoint),
        *("--batches", 1),
    )
    assert outcome.status == 0
    assert "Not every batch is known: unknown blocks are not reported." in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "nowhere"], "'nowhere' cannot be connected to: "),
        (["check", ANY, "--seconds", "-1"], "argument --seconds: expected a number of seconds"),
        ([], "the following arguments are required: ACTION"),
    ],
)
def test_bad_input(radixkv: Any, arguments: list[str], message: str) -> None:
    outcome = radixkv("events", *arguments)
    assert outcome.status == 2
    assert message in outcome.stderr


def test_nobody_answers(radixkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.scheduler.events.subscriber.REPLAY_TIMEOUT_S", 0.01)
    nobody = "tcp://127.0.0.1:1"
    outcome = radixkv("events", "check", nobody, "--replay", nobody)
    assert outcome.status == 2
    assert f"radixkv: {nobody} did not answer in 0.01 s\n" in outcome.stderr


@pytest.mark.parametrize("json_options", [(), ("--json", "-")])
def test_a_silent_address_is_no_success(
    radixkv: Any, publisher: EventPublisher, json_options: tuple[str, ...]
) -> None:
    outcome = radixkv("events", "check", publisher.endpoint, "--seconds", 0, *json_options)
    assert outcome.status == 2 and "No finding" not in outcome.stdout
    why = f"radixkv: no batch came from {publisher.endpoint}, so nothing was checked\n"
    assert outcome.stderr.endswith(why)
    assert not json_options or json.loads(outcome.stdout)["counts"]["batches"] == 0


@pytest.mark.parametrize("library", ["msgspec", "zmq"])
def test_without_its_libraries(radixkv: Any, monkeypatch: Any, library: str) -> None:
    monkeypatch.setattr(
        "radixkv.scheduler.cli.shared.kv_events.find_spec",
        lambda name: None if name == library else name,
    )
    outcome = radixkv("events", "check", ANY)
    assert (outcome.status, outcome.stderr) == (
        2,
        f"radixkv: events needs the library {library!r}: pip install 'radixkv[events]'\n",
    )


def test_generate_publishes_what_it_caches(
    radixkv: Any, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[EventBatch] = []
    monkeypatch.setattr(EventPublisher, "publish", lambda self, batch: batches.append(batch))
    published = ["--kv-events", ANY, "--kv-events-replay", ANY]
    outcome = radixkv(*arguments, "--device-blocks", 10, *published, "--json", "-")
    assert outcome.status == 0
    assert "radixkv: KV events are published at tcp://127.0.0.1:" in outcome.stderr
    assert [batch.seq for batch in batches] == list(range(len(batches)))
    consumer = Consumer()
    for event in (event for batch in batches for event in batch.events):
        consumer.apply(as_event(event))
    cache = json.loads(outcome.stdout)["stats"]["cache"]
    assert len(consumer.held["GPU"]) == cache["cached_blocks"] > 0


class EngineMade(Exception):
    """Ends a node's command where a test has what its engine is made with."""


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("publishes", [True, False])
def test_a_node_tells_its_gateway_of_each_batch_and_publishes_it_if_asked(
    radixkv: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch, role: str, publishes: bool
) -> None:
    published: list[EventBatch] = []
    indexed: list[EventBatch] = []
    monkeypatch.setattr(EventPublisher, "publish", lambda self, batch: published.append(batch))
    monkeypatch.setattr(CacheReporter, "take_in", lambda self, batch: indexed.append(batch))
    batches = [EventBatch(seq, ()) for seq in range(2)]

    def make(*_: object, on_events: Callable[[EventBatch], object], **options: object) -> None:
        for batch in batches:
            on_events(batch)
        raise EngineMade

    for engine in ("PrefillEngine", "DecodeEngine"):
        monkeypatch.setattr(nodes, engine, make)
    given = ["--kv-events", ANY] if publishes else []
    with pytest.raises(EngineMade):
        radixkv(
            f"{role}-node", model_dir, "--gateway", "127.0.0.1:9", "--device-blocks", 10, *given
        )
    assert indexed == batches
    assert published == (batches if publishes else [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-events-replay", ANY], "--kv-events-replay needs --kv-events"),
        (["--disaggregate", "--kv-events", ANY], "--kv-events cannot be combined with --disaggreg"),
        (["--kv-events", "nowhere"], "KV events cannot be bound to 'nowhere': "),
    ],
)
def test_options_that_cannot_work(
    radixkv: Any, arguments: list[object], options: list[str], message: str
) -> None:
    outcome = radixkv(*arguments, *options)
    assert outcome.status == 2
    assert message in outcome.stderr
