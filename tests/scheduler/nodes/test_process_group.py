"""The messages between processes that share a model, with both ends in this process."""

from __future__ import annotations

import atexit
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

from radixkv.scheduler.engine.calls import Call
from radixkv.scheduler.errors import GroupError
from radixkv.scheduler.nodes import process_group
from radixkv.scheduler.nodes.channel import ChannelAddressError, Secret
from radixkv.scheduler.nodes.channel.gate import MAX_UNPROVEN, Gate
from radixkv.scheduler.nodes.process_group import ProcessGroup, init_processes

from .channel.test_curve import greeting

OPTIONS = {"block_size": "4"}
SECRET = Secret(b"a secret that is long enough")
LATE_S = 100.0


class Others:
    """Threads in place of the other processes, each of which joins and then does something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address = ""
        self._local = threading.local()
        self._bound = threading.Event()
        self._threads: list[threading.Thread] = []
        self.errors: dict[int, str] = {}
        monkeypatch.setattr(jax, "process_index", lambda: getattr(self._local, "process", 0))
        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(process_group, "_from_process_0", self._share)
        monkeypatch.setattr(process_group, "_LINGER_MS", 1000)

    def _share(self, text: str) -> str:
        if jax.process_index() == 0:
            self.bind(text)
        assert self._bound.wait(LATE_S)
        return self.address

    def bind(self, address: str) -> None:
        """Tell the other processes the address of process 0."""
        self.address = address
        self._bound.set()

    def start(self, process: int, does: Callable[[ProcessGroup], object], **options: Any) -> None:
        """Begin a thread; its group is closed when `does` returns."""

        def run() -> None:
            self._local.process = process
            try:
                group = ProcessGroup(timeout_s=LATE_S, **options)
                try:
                    does(group)
                finally:
                    group.close()
            except GroupError as error:
                self.errors[process] = str(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def end(self) -> None:
        for thread in self._threads:
            thread.join(LATE_S)
            assert not thread.is_alive()


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    made = Others(monkeypatch)
    yield made
    made.end()


def follow(group: ProcessGroup) -> list[Call]:
    group.join(OPTIONS)
    return list(group.calls())


def join(group: ProcessGroup) -> None:
    """Join, and end as a process that is killed does."""
    group.join(OPTIONS)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def fails(message: str) -> Any:
    return pytest.raises(GroupError, match=f"^{message}$")


with_and_without_secret = pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])


@with_and_without_secret
def test_all_receive_each_call(others, secret):
    found: dict[int, list[Call]] = {}
    for process in (1, 2):
        others.start(
            process, lambda group: found.update({group.process_id: follow(group)}), secret=secret
        )
    sent = [Call("step", (1, 8), (np.arange(3, dtype=np.int32),)), Call("draw")]
    with ProcessGroup(secret=secret, timeout_s=LATE_S) as group:
        group.join(OPTIONS)
        for call in sent:
            group.tell(call.name, call.flags, *call.arrays)
        group.wait((jnp.zeros(3), None))
        assert group._sender is not None and group._sender.late == []
    group.close()
    others.end()
    assert others.errors == {}
    for calls in found.values():
        assert [each[:2] for each in calls] == [each[:2] for each in sent]
        np.testing.assert_array_equal(calls[0].arrays[0], sent[0].arrays[0])


def test_other_options_are_refused(others):
    others.start(1, lambda group: group.join({"block_size": "8"}))
    message = "process 1 has block_size 8, process 0 4: all need the same"
    with fails(message), ProcessGroup(timeout_s=LATE_S) as group:
        group.join(OPTIONS)
    others.end()
    assert others.errors == {1: message}


def test_a_process_that_does_not_come(others):
    with fails("process 1, 2 did not join in 0.01 s"), ProcessGroup(timeout_s=0.01) as group:
        group.join(OPTIONS)


def test_all_know_the_numbers_of_all(others):
    found: dict[int, list[list[int]]] = {}
    for process in (1, 2):
        others.start(
            process, lambda group: found.update({group.process_id: group.share([group.process_id])})
        )
    with ProcessGroup(timeout_s=LATE_S) as group:
        found[0] = group.share([2**40])
        others.end()
    assert others.errors == {}
    assert all(found[process] == [[2**40], [1], [2]] for process in range(3))


@pytest.mark.parametrize("waits", [lambda group: group.share([1]), join], ids=["share", "join"])
def test_a_process_that_fails_before_it_joins(others, waits):
    def fail(group: ProcessGroup) -> None:
        with group:
            raise GroupError("no such model")

    others.start(1, fail)
    with fails("process 1: no such model"), ProcessGroup(timeout_s=LATE_S) as group:
        waits(group)
    others.end()
    assert others.errors == {1: "no such model"}


def test_a_failure_of_process_0_ends_one_that_waits_for_numbers(others):
    others.start(1, lambda group: group.share([1]))
    with suppress(KeyError), ProcessGroup(timeout_s=LATE_S) as group:
        assert group._socket.poll(round(LATE_S * 1000))
        raise KeyError("model")
    others.end()
    assert others.errors == {1: "process 0 has failed: 'model'"}


def use(group: ProcessGroup) -> None:
    group.tell("draw")
    group.wait(())


class Broken:
    """An array whose computation has failed."""

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> None:
        raise RuntimeError("Connection closed\nby peer")


def fail(group: ProcessGroup) -> None:
    group.wait(Broken())


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("looks", [use, ProcessGroup.check, fail], ids=["call", "idle", "error"])
def test_a_process_that_is_lost(others, looks, lost):
    """All others are told, whichever it is."""
    others.start(3 - lost, follow)
    others.start(lost, join)
    message = f"process {lost} is lost: Host unreachable"
    with fails(message), ProcessGroup(timeout_s=LATE_S) as group:
        group.join(OPTIONS)
        while True:  # until ZeroMQ has noticed
            looks(group)
    others.end()
    assert others.errors == {3 - lost: message}


def test_a_process_that_executes_another_call(others):
    def forge(group: ProcessGroup) -> None:
        group.join(OPTIONS)
        for _ in group.calls():
            receiver: Any = group._receiver
            receiver._digest = bytes(16)

    others.start(1, follow)
    others.start(2, forge)
    message = (
        "process 2 reports call 1 with another digest: it has executed other calls than process 0 "
        "has sent"
    )
    with fails(message), ProcessGroup(timeout_s=LATE_S) as group:
        group.join(OPTIONS)
        group.tell("draw")
        group.wait(())
    others.end()
    assert others.errors == {1: message, 2: message}


def test_a_process_that_gets_a_damaged_call(others):
    others.start(1, follow)
    others.start(2, follow)
    with (
        pytest.raises(GroupError, match=r"^process [12]: call 2 came where call 1 was due: calls"),
        ProcessGroup(timeout_s=LATE_S) as group,
    ):
        group.join(OPTIONS)
        sender: Any = group._sender
        sender.send(Call("lost"))
        group.tell("draw")
        group.wait(())
    others.end()
    assert "call 2 came where call 1 was due" in others.errors[1]


def test_a_process_that_is_late(others):
    release = threading.Event()

    def wait(group: ProcessGroup) -> None:
        group.join(OPTIONS)
        next(group.calls())
        assert release.wait(LATE_S)

    others.start(1, wait)
    others.start(2, wait)
    with (
        fails("process 1, 2 did not report a call in 0.01 s"),
        ProcessGroup(timeout_s=LATE_S) as group,
    ):
        group.join(OPTIONS)
        group.tell("draw")
        group._timeout_s = 0.01
        try:
            group.wait(())
        finally:
            release.set()


def test_reports_that_come_at_the_last_moment_are_in_time(others, monkeypatch):
    """The time is over as soon as the last report has been taken."""
    others.start(1, follow)
    others.start(2, follow)
    with ProcessGroup(timeout_s=LATE_S) as group:
        group.join(OPTIONS)
        group.tell("draw")
        sender, now = group._sender, time.monotonic
        assert sender is not None
        late = SimpleNamespace(monotonic=lambda: now() if sender.late else now() + 2 * LATE_S)
        with monkeypatch.context() as context:
            context.setattr(process_group, "time", late)
            group.wait(())
        assert sender.late == []


@with_and_without_secret
def test_an_error_of_process_0_ends_the_others(others, secret):
    """Its last message is heard, also through the gate."""
    others.start(1, follow, secret=secret)
    others.start(2, follow, secret=secret)
    error = KeyError("request") if secret is None else KeyError()
    with suppress(KeyError), ProcessGroup(secret=secret, timeout_s=LATE_S) as group:
        group.join(OPTIONS)
        raise error
    others.end()
    message = f"process 0 has failed: {str(error) or 'KeyError'}"
    assert others.errors == {1: message, 2: message}
    for use_again in (use, ProcessGroup.check, lambda group: group.wait(())):
        with fails(re.escape(message)):
            use_again(group)


def test_the_last_message_is_heard_though_the_gate_has_yet_to_pass_it_on(others, monkeypatch):
    monkeypatch.setattr(process_group, "_LINGER_MS", int(1000 * LATE_S))
    is_held, holds, is_over = threading.Event(), threading.Event(), Gate._is_over

    def is_over_late(gate: Gate) -> bool:
        while is_held.is_set() and gate._end_s is None:
            holds.set()
            time.sleep(0.001)
        return is_over(gate)

    monkeypatch.setattr(Gate, "_is_over", is_over_late)
    others.start(1, follow, secret=SECRET)
    others.start(2, follow, secret=SECRET)
    with suppress(KeyError), ProcessGroup(secret=SECRET, timeout_s=LATE_S) as group:
        group.join(OPTIONS)
        is_held.set()
        host, _, port = group.address.rpartition(":")
        with socket.create_connection((host, int(port))):  # wakes the gate
            assert holds.wait(LATE_S)
        raise KeyError("request")
    others.end()
    message = "process 0 has failed: 'request'"
    assert others.errors == {1: message, 2: message}


def test_a_step_that_fails(others, monkeypatch):
    monkeypatch.setattr(process_group, "_AFTER_ERROR_S", 0.0)

    others.start(1, follow)
    others.start(2, follow)
    with (
        fails("a step failed: Connection closed by peer"),
        ProcessGroup(timeout_s=LATE_S) as group,
    ):
        group.join(OPTIONS)
        group.wait(Broken())


def test_a_step_that_is_not_computed(others):
    never = threading.Event()

    class Hangs:
        def is_ready(self) -> bool:
            return False

        def block_until_ready(self) -> None:
            assert never.wait(LATE_S)

    others.start(1, follow)
    others.start(2, follow)
    with fails("a step was not computed in 0 s"), ProcessGroup(timeout_s=LATE_S) as group:
        group.join(OPTIONS)
        group._timeout_s = 0
        try:
            group.wait(Hangs())
        finally:
            never.set()


def test_addresses_that_cannot_be_used(others):
    with pytest.raises(ChannelAddressError, match=r"^0.0.0.0:0 can be reached from other machines"):
        ProcessGroup("0.0.0.0:0")
    taken = zmq.Context()
    router = taken.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ChannelAddressError, match=rf"^cannot bind 127.0.0.1:{port}: Address alr"):
        ProcessGroup(f"127.0.0.1:{port}")
    taken.destroy(linger=0)
    others.start(1, follow)
    others.end()
    assert others.errors == {1: "process 0 could not open its address"}


@pytest.mark.parametrize("theirs", [None, Secret(b"another secret of theirs")], ids=["no", "other"])
def test_another_secret(others, theirs):
    others.start(1, follow, secret=theirs)
    with ProcessGroup(secret=SECRET, timeout_s=LATE_S):
        others.end()
    assert re.fullmatch(
        r"process 0 at 127.0.0.1:\d+ (has another secret, or none|is lost)", others.errors[1]
    )


@pytest.mark.parametrize(
    ("last", "message"), [([b"beat"], "process 0 at {} is lost"), ([b"stop", b"why"], "why")]
)
def test_a_message_that_comes_with_the_end_of_its_connection(others, monkeypatch, last, message):
    """The connection has ended when it is looked at first, and then the message is there."""
    is_first = threading.Event()

    class Poller(zmq.Poller):
        def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
            found = super().poll(timeout)
            if is_first.is_set():
                is_first.clear()
                return [each for each in found if each[0].type != zmq.DEALER]
            return found

    def follow_late(group: ProcessGroup) -> None:
        group.join(OPTIONS)
        for socket_ in (group._socket, group._monitor):
            assert socket_.poll(round(LATE_S * 1000))
        is_first.set()
        list(group.calls())

    monkeypatch.setattr(zmq, "Poller", Poller)
    monkeypatch.setattr(process_group, "_LINGER_MS", 0)  # nobody hears its last message
    context = zmq.Context()
    process_0 = context.socket(zmq.ROUTER)
    others.bind(f"127.0.0.1:{process_0.bind_to_random_port('tcp://127.0.0.1')}")
    others.start(1, follow_late)
    name, *_ = process_0.recv_multipart()
    process_0.send_multipart([name, b"start"])
    process_0.send_multipart([name, *last])
    context.destroy(linger=round(LATE_S * 1000))
    others.end()
    assert others.errors == {1: message.format(others.address)}


def wait_until_given_up(group: ProcessGroup) -> None:
    """Wait until ZeroMQ has no connection to process 0, and tries to make none."""
    assert group._monitor.poll(round(LATE_S * 1000))
    while group._socket.poll(0, zmq.POLLOUT):
        pass


@pytest.mark.parametrize(
    ("mechanism", "secret"), [(b"NULL", SECRET), (b"CURVE", None)], ids=["no secret", "secret"]
)
@pytest.mark.parametrize(
    ("says", "is_told"),
    [(join, True), (lambda group: group.share([1]), True), (lambda group: None, False)],
    ids=["join", "share", "nothing"],
)
def test_a_process_does_not_wait_for_a_connection_that_was_given_up(
    others, mechanism, secret, says, is_told
):
    """Process 0 has no secret, or one that this one lacks, which says something only later."""

    def say_later(group: ProcessGroup) -> None:
        wait_until_given_up(group)
        with group:
            says(group)
            raise GroupError("no such model")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LATE_S)
        others.bind(f"127.0.0.1:{server.getsockname()[1]}")
        others.start(1, say_later, secret=secret)
        connection, _ = server.accept()
        with connection:
            connection.sendall(greeting(mechanism))
            others.end()
    other = f"process 0 at {others.address} has another secret, or none"
    assert others.errors == {1: other if is_told else "no such model"}


def test_strangers_without_the_secret(others):
    """They take no more than the gate grants, and a process that comes after them joins."""
    before = num_files()
    with ExitStack() as strangers, ProcessGroup(secret=SECRET, timeout_s=LATE_S) as group:
        host, _, port = group.address.rpartition(":")
        for _ in range(3 * MAX_UNPROVEN):
            strangers.enter_context(socket.create_connection((host, int(port)), timeout=LATE_S))
        for process in (1, 2):
            others.start(process, follow, secret=SECRET)
        group.join(OPTIONS)
        assert group._gate is not None and len(group._gate._unproven) <= MAX_UNPROVEN
        group.tell("draw")
        group.wait(())
    others.end()
    assert others.errors == {}
    assert num_files() == before


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        (b"", [b"join", b"{}"]),
        (b"0", [b"join", b"{}"]),
        (b"3", [b"join", b"{}"]),
        (b"1", [b"join"]),
    ],
)
def test_a_message_of_somebody_else(others, name, frames):
    """It has no process's name, or does not say what processes say."""
    sender = re.escape(repr(name)) if name else "b.+"  # else ZeroMQ chooses four bytes at random
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        if name:
            stranger.set(zmq.ROUTING_ID, name)
        with (
            pytest.raises(GroupError, match=rf"^a message came from {sender}, which is none of 3$"),
            ProcessGroup(timeout_s=LATE_S) as group,
        ):
            stranger.connect(f"tcp://{group.address}")
            stranger.send_multipart(frames)
            group.join(OPTIONS)


def test_a_group_is_closed_at_the_exit_unless_it_was_before(others, monkeypatch):
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    group = ProcessGroup()
    assert at_exit == [group.close]
    for _ in range(2):
        group.close()
        assert at_exit == [] and group._context.closed


def test_processes_are_connected_by_jax(monkeypatch):
    given: list[Any] = []
    monkeypatch.setattr(jax.config, "update", lambda *pair: given.append(pair))
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **options: given.append((args, options))
    )
    init_processes("10.0.0.1:1234", 4, 2)
    assert given == [
        ("jax_cpu_collectives_implementation", "gloo"),
        (
            ("10.0.0.1:1234", 4, 2),
            {"heartbeat_timeout_seconds": 30, "coordinator_bind_address": "10.0.0.1:1234"},
        ),
    ]


class Slow:
    """A clock that moves when the test says so, and a group that waits by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process_id: int) -> None:
        self.now = 0.0
        self.waits_ms: list[int] = []
        self.group: Any = ProcessGroup.__new__(ProcessGroup)
        vars(self.group).update(process_id=process_id, num_processes=3, _timeout_s=100.0)
        vars(self.group).update(_failure=None, _is_lost=False, address="10.0.0.1:5", _monitor=None)
        end = Mock(poll=self.poll, recv_multipart=lambda: [b"beat"])
        vars(self.group).update(_socket=end)
        monkeypatch.setattr(process_group, "time", SimpleNamespace(monotonic=lambda: self.now))

    def poll(self, timeout_ms: int) -> bool:
        """Let a message come after 60 s, and no other."""
        self.waits_ms.append(timeout_ms)
        self.now += 60.0
        return len(self.waits_ms) == 1


def test_a_process_that_joins_does_not_prolong_the_wait_for_another(monkeypatch):
    world = Slow(monkeypatch, 0)
    world.group._receive_report = lambda: (1, b"share", [b"[1]"])
    with fails("process 2 did not join in 100 s"):
        world.group.share([0])
    assert world.waits_ms == [100_000, 40_000]


def test_heartbeats_do_not_prolong_the_wait_for_an_answer(monkeypatch):
    world = Slow(monkeypatch, 1)

    class Poller:
        def register(self, *_: object) -> None:
            """The test says what is ready."""

        def poll(self, timeout_ms: int) -> list[Any]:
            return [(world.group._socket, zmq.POLLIN)] if world.poll(timeout_ms) else []

    monkeypatch.setattr(zmq, "Poller", Poller)
    with fails("process 0 at 10.0.0.1:5 did not answer in 100 s"):
        world.group.share([1])
    assert world.waits_ms == [100_000, 40_000]


def test_reports_are_due_at_the_time_of_the_step_itself(monkeypatch):
    """What it takes to compute the step is not given to its reports once more."""
    world, computed = Slow(monkeypatch, 0), SimpleNamespace(error=None)

    def compute(timeout_s: float) -> bool:
        world.now += 90.0
        return True

    computed.wait = compute
    monkeypatch.setattr(process_group, "_Computed", lambda arrays: computed)
    world.group._sender = SimpleNamespace(late=[2])
    world.group._take_reports = lambda: None
    with fails("process 2 did not report a call in 100 s"):
        world.group.wait(())
    assert len(world.waits_ms) == 1


def test_a_process_that_fails_while_nothing_is_called_is_heard(others):
    def fail(group: ProcessGroup) -> None:
        with group:
            group.join(OPTIONS)
            raise GroupError("no more memory")

    others.start(1, fail)
    others.start(2, follow)
    with fails("process 1: no more memory"), ProcessGroup(timeout_s=LATE_S) as group:
        group.join(OPTIONS)
        assert group._socket.poll(round(LATE_S * 1000))
        group.check()
    others.end()
    assert others.errors == {1: "no more memory", 2: "process 1: no more memory"}


def test_no_call_is_dropped_and_a_dead_connection_is_noticed(others):
    limits = {
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.HANDSHAKE_IVL: 10_000,
        zmq.HEARTBEAT_IVL: 2000,
        zmq.HEARTBEAT_TIMEOUT: 10_000,
        zmq.LINGER: 1000,
    }
    found: dict[int, dict[int, Any]] = {}

    def look(group: ProcessGroup) -> None:
        found[group.process_id] = {option: group._socket.get(option) for option in limits}

    others.start(1, look)
    with ProcessGroup(timeout_s=LATE_S) as group:
        look(group)
        others.end()
    assert found == {0: limits, 1: limits}
