"""Broadcast calls, over a network with every fault, and bugs that the rules of a group find."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, call

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.kvcache.copies.block_copies import BlockCopies
from radixkv.scheduler.engine import calls, group_runners
from radixkv.scheduler.engine.adjustments import Adjustments
from radixkv.scheduler.engine.batch_state import BatchState
from radixkv.scheduler.engine.calls import (
    Call,
    CallReceiver,
    CallSender,
    array_to_bytes,
    bytes_to_array,
    check_weights,
    decode_call,
    describe_difference,
    encode_call,
)
from radixkv.scheduler.engine.group_runners import (
    FollowingRunner,
    LeadingRunner,
    describe_options,
    digest_params,
)
from radixkv.scheduler.engine.logprobs import Logprobs
from radixkv.scheduler.engine.model_runner import ModelRunner, _Results
from radixkv.scheduler.engine.programs import Programs
from radixkv.scheduler.engine.step_arrays import Shape
from radixkv.scheduler.errors import CallError, GroupError
from radixkv.spec.model.group import GroupLedger
from radixkv.spec.rules.rule import Violation

START = b"options"
FAULTS = ("lose", "double", "swap", "damage", "forge", "mistake")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("send", "update", "deliver", "report", "use")),
        st.integers(1, 2),
        st.sampled_from((None, None, None, *FAULTS)),
    ),
    max_size=14,
)


class World:
    """Process 0 and two others; the messages to and from each are in a queue.

    Weights are numbers. After an update, each process gets those of the call's revision; by
    mistake, they may be others.
    """

    def __init__(self, module: Any = calls) -> None:
        self.module, self.error = module, module.CallError
        self.ledger = GroupLedger[bytes]((1, 2))
        self.sender = module.CallSender(START, (1, 2))
        self.receivers = {process: module.CallReceiver(START) for process in (1, 2)}
        self.digests = {process: START for process in (1, 2)}
        self.to: dict[int, deque[tuple[int, list[bytes], bool]]] = {1: deque(), 2: deque()}
        self.back: dict[int, deque[list[bytes]]] = {1: deque(), 2: deque()}
        self.ended = False
        self.weights = dict.fromkeys(range(3), 0)

    def apply(self, kind: str, process: int, fault: str | None) -> None:
        """Do one step; a process that ends with an error ends the group."""
        if self.ended:
            return
        try:
            getattr(self, kind)(process, fault)
        except self.error as error:
            self.ended = True
            self.ledger.end(str(error))

    def send(self, process: int, fault: str | None) -> None:
        self.tell("step", len(self.ledger.sent) + 1)

    def update(self, process: int, fault: str | None) -> None:
        self.weights[0] += 1
        self.tell("weights", self.weights[0])
        self.tell("check_weights", self.weights[0])

    def tell(self, name: str, value: int) -> None:
        number = len(self.ledger.sent) + 1
        self.ledger.send(bytes([value]), self.weights[0])
        call = self.module.Call(name, (number,), (self.module.bytes_to_array(bytes([value])),))
        frames = self.sender.send(call)
        for each in self.to:
            self.to[each].append((number, list(frames), False))

    def deliver(self, process: int, fault: str | None) -> None:
        queue = self.to[process]
        if not queue:
            return
        if fault is not None and (fault != "swap" or len(queue) > 1):
            self.ledger.is_faulty = True
        number, frames, is_damaged = queue.popleft()
        match fault:
            case "lose":
                return
            case "double":
                queue.appendleft((number, frames, is_damaged))
            case "swap" if queue:
                other = queue.popleft()
                queue.appendleft((number, frames, is_damaged))
                number, frames, is_damaged = other
            case "damage":
                frames, is_damaged = [*frames[:-1], b"\xff" * 4], True
            case "forge":  # process 0 has sent another call to this process than to the others
                frames = [*frames[:-1], b"\xfe\0\0\0"]
                frames[1] = calls.chain_digest(self.digests[process], frames[2:])
        receiver = self.receivers[process]
        call = receiver.receive(frames)
        executed = self.module.array_to_bytes(call.arrays[0])
        match call.name:
            case "weights":
                self.weights[process] = 99 if fault == "mistake" else executed[0]
            case "check_weights":
                self.module.check_weights(call, bytes([self.weights[process]]))
        weights = self.weights[process] if call.name == "step" else None
        self.ledger.execute(process, number, executed, is_damaged=is_damaged, weights=weights)
        self.digests[process] = frames[1]
        self.back[process].append(receiver.acknowledge())

    def report(self, process: int, fault: str | None) -> None:
        queue = self.back[process]
        if not queue:
            return
        frames = queue.popleft()
        if fault in ("lose", "double", "damage"):
            self.ledger.is_faulty = True
        if fault == "lose":
            return
        if fault == "double":
            queue.appendleft(frames)
        if fault == "damage":
            frames = [frames[0], bytes(16)]
        self.sender.acknowledge(process, frames)

    def use(self, process: int, fault: str | None) -> None:
        if not self.sender.late:
            self.ledger.use()


def run(steps: Any, module: Any = calls) -> World:
    world = World(module)
    for step in steps:
        world.apply(*step)
    return world


@given(STEPS)
def test_the_rules_hold_whatever_the_network_does(steps):
    world = run(steps)
    if world.ended or any(fault for _, _, fault in steps):
        return
    # Without a fault, all that is under way arrives, and the results may be used.
    for process in (1, 2):
        while world.to[process] or world.back[process]:
            world.apply("deliver", process, None)
            world.apply("report", process, None)
    assert world.sender.late == [] and not world.ended
    world.apply("use", 1, None)


SEND = ("send", 1, None)
SECOND = [("deliver", 2, None), ("report", 2, None)]
BUGS = {
    "a receiver takes any number": (
        ("if number != self.number + 1:", "if False:"),
        ([SEND, ("deliver", 1, "double"), ("deliver", 1, "forge")], "G1"),
    ),
    "a receiver does not compare digests": (
        ("if digest != frames[1]:", "if False:"),
        ([SEND, ("deliver", 1, "damage")], "G2"),
    ),
    "the sender takes any digest": (
        ("if frames[1] != self._digests[due]:", "if False:"),
        (
            [SEND, ("deliver", 1, "forge"), ("report", 1, None), *SECOND, ("use", 1, None)],
            "G3",
        ),
    ),
    "a report counts for all calls": (
        (
            "        self._reported[receiver] = due\n",
            "        self._reported[receiver] = self.number\n",
        ),
        (
            [SEND, SEND, ("deliver", 1, None), ("report", 1, None), *SECOND, ("use", 1, None)],
            "G3",
        ),
    ),
    "one report is enough": (
        ("if number < self.number]", "if max(self._reported.values()) < self.number]"),
        ([SEND, ("deliver", 1, None), ("report", 1, None), ("use", 1, None)], "G3"),
    ),
    "a receiver forgets the digest of the last call": (
        ("self.number, self._digest = number, digest", "self.number = number"),
        ([SEND, ("deliver", 1, None), SEND, ("deliver", 1, None)], "G4"),
    ),
    "a process does not compare weights": (
        ("if digest != due:", "if False:"),
        (
            [
                *(("update", 1, None), SEND, ("deliver", 1, "mistake")),
                *(("deliver", 1, None), ("deliver", 1, None)),
            ],
            "G5",
        ),
    ),
    "the digest of the sender covers one call": (
        (
            "self._digest = chain_digest(self._digest, frames)\n",
            "self._digest = chain_digest(b'', frames)\n",
        ),
        ([SEND, ("deliver", 1, None)], "G4"),
    ),
}


def planted(old: str, new: str) -> ModuleType:
    """A copy of the module with a bug."""
    source = Path(calls.__file__).read_text("utf-8")
    assert source.count(old) == 1, old
    module = ModuleType("radixkv.scheduler.engine.planted_calls")
    module.__package__ = "radixkv.scheduler.engine"
    sys.modules[module.__name__] = module
    try:
        exec(compile(source.replace(old, new), calls.__file__, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return module


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_breaks_its_rule(name):
    edit, (trace, code) = BUGS[name]
    with pytest.raises(Violation) as found:
        run(trace, planted(*edit))
    assert found.value.rule.code == code
    run(trace)  # without the bug, it does not


@pytest.mark.parametrize(
    "dtype", ["int32", "float32", "bfloat16", "float16", "bool"], ids=lambda name: name
)
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 1, 4)], ids=str)
def test_a_call_survives_the_wire(dtype, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    call = Call("step", (1, 8, 0), (array, array))
    name, flags, arrays = decode_call(encode_call(call))
    assert (name, flags) == ("step", (1, 8, 0))
    for each in arrays:
        assert each.dtype == array.dtype and each.shape == shape
        assert each.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "0 frames are not a call: list index out of range"),
        ([b"["], "1 frames are not a call: Expecting value"),
        ([b'["a", [], [["object", [1]]]]', b"x"], "no array of a call has dtype 'object'"),
        ([b'["a", [], [["int32", [2]]]]', b"1234"], r"int32\[2\] does not have 4 bytes"),
        ([b'["a", [], []]', b"1234"], "2 frames are not a call: zip"),
    ],
)
def test_frames_that_are_no_call(frames, message):
    with pytest.raises(CallError, match=message):
        decode_call(frames)


def test_what_each_error_says():
    sender, receiver = CallSender(START, [1]), CallReceiver(START)
    first, second = sender.send(Call("a")), sender.send(Call("b"))
    with pytest.raises(CallError, match=r"^call 2 came where call 1 was due: calls are lost, rep"):
        receiver.receive(second)
    with pytest.raises(CallError, match=r"^call 1 has another digest than process 0 sent with it"):
        receiver.receive([*first[:2], second[2]])
    assert receiver.receive(first) == Call("a")
    assert sender.late == [1]
    with pytest.raises(CallError, match=r"^process 1 reports call 2 where call 1 of 2 is due$"):
        sender.acknowledge(1, second[:2])
    with pytest.raises(CallError, match=r"^process 1 reports call 1 with another digest: it has"):
        sender.acknowledge(1, [first[0], second[1]])
    sender.acknowledge(1, receiver.acknowledge())
    receiver.receive(second)
    sender.acknowledge(1, receiver.acknowledge())
    assert sender.late == []
    with pytest.raises(CallError, match=r"^process 1 reports call 2 where call 3 of 2 is due$"):
        sender.acknowledge(1, receiver.acknowledge())


@pytest.mark.parametrize("processes", [(), (1,), (1, 2, 3)])
def test_calls_are_remembered_until_every_process_has_reported_them(processes):
    sender = CallSender(START, processes)
    receivers = {process: CallReceiver(START) for process in processes}
    for _ in range(3):
        sent = [sender.send(Call("step", (number,))) for number in range(5)]
        for process, receiver in receivers.items():
            assert len(sender._digests) == 5, "the last one has reported none"
            for frames in sent:
                receiver.receive(frames)
                sender.acknowledge(process, receiver.acknowledge())
        assert not (sender.late or sender._digests)


def test_weights_that_differ_are_found():
    call = Call("check_weights", (), (bytes_to_array(b"\0\xff"),))
    check_weights(decode_call(encode_call(call)), b"\0\xff")
    with pytest.raises(CallError, match=r"^new weights differ: process 0 has 00ff, this one 00fe$"):
        check_weights(call, b"\0\xfe")


@given(st.binary(max_size=5))
def test_bytes_survive_as_an_array(data):
    array = bytes_to_array(data)
    assert array.dtype == np.int32 and array_to_bytes(array) == data


def test_options_that_differ_are_named():
    options = {"block_size": "4", "dtype": "float32"}
    assert describe_difference(1, options, dict(options)) is None
    message = "process 2 has block_size 8, process 0 4: all need the same"
    assert describe_difference(2, options | {"block_size": "8"}, options) == message
    message = "process 2 has more 1, process 0 None: all need the same"
    assert describe_difference(2, options | {"more": "1"}, options) == message


def test_the_digest_of_weights_depends_on_each_of_them():
    weights = [jnp.full(4, value, jnp.bfloat16) for value in (1, 2, 3)]

    def digest_of(params: Any) -> bytes:
        return digest_params(params)

    digest = digest_of(weights)
    assert digest == digest_of([np.asarray(each) for each in weights]) and len(digest) == 8
    digests = {digest}
    for place, each in enumerate(weights):
        changed = [*weights[:place], each.at[-1].add(1), *weights[place + 1 :]]
        digests.add(digest_of(changed))
    assert len(digests) == 4


class Weights(NamedTuple):
    embedding: np.ndarray


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_blocks": 9}, {"num_blocks"}),
        ({"block_size": 2}, {"block_size"}),
        ({"host": HostConfig(5)}, {"host_blocks"}),
        ({"name": "other"}, {"model", "configuration"}),
        ({"theta": 2}, {"configuration"}),
        ({"weight": 2}, {"weights"}),
        ({"dtype": np.float32}, {"dtype", "weights"}),
        ({"mesh": SimpleNamespace(shape={"heads": 2, "copies": 1})}, {"mesh"}),
        ({"max_running": 3}, {"max_running"}),
    ],
)
def test_processes_differ_in_what_they_describe(change: dict[str, Any], names: set[str]) -> None:
    def describe(
        *,
        num_blocks: int = 8,
        block_size: int = 4,
        host: HostConfig | None = None,
        name: str = "model",
        theta: int = 1,
        weight: int = 1,
        dtype: Any = np.float16,
        mesh: Any = None,
        max_running: int = 2,
    ) -> dict[str, str]:
        config = SimpleNamespace(name=name, theta=theta)
        params = Weights(np.full(2, weight, dtype))
        model: Any = SimpleNamespace(config=config, params=params, mesh=mesh)
        manager = CacheManager(num_blocks, block_size, host=host)
        return describe_options(model, manager, {"max_running": max_running})

    ours, theirs = describe(), describe(**change)
    assert {"radixkv", "jax"} < ours.keys() == theirs.keys()
    assert {each for each in ours if ours[each] != theirs[each]} == names


def leading_runner() -> tuple[Any, Mock]:
    """Return a runner of process 0 without programs, and its group."""
    runner: Any = LeadingRunner.__new__(LeadingRunner)
    runner._group = Mock()
    return runner, runner._group


def test_no_result_is_used_before_every_process_has_reported():
    runner, group = leading_runner()
    tokens: Any = np.array([5, 6], np.int32)
    logprobs: Any = object()
    runner._results = deque([_Results(tokens, 1, logprobs)])
    group.wait.side_effect = GroupError("process 1 is late")
    with pytest.raises(GroupError, match=r"^process 1 is late$"):
        runner.read()
    assert len(runner._results) == 1, "a step is lost"
    group.wait.side_effect = None
    assert runner.read() == [5]
    assert group.wait.call_args == call((tokens, logprobs))


@pytest.mark.parametrize("act", [LeadingRunner.collect, LeadingRunner.read])
def test_a_lost_process_is_found_first(
    act: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, group = leading_runner()
    runner._results = deque([Mock()])
    for name in ("collect", "read"):
        monkeypatch.setattr(ModelRunner, name, Mock(side_effect=AssertionError("too early")))
    group.check.side_effect = group.wait.side_effect = GroupError("process 1 is lost")
    with pytest.raises(GroupError, match=r"^process 1 is lost$"):
        act(runner)


def test_process_0_waits_until_all_have_its_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, group = leading_runner()
    new: Any = [jnp.ones(2)]

    def set_params(runner: Any, params: Any, _: str) -> None:
        assert not group.mock_calls, "another process has them first"
        runner.model = SimpleNamespace(params=params)

    monkeypatch.setattr(ModelRunner, "set_params", set_params)
    runner.set_params(new, "n")
    told = [(name, array_to_bytes(array)) for name, _, array in _arguments(group.tell)]
    assert told == [("weights", b"n"), ("check_weights", digest_params(new))]
    assert group.mock_calls[2:] == [call.wait(())]


A, B, C, D, E, F = (np.full(2, each, np.int32) for each in range(6))
"""Arrays that mocks compare by identity."""


@pytest.mark.parametrize(
    ("part", "name", "given", "options", "told"),
    [
        ("Programs", "run", (Shape(True, 8, 4), A, B, C, D), True, ("step", (1, 8, 4, 1), B)),
        ("Programs", "run", (Shape(False, 9, 4), A, B, C, D), False, ("step", (0, 9, 4, 0), B)),
        ("Programs", "draw", (A, B, C, D), None, ("draw",)),
        ("Adjustments", "set_counts", (A,), None, ("set_counts", (), A)),
        ("Adjustments", "adjust_rows", (A, B, C, True, None, D), None, ("adjust", (1,), C)),
        ("Adjustments", "adjust_rows", (A, B, C, False, E, D), None, ("adjust", (0,), C, E)),
        ("Adjustments", "count_rows", (A, B, C), None, ("count", (), C)),
        ("Logprobs", "of_output", (A, B), None, ("logprobs",)),
        ("Logprobs", "of_targets", (A, B, C, D), None, ("prompt_logprobs", (), A)),
    ],
)
def test_process_0_tells_what_it_dispatches_before_it_does(
    part: str,
    name: str,
    given: tuple[Any, ...],
    options: bool | None,
    told: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, named = Mock(), {} if options is None else {"keep_hidden": options}
    base = {"Programs": Programs, "Adjustments": Adjustments, "Logprobs": Logprobs}[part]
    monkeypatch.setattr(base, name, log.dispatch)
    leading = getattr(group_runners, f"_Leading{part}")(SimpleNamespace(kept=5), log.tell)
    result = getattr(leading, name)(*given, **named)
    assert log.mock_calls == [call.tell(*told), call.dispatch(*given, **named)]
    assert leading.kept == 5
    if name not in ("set_counts", "count_rows"):
        assert result is log.dispatch.return_value


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("gather", (A, B, 4), ("gather", (4,), B)),
        ("scatter", (A, (C, D), B, 8), ("scatter", (8,), B, C, D)),
        ("copy", (A, B, C, 2), ("copy_sample", (2,), B, C)),
    ],
)
def test_process_0_tells_no_copy_that_it_refuses(
    name: str, given: tuple[Any, ...], told: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Mock()
    for method, function in (("check_ids", log.check_ids), (name, log.dispatch)):
        monkeypatch.setattr(BlockCopies, method, function)
    leading: Any = SimpleNamespace()
    leading = group_runners._LeadingCopies(leading, log.tell, "copy_sample")
    getattr(leading, name)(*given)
    assert [each[0] for each in log.mock_calls] == ["check_ids", "tell", "dispatch"]
    assert log.mock_calls[1:] == [call.tell(*told), call.dispatch(*given)]
    checked = np.concatenate([B, C]) if name == "copy" else B
    assert log.check_ids.call_args.args[0].tolist() == checked.tolist()
    log.reset_mock()
    log.check_ids.side_effect = IndexError
    with pytest.raises(IndexError):
        getattr(leading, name)(*given)
    assert not log.tell.called and not log.dispatch.called


def test_another_process_dispatches_what_it_is_told() -> None:
    """With the arrays of the calls, and what its own programs returned for the call before."""
    runner: Any = FollowingRunner.__new__(FollowingRunner)
    log = Mock()
    make: Any = BatchState
    states: list[Any] = [make(*[object()] * 6) for _ in range(4)]
    first, second, third, drawn = states
    runner._batch = SimpleNamespace(state=first, set_slot=log.set_slot)
    runner._programs, runner._adjustments, runner._logprobs = log.programs, log.adjust, log.logprobs
    runner._copies, runner._tier_copies, runner.arrays = log.samples, log.tiers, "arrays"
    runner.model, logits = SimpleNamespace(params="params"), log.programs.logits
    log.set_slot.return_value = second
    log.programs.run.return_value = ("tokens", "rows", third)
    log.programs.draw.return_value = ("drawn", drawn)
    log.adjust.adjust_rows.return_value = ("adjusted", "best", "last")

    def expect(told: Call, *expected: Any) -> None:
        log.reset_mock()
        runner.execute(told)
        assert log.mock_calls == list(expected)

    def of_run(shape: Shape, state: Any, keep_hidden: bool) -> Any:
        given = shape, "params", B, state, "arrays"
        return call.programs.run(*given, keep_hidden=keep_hidden)

    expect(Call("request", (), (A,)), call.set_slot(first, A))
    expect(Call("step", (1, 8, 4, 0), (B,)), of_run(Shape(True, 8, 4), second, False))
    expect(Call("draw"), call.programs.draw(logits, "rows", "tokens", third))
    expect(Call("count", (), (C,)), call.adjust.count_rows("rows", "drawn", C))
    expect(Call("logprobs"), call.logprobs.of_output(logits, "drawn"))
    expect(Call("step", (0, 9, 4, 1), (B,)), of_run(Shape(False, 9, 4), drawn, True))
    given = logits, "rows", A, True, None, third.last_tokens
    expect(Call("adjust", (1,), (A,)), call.adjust.adjust_rows(*given))
    state = third._replace(last_tokens="last")
    expect(Call("draw"), call.programs.draw("adjusted", "rows", "best", state))
    expect(Call("logprobs"), call.logprobs.of_output(logits, "drawn"))
    log.programs.take_hidden.return_value = ("batch", "x")
    of_targets = call.logprobs.of_targets(D, runner.model, "batch", "x")
    expect(Call("prompt_logprobs", (), (D,)), call.programs.take_hidden(), of_targets)
    expect(Call("step", (1, 1, 4, 0), (B,)), of_run(Shape(True, 1, 4), drawn, False))
    given_masks = logits, "rows", A, False, E, third.last_tokens
    expect(Call("adjust", (0,), (A, E)), call.adjust.adjust_rows(*given_masks))
    expect(Call("set_counts", (), (F,)), call.adjust.set_counts(F))
    expect(Call("gather", (4,), (A,)), call.tiers.gather("arrays", A, 4))
    expect(Call("scatter", (8,), (A, B, C)), call.tiers.scatter("arrays", (B, C), A, 8))
    expect(Call("copy", (2,), (A, B)), call.tiers.copy("arrays", A, B, 2))
    expect(Call("copy_sample", (1,), (A, B)), call.samples.copy("arrays", A, B, 1))


def _arguments(mock: Mock) -> list[Any]:
    return [each.args for each in mock.call_args_list]
