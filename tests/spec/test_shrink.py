"""The shrinker: shorter, simpler, the same rule; and findings as files."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.fuzz import targets
from radixkv.scheduler.fuzz.cache_adapter import make_factory
from radixkv.spec.adapters.cache import AdapterError
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Finding, Operation, Trace, new_world, replay
from radixkv.spec.harness.findings import shrink as shrink_module
from radixkv.spec.harness.findings.program import to_program
from radixkv.spec.harness.findings.shrink import SMALLEST, shrink
from radixkv.spec.harness.findings.svg import to_svg
from radixkv.spec.harness.findings.trace_file import (
    TraceFile,
    TraceFileError,
    breaks_again,
    read_trace_file,
    replay_file,
)
from radixkv.spec.harness.operations import Table
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.subjects import WHATS, make_subject
from radixkv.spec.harness.tiers.world import TierSubject
from radixkv.spec.rules.rule import RULES, require

from .toys import Leaky, Plain

LEAKY = CacheSubject(Leaky, "api")


def found(seed: int) -> Finding:
    finding = run(LEAKY, seed, 20_000).finding
    assert finding is not None
    return finding


@pytest.mark.parametrize("seed", range(10))
def test_a_shrunk_trace_breaks_the_same_rule_and_cannot_be_shorter(seed: int) -> None:
    finding = found(seed)
    small = shrink(LEAKY, finding)
    assert small.rule == finding.rule == "D1 drained-pool-is-whole"
    assert len(small.trace) <= min(4, len(finding.trace))
    assert breaks_again(LEAKY, small)
    for index in range(len(small.trace)):
        violation = replay(LEAKY, small.config, small.trace[:index] + small.trace[index + 1 :])
        assert violation is None or violation.rule.name != small.rule
    assert shrink(LEAKY, small) == small


def test_a_shrunk_trace_is_as_simple_as_can_be() -> None:
    programs = []
    for seed in range(10):
        finding = found(seed)
        small = shrink(LEAKY, finding)
        assert small.config["num_blocks"] == 3
        # A replay does not read this one, so it is neither made smaller nor shown.
        assert small.config["max_running"] == finding.config["max_running"]
        assert "max_running" not in to_program(small, LEAKY)
        assert small.why == "2 of 3 blocks can be had"
        programs.append([operation[0] for operation in small.trace])
    # Either a request has three blocks and ends, or the probe of a drain has them all.
    assert {*map(tuple, programs)} == {("submit", "admit", "drain"), ("drain", "drain")}


def test_tokens_are_as_small_as_they_can_be_in_all_requests_at_once() -> None:
    """The last two tokens are equal, which a change of one request alone would end."""
    submits: list[Operation] = [["submit", "r1", [3, 65536], 0, 0], ["submit", "r2", [65536], 0, 0]]
    sizes = {"num_blocks": 4, "block_size": 1, "max_running": 2}
    calls = [*submits, ["admit", "r1"], ["admit", "r2"]]
    finding = Finding("S4 no-unexpected-error", "", sizes, calls)
    small = shrink(CacheSubject(Picky, "api"), finding)
    assert [operation[2] for operation in small.trace[:2]] == [[0, 1], [1]]


class Picky(Plain):
    """Raises for a request of one token that ends another one, which has another token before."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.last = [0]

    def admit(self, name: str, tokens: Any, namespace: bytes) -> Any:
        if len(tokens) == 1 and self.last[1:] == list(tokens) and self.last[0] != tokens[0]:
            raise ValueError
        self.last = list(tokens)
        return super().admit(name, tokens, namespace)


def test_what_does_not_come_up_again_is_returned_as_it_is() -> None:
    finding = Finding("D1 drained-pool-is-whole", "once", {"num_blocks": 4, "block_size": 1,
                      "max_running": 2, "alphabet": 1}, [["drain"]])  # fmt: skip
    assert shrink(CacheSubject(Plain, "api"), finding) is finding
    assert not breaks_again(LEAKY, finding)


def test_sizes_in_which_a_new_world_breaks_a_rule_are_left_out() -> None:
    finding = found(1)
    size = finding.config["num_blocks"]

    class OfOneSize(Leaky):
        def available(self) -> int:
            if self.size != size:
                raise KeyError(self.size)
            return super().available()

        def __init__(self, num_blocks: int, block_size: int) -> None:
            super().__init__(num_blocks, block_size)
            self.size = num_blocks

    subject = CacheSubject(OfOneSize, "api")
    small = shrink(subject, finding)
    assert (small.rule, small.config["num_blocks"]) == (finding.rule, size)
    assert shrink(LEAKY, finding).config["num_blocks"] < size
    assert 0 < len(small.trace) < len(finding.trace)
    broken = replay(subject, {**finding.config, "num_blocks": size - 1}, [])
    assert broken is not None and broken.rule.code == "S4"


LEAST = 4
"""The fewest blocks that are drawn, so that a manager need not say that it has no fewer."""


class Refuses(Leaky):
    """Raises for fewer blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < LEAST:
            raise ValueError(num_blocks)
        super().__init__(num_blocks, block_size)


class KeepsOne(Leaky):
    """Keeps one of fewer blocks for itself."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        if num_blocks < LEAST:
            self.free.pop()


@pytest.mark.parametrize("manager", [Refuses, KeepsOne])
@pytest.mark.parametrize("seed", range(3))
def test_sizes_of_which_a_manager_cannot_be_made_are_left_out(
    manager: type[Leaky], seed: int
) -> None:
    subject = CacheSubject(manager, "api")
    finding = run(subject, seed, 20_000).finding
    assert finding is not None
    small = shrink(subject, finding)
    assert (small.rule, small.config["num_blocks"]) == (finding.rule, LEAST)
    assert breaks_again(subject, small) and len(small.trace) <= 4


def test_the_original_is_left_alone() -> None:
    finding = found(1)
    before = json.dumps(finding.to_json())
    shrink(LEAKY, finding)
    assert json.dumps(finding.to_json()) == before


def test_a_finding_survives_its_file(tmp_path: Path) -> None:
    file = TraceFile(shrink(LEAKY, found(2)), "cache", "toys.py:Leaky", "api")
    path = tmp_path / file.file_name()
    path.write_text(file.text())
    assert read_trace_file(path) == file
    assert path.name.endswith(".trace.json") and len(path.name) == 12 + len(".trace.json")
    assert json.loads(file.text()) == file.to_json()
    broken = replay_file(LEAKY, file)
    assert broken == file.finding
    assert replay_file(CacheSubject(Plain, "api"), file) is None


@pytest.mark.parametrize("known", [(), ("S2", "A3")])
def test_a_file_has_all_that_is_known_of_its_finding(
    known: tuple[str, ...], tmp_path: Path
) -> None:
    finding = Finding("D1 x", "why", {"num_blocks": 3}, [["admit", "r1"], ["drain"]])
    file = TraceFile(finding, "tiers", "a:b", "full", known)
    (path := tmp_path / "a.trace.json").write_text(file.text())
    assert read_trace_file(path) == file and ("known" in file.to_json()) == bool(known)
    assert '\n  ["admit", "r1"],\n  ["drain"]\n' in file.text(), "an operation per line"
    (path := tmp_path / "short.trace.json").write_text(json.dumps(finding.to_json()))
    assert read_trace_file(path) == TraceFile(finding, "cache", "", "api", ())


def test_files_of_other_traces_sizes_and_origins_have_other_names() -> None:
    def name(why: str, config: dict[str, Any], trace: Trace, *origin: Any) -> str:
        return TraceFile(Finding("D1 x", why, config, trace), *origin).file_name()

    sizes, trace = {"x": 1, "y": 2}, [["drain"]]
    same = name("a", sizes, trace, "cache", "a:b", "api", ("S2",))
    assert same == name("b", {"y": 2, "x": 1}, trace, "cache", "a:b", "api", ("S2",))
    others = [
        name("a", {"x": 1}, trace, "cache", "a:b", "api", ("S2",)),
        name("a", sizes, [], "cache", "a:b", "api", ("S2",)),
        name("a", sizes, trace, "tiers", "a:b", "api", ("S2",)),
        name("a", sizes, trace, "cache", "a:c", "api", ("S2",)),
        name("a", sizes, trace, "cache", "a:b", "full", ("S2",)),
        name("a", sizes, trace, "cache", "a:b", "api", ()),
    ]
    assert len({same, *others}) == 7


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        *((kind("no"), True) for kind in
          (KeyError, IndexError, ValueError, ZeroDivisionError, AttributeError, TypeError)),
        *((kind("no"), False) for kind in (AdapterError, AssertionError, OSError)),
    ],
)  # fmt: skip
def test_only_what_a_trace_can_be_the_reason_of_is_told_of_it(
    error: Exception, is_told: bool
) -> None:
    class Raises(Judged):
        def world(self, config: Any) -> Any:
            return Raises(self.breaks)

        def apply(self, operation: Operation) -> bool:
            if operation[0] == "raise":
                raise error
            return super().apply(operation)

    subject: Any = Raises(lambda done: False)
    file = TraceFile(Finding("S1 no-leak", "", {}, [["do"], ["raise", 1], ["do"]]), "tiers")
    with pytest.raises(TraceFileError if is_told else type(error)) as caught:
        replay_file(subject, file)
    if is_told:
        told = f'operation 2, ["raise", 1], fits no world of a tiers: {error!r}'
        assert str(caught.value) == told


def test_a_replay_ends_where_a_rule_breaks() -> None:
    small = shrink(LEAKY, found(3))
    longer = Finding(small.rule, small.why, small.config, [*small.trace, ["drain"], ["drain"]])
    broken = replay_file(LEAKY, TraceFile(longer))
    assert broken is not None and broken.trace == small.trace


GOOD = {"format": 1, "rule": "D1 x", "why": "", "config": {}, "trace": [["drain"]]}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], 'not a trace: it has no "format": 1'),
        ({**GOOD, "format": 2}, 'not a trace: it has no "format": 1'),
        ({**GOOD, "rule": None}, '"rule" must be a string'),
        ({**GOOD, "config": []}, '"config" must be an object'),
        ({**GOOD, "trace": {}}, '"trace" must be a list'),
        ({**GOOD, "trace": [["drain"], []]}, "operation 2 must be a list that begins with a word"),
        ({**GOOD, "trace": [[1]]}, "operation 1 must be a list that begins with a word"),
        ({**GOOD, "depth": 1}, '"depth" must be a string'),
        ({**GOOD, "what": None}, '"what" must be a string'),
        ({**GOOD, "target": []}, '"target" must be a string'),
        ({**GOOD, "known": "S2"}, '"known" must be a list of strings'),
        ({**GOOD, "known": ["S2", 3]}, '"known" must be a list of strings'),
        (
            {**GOOD, "trace": [["drain"], "drain"]},
            "operation 2 must be a list that begins with a word",
        ),
    ],
)
def test_a_malformed_file_is_told(tmp_path: Path, document: Any, text: str) -> None:
    path = tmp_path / "a.trace.json"
    path.write_text(json.dumps(document))
    with pytest.raises(TraceFileError) as caught:
        read_trace_file(path)
    assert str(caught.value) == f"{path}: {text}"


def test_a_file_that_is_not_json_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json"
    path.write_text("{")
    with pytest.raises(TraceFileError, match=r"a\.trace\.json: not JSON: Expecting property name"):
        read_trace_file(path)
    path.write_text("[" * 100_000)
    with pytest.raises(TraceFileError, match=r"a\.trace\.json: not JSON: "):
        read_trace_file(path)
    path.write_bytes(b'{"rule": "\xff"}')
    with pytest.raises(TraceFileError, match=r"a\.trace\.json: not JSON: 'utf-8' codec"):
        read_trace_file(path)


@pytest.mark.parametrize(
    ("config", "trace", "text"),
    [
        ({}, [["drain"]], "the configuration fits no world of a cache: KeyError('block_size')"),
        ({"num_blocks": 4, "block_size": 0, "max_running": 2, "alphabet": 1}, [["drain"]],
         "the configuration fits no world of a cache: "
         "CountError('block_size must be at least 1, got 0')"),
        (None, [["fly"]], """operation 1, ["fly"], fits no world of a cache: KeyError('fly')"""),
        (None, [["submit", "r1", [1], 0, 9]], 'operation 1, ["submit", "r1", [1], 0, 9], fits no '
         "world of a cache: IndexError('tuple index out of range')"),
        (None, [["admit"]], 'operation 1, ["admit"], fits no world of a cache: TypeError("admit() '
         "missing 1 required positional argument: 'name'\")"),
    ],
)  # fmt: skip
def test_a_trace_that_fits_no_world_is_told(
    config: dict | None, trace: list[Operation], text: str
) -> None:
    sizes = {"num_blocks": 4, "block_size": 1, "max_running": 2, "alphabet": 1}
    finding = Finding("", "", sizes if config is None else config, trace)
    subject = CacheSubject(make_factory(), "full")
    with pytest.raises(TraceFileError) as caught:
        replay_file(subject, TraceFile(finding))
    assert str(caught.value) == text


def test_a_trace_that_a_foreign_manager_cannot_compute_with_is_told() -> None:
    def divide(num_blocks: int, block_size: int) -> object:
        return num_blocks // block_size

    finding = Finding("", "", {"num_blocks": 4, "block_size": 0, "max_running": 2}, [])
    with pytest.raises(TraceFileError) as caught:
        replay_file(CacheSubject(divide, "api"), TraceFile(finding))
    with pytest.raises(ZeroDivisionError) as divided:  # its text differs by Python's version
        divide(4, 0)
    assert str(caught.value) == f"the configuration fits no world of a cache: {divided.value!r}"


class Marked:
    """A subject and its world, in which the last call breaks one rule or, without a mark, another.

    A shorter trace thus breaks a rule as well, but not the one that was found.
    """

    def __init__(self) -> None:
        self.situations: Counter[str] = Counter()
        self.is_marked = False

    def world(self, config: Any) -> Any:
        return Marked()

    def apply(self, operation: list[Any]) -> bool:
        self.is_marked |= operation[0] == "mark"
        if operation[0] == "break":
            rule = "A3 allocate-distinct" if self.is_marked else "S1 no-leak"
            require(False, RULES[rule], "")
        return True


def test_the_rule_stays_the_one_that_was_found() -> None:
    trace: list[list[Any]] = [["do"], ["mark"], ["do"], ["break"]]
    small = shrink(Marked(), Finding("A3 allocate-distinct", "", {}, trace))  # type: ignore[arg-type]
    assert (small.rule, small.trace) == ("A3 allocate-distinct", [["mark"], ["break"]])


class Judged:
    """A subject and its world, which breaks a rule as soon as a judge says so of what was done.

    Each operation applies; those that are drawn are one of two.
    """

    case_lengths = (100,)

    def __init__(self, breaks: Callable[[Trace], bool]) -> None:
        self.breaks = breaks
        self.situations: Counter[str] = Counter()
        self.done: Trace = []

    def world(self, config: Any) -> Any:
        return Judged(self.breaks)

    def draw(self, below: Any) -> Operation:
        return ["ab"[below(2)]]

    def apply(self, operation: Operation) -> bool:
        self.done.append(operation)
        require(not self.breaks(self.done), RULES["S1 no-leak"], "{} done", len(self.done))
        return True


def shrunk(breaks: Callable[[Trace], bool], trace: Trace) -> Finding:
    subject: Any = Judged(breaks)
    return shrink(subject, Finding("S1 no-leak", "", {}, trace))


def test_a_request_is_left_out_with_all_that_names_it() -> None:
    """No operation of it can be left out alone, and those of another request must stay."""
    of_it: Trace = [["submit", "r1", []], ["launch", "r1", "r1.1"], ["batch", [["r2"], ["r1"]]],
                    ["done", "r1.1"]]  # fmt: skip
    stays: Trace = [["submit", "r10", []], ["say", "xr1"], ["done", "r10.1"], ["batch", [["r12"]]]]
    trace = [each for pair in zip(of_it, stays, strict=True) for each in pair]

    def breaks(done: Trace) -> bool:
        num_stays, num_of_it = (sum(each in some for each in done) for some in (stays, of_it))
        return done[-1] == ["break"] and num_stays == len(stays) and num_of_it in (0, len(of_it))

    small = shrunk(breaks, [*trace, ["break"]])
    assert [each[0] for each in small.trace] == ["submit", "say", "done", "batch", "break"]
    assert small.why == "5 done"


def test_another_way_is_searched_if_no_part_of_a_long_one_can_be_left_out() -> None:
    def breaks(done: Trace) -> bool:
        if done[-1] != ["drain"]:
            return False
        others = len(done) == 12 and done[:3] == [["b"]] * 3
        return done[:-1] == [["a"]] * 12 or others

    drawn: list[Operation] = []

    class Noted(Judged):
        def world(self, config: Any) -> Any:
            return Noted(self.breaks)

        def draw(self, below: Any) -> Operation:
            drawn.append(super().draw(below))
            return drawn[-1]

    subject: Any = Noted(breaks)
    small = shrink(subject, Finding("S1 no-leak", "", {}, [*[["a"]] * 12, ["drain"]]))
    assert small.trace[:3] == [["b"]] * 3 and len(small.trace) == 12
    assert 0 < len(drawn) < 50 * 11, "the search ends with what it finds"


def test_no_other_way_is_searched_for_a_short_one() -> None:
    def breaks(done: Trace) -> bool:
        return done == [["a"]] * 12 or done == [["b"]] * 3

    assert len(shrunk(breaks, [["a"]] * 12).trace) == 12
    assert len(shrunk(breaks, [["c"], *[["a"]] * 12]).trace) == 13


@pytest.mark.parametrize(
    ("argument", "is_needed", "small"),
    [
        (9, lambda value: value >= 4, 4),
        (9, lambda value: value % 4 == 1, 1),
        (True, lambda value: True, True),
        ("word", lambda value: True, "word"),
        ([7, 7, 7], lambda value: len(value) == 3 and value[1] == 7, [0, 7, 0]),
        ([[7], 8, True], lambda value: len(value) == 3, [[0], 0, 0]),
        ([["r1", 7], ["r2", 7]], lambda value: value[-1:] == [["r2", 7]], [["r2", 7]]),
        (
            [["r1", 7], ["r2", 7]],
            lambda value: [len(each) for each in value] == [2, 2],
            [["r1", 0], ["r2", 0]],
        ),
        ([8, 5, 9, 5], lambda value: 9 in value, [9]),
        ([8, 9, 5], lambda value: value[:1] == [8] and value[-1:] == [5], [8, 5]),
        ([8, 5, 9], lambda value: True, []),
    ],
)
def test_an_argument_is_made_as_simple_as_it_can_be(
    argument: Any, is_needed: Callable[[Any], bool], small: Any
) -> None:
    def breaks(done: Trace) -> bool:
        [word, *arguments] = done[-1]
        return word == "do" and arguments[0] == "x" and bool(is_needed(arguments[1]))

    assert shrunk(breaks, [["do", "x", argument]]).trace == [["do", "x", small]]


def test_tokens_become_small_and_stay_different() -> None:
    def breaks(done: Trace) -> bool:
        tokens = done[-1][1]
        return len(tokens) == 4 and tokens[1] == tokens[3] and len(set(tokens)) == 3

    assert shrunk(breaks, [["do", [900, 40, 2, 40]]]).trace == [["do", [0, 2, 1, 2]]]


def test_tokens_of_a_batch_stay_equal_to_those_of_a_prompt() -> None:
    def breaks(done: Trace) -> bool:
        match done:
            case [["submit", "r1", [first, second]], ["append_batch", [["r1", third]]]]:
                return bool(first != second == third)
        return False

    trace: Trace = [["submit", "r1", [5, 900]], ["append_batch", [["r1", 900]]]]
    small: Trace = [["submit", "r1", [0, 1]], ["append_batch", [["r1", 1]]]]
    assert shrunk(breaks, trace).trace == small


def test_requests_are_renumbered_in_their_order() -> None:
    trace: Trace = [["submit", "r7"], ["submit", "r4"], ["batch", [["r4", 1]]], ["done", "r7.3"]]

    def breaks(done: Trace) -> bool:
        if [each[0] for each in done] != [each[0] for each in trace]:
            return False
        [_, first], [_, second], [_, batch], [_, job] = done
        return batch == [[second, 1]] and job == f"{first}.3"

    small = shrunk(breaks, trace)
    assert small.trace == [
        ["submit", "r1"], ["submit", "r2"], ["batch", [["r2", 1]]], ["done", "r1.3"]
    ]  # fmt: skip


def test_every_size_is_made_as_small_as_it_can_be() -> None:
    """What else is a number in a configuration is a choice, of which none is simpler."""
    sizes = dict.fromkeys(SMALLEST, 5)
    subject: Any = Judged(lambda done: True)
    small = shrink(subject, Finding("S1 no-leak", "", {**sizes, "hits": 5}, [["do"]]))
    assert small.config == {**SMALLEST, "hits": 5}
    others = set()
    for what in WHATS:
        subject = make_subject(what, getattr(targets, what), "full")
        drawn = [subject.configure(random.Random(seed).randrange) for seed in range(40)]
        numbers = {name for each in drawn for name, value in each.items() if type(value) is int}
        others |= numbers - SMALLEST.keys() - {*getattr(subject, "only_drawn", ())}
    assert others == {
        "at_once", "budget", "decode", "decode_block_size", "depth", "hits", "late", "law",
        "max_attempts", "max_overtaken", "more_blocks", "path_blocks", "request_s",
        "reserve_tokens", "storage", "token_budget",
    }  # fmt: skip


def test_shrinking_ends_after_a_number_of_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate is another one, and none breaks the rule but the first."""
    monkeypatch.setattr(shrink_module, "MAX_REPLAYS", most := 50)
    trace: Trace = [["do", 100]]
    made: list[Judged] = []

    class Noted(Judged):
        def world(self, config: Any) -> Any:
            made.append(super().world(config))
            return made[-1]

    subject: Any = Noted(lambda done: done == trace)
    small = shrink(subject, Finding("S1 no-leak", "", {}, trace))
    assert small.trace == trace and len(made) == most
    made.clear()
    subject = Noted(lambda done: done[-1][1] in (100, 99))
    monkeypatch.setattr(shrink_module, "MAX_REPLAYS", 4_000)
    assert shrink(subject, Finding("S1 no-leak", "", {}, trace)).trace == [["do", 99]]
    candidates = [repr(world.done) for world in made]
    failed = [each for each in candidates if each not in ("[['do', 100]]", "[['do', 99]]")]
    assert len(failed) == len(set(failed)), "what has failed is not replayed again"


class Applies(Judged):
    """Only what begins with "do" applies."""

    def world(self, config: Any) -> Any:
        return Applies(self.breaks)

    def apply(self, operation: Operation) -> bool:
        return operation[0] == "do" and super().apply(operation)


def test_what_does_not_apply_is_left_out_without_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink_module, "MAX_REPLAYS", 1)
    subject: Any = Applies(lambda done: len(done) == 2)
    trace: Trace = [["skip"], ["do"], ["skip"], ["do"]]
    assert shrink(subject, Finding("S1 no-leak", "", {}, trace)).trace == [["do"], ["do"]]


def test_a_step_that_runs_at_once_and_a_longer_prompt_are_simpler() -> None:
    submit: Operation = ["submit", "r1", [1], 2, 0]
    other: Operation = ["submit", "r2", [1], 2, 0]
    trace: Trace = [
        submit, other, ["launch", "r1", 1, "r1.1"], ["done", "r1.1"], ["done", "r2.1"],
        ["append", "r1", [2, 3]],
    ]  # fmt: skip
    assert [*CacheSubject(Plain).simpler(trace)] == [
        [submit, other, ["forward", "r1", 1], ["done", "r2.1"], ["append", "r1", [2, 3]]],
        [["submit", "r1", [1, 2, 3], 2, 0], *trace[1:5]],
    ]


def test_a_copy_that_ends_with_its_fence_is_simpler() -> None:
    trace: Trace = [["result", "in1", [2], 0], ["result", "out1", [], 1], ["result", "in1", [], 0]]
    assert [*TierSubject(lambda config: Plain(1, 1)).simpler(trace)] == [
        [["result", "in1", [2], 1], *trace[1:]],
        [*trace[:2], ["result", "in1", [], 1]],
    ]


def test_the_first_simpler_trace_of_the_subject_that_breaks_the_rule_is_taken() -> None:
    class Proposes(Judged):
        def world(self, config: Any) -> Any:
            return Proposes(self.breaks)

        def simpler(self, trace: Trace) -> Any:
            yield from [[[word]] for word in ("no", "b", "c")] if trace == [["a"]] else []

    subject: Any = Proposes(lambda done: done[0][0] in "abc")
    assert shrink(subject, Finding("S1 no-leak", "", {}, [["a"]])).trace == [["b"]]


# What shrinking costs, and what it leaves alone


def test_equal_findings_are_shrunk_to_equal_ones() -> None:
    """There are many ways to break the rule, of which a random search finds one."""

    def breaks(done: Trace) -> bool:
        if done[-1] != ["drain"]:
            return False
        places = [place for place, each in enumerate(done) if each == ["b"]]
        return len(places) == 0 if len(done) == 20 else len(done) == 19 and sum(places) % 3 == 1

    trace: Trace = [*[["a"]] * 19, ["drain"]]
    first = shrunk(breaks, trace)
    assert len(first.trace) == 19 and shrunk(breaks, trace) == first


class Spoils(Judged):
    """Changes the configuration and the operations that it is given."""

    only_drawn = ()
    table = Table[Any](lambda world: {}, ())

    def __init__(self, breaks: Callable[[Trace], bool]) -> None:
        super().__init__(breaks)
        self.config: dict[str, Any] = {}

    def world(self, config: Any) -> Any:
        assert config == SPOILED
        config.clear()
        return Spoils(self.breaks)

    def apply(self, operation: Operation) -> bool:
        try:
            return super().apply(operation)
        finally:
            operation.append("spoiled")

    def picture(self) -> str:
        return ""


SPOILED = {"size": 4}
USES: dict[str, Callable[[Any, Finding], object]] = {
    "new_world": lambda subject, finding: new_world(subject, finding.config),
    "replay": lambda subject, finding: replay(subject, finding.config, deepcopy(finding.trace)),
    "shrink": shrink,
    "to_program": lambda subject, finding: to_program(replace(finding, trace=[["do"]]), subject),
    "to_svg": lambda subject, finding: to_svg(subject, replace(finding, trace=[["do"]])),
    "replay_file": lambda subject, finding: replay_file(
        subject, TraceFile(replace(finding, trace=[["do"]]))
    ),
}


@pytest.mark.parametrize("use", USES)
def test_what_a_world_does_to_its_configuration_changes_no_finding(use: str) -> None:
    """Each of several worlds of a finding is of the same sizes."""
    subject: Any = Spoils(lambda done: done[-1][0] == "end")
    trace: Trace = [["do"], ["end", 3]]
    finding = Finding("S1 no-leak", "", dict(SPOILED), trace)
    for _ in range(2):
        made = USES[use](subject, finding)
        assert finding.config == SPOILED
    if use == "shrink":
        assert trace == [["do"], ["end", 3]] and isinstance(made, Finding)
        assert made.config == SPOILED and len(made.trace) == 1
