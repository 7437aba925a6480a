"""A bad adapter is told what it must do; what a manager raises or changes is a finding."""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from radixkv.spec.adapters import load_target as load_target_module
from radixkv.spec.adapters import scheduler_target
from radixkv.spec.adapters.cache import AdapterError, Manager, Promises, Snapshot, sizes_of
from radixkv.spec.adapters.cache_target import BY_DEPTH, REQUIRED, Depth, Target
from radixkv.spec.adapters.load_target import TargetError, load_target, target_beside
from radixkv.spec.adapters.scheduler import Received, SchedulerPromises, Submission
from radixkv.spec.adapters.scheduler_target import _KINDS as KINDS
from radixkv.spec.adapters.scheduler_target import SchedulerTarget
from radixkv.spec.adapters.tier_target import LOOKS, TierTarget
from radixkv.spec.adapters.tiers import Copy, TierManager
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.scheduler.configuration import draw_config
from radixkv.spec.model.scheduler import BlockCopy
from radixkv.spec.rules.rule import Violation

from .designs.schedulers import ChunkWise
from .recording import Recorder
from .toys import Plain

WRONG_RESULTS = [
    ("admit", "1", "admit must return the hit tokens as an int, or None, got '1'", ("r", [1], b"")),
    ("admit", True, "admit must return the hit tokens as an int, or None, got True",
     ("r", [1], b"")),
    ("match", None, "match must return an int, got None", ("r", [1], b"")),
    ("append", None, "append must return True or False, got None", ("r", [1])),
    ("append", 1, "append must return True or False, got 1", ("r", [1])),
    ("append_batch", None, "append_batch must return True or False, got None", (["r"],)),
    ("block_table", 7, "block_table must return a sequence of int, got 7", ("r",)),
    ("block_table", ["a"], "block_table must return a sequence of int, got ['a']", ("r",)),
    ("available", 1.0, "available must return an int, got 1.0", ()),
    ("evict", None, "evict must return an int, got None", (1,)),
    ("snapshot", {}, "snapshot must return a radixkv.spec.Snapshot, got {}", ()),
]  # fmt: skip


def adapter_with(**attributes: Any) -> Any:
    return type("Mine", (Plain,), attributes)


def target(adapter: Any, depth: Depth = "api") -> Target:
    return Target(adapter, 4, 2, depth)


@pytest.mark.parametrize("method", REQUIRED)
def test_a_missing_method_is_named(method: str) -> None:
    with pytest.raises(AdapterError) as caught:
        target(adapter_with(**{method: None}))
    assert str(caught.value) == f"Mine has no method {method}; it needs {REQUIRED[method]}"


@pytest.mark.parametrize("depth", ["events", "full"])
def test_a_method_that_a_depth_needs_is_named(depth: Depth) -> None:
    needed = BY_DEPTH[depth]
    for method in needed:
        others = {name: lambda self, *arguments: None for name in needed if name != method}
        with pytest.raises(AdapterError) as caught:
            target(adapter_with(**others), depth)
        assert str(caught.value) == f"Mine has no method {method}; it needs {needed[method]}"
    assert target(adapter_with(**{name: lambda self: None for name in needed}), depth)


@pytest.mark.parametrize("promises", [True, {"lru": True}, None, Promises])
def test_promises_of_another_type_are_refused(promises: Any) -> None:
    with pytest.raises(AdapterError) as caught:
        target(adapter_with(promises=promises))
    assert str(caught.value) == f"promises must be radixkv.spec.Promises, got {promises!r}"


@pytest.mark.parametrize(("method", "result", "text", "arguments"), WRONG_RESULTS)
def test_a_wrong_result_is_told(method: str, result: Any, text: str, arguments: tuple) -> None:
    made = target(adapter_with(**{method: lambda self, *given: result}))
    with pytest.raises(AdapterError) as caught:
        getattr(made, method)(*arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(0)])
def test_an_exception_of_the_manager_is_a_violation(error: BaseException) -> None:
    def admit(*arguments: Any) -> None:
        raise error

    with pytest.raises(Violation) as caught:
        target(adapter_with(admit=admit)).admit("r1", [1, 2], b"")
    assert caught.value.rule.code == "S4"
    line = admit.__code__.co_firstlineno + 1
    told = f"admit('r1', [1, 2], b'') raised {error!r} at test_target.py:{line}"
    assert caught.value.why == told


def test_tokens_that_come_back_changed_are_a_violation() -> None:
    def publish(self: Any, name: str, tokens: list[int]) -> None:
        tokens.append(9)

    with pytest.raises(Violation) as caught:
        target(adapter_with(publish=publish)).publish("r1", [1])
    assert caught.value.rule.code == "C3"
    assert caught.value.why == "publish was given [1], and changed it to [1, 9]"


def test_of_two_arguments_that_come_back_changed_the_first_is_told() -> None:
    def swap(self: Any, one: list[int], same: list[int], other: list[int]) -> None:
        one[:], other[:] = other[:], one[:]

    made = TierTarget(adapter_with(swap=swap), 4, 2, "api")
    with pytest.raises(Violation, match=r"^.*swap was given \[1\], and changed it to \[2\]$"):
        made.ask("swap", [1], [3], [2])


def test_optional_methods_are_found() -> None:
    made = target(adapter_with(evict=lambda self, number: number, reset=None))
    assert made.can == {"evict"} and made.evict(3) == 3
    assert made.promises == Promises()


def test_all_promises() -> None:
    assert all(vars(Promises.all()).values()) and not any(vars(Promises()).values())


def test_all_promises_of_a_scheduler_but_for_a_number() -> None:
    names = {each.name for each in fields(SchedulerPromises)} - {"max_overtaken"}
    assert SchedulerPromises.all().names() == names and len(names) >= 15
    assert SchedulerPromises.all().max_overtaken is None
    assert SchedulerPromises(leaders=True, max_overtaken=1).names() == {"leaders"}


@pytest.mark.parametrize(("sources", "destinations", "keys"), [(3, 0, 2), (2, 3, 0), (0, 0, 3)])
def test_a_copy_has_as_many_blocks_as_its_longest_list(
    sources: int, destinations: int, keys: int
) -> None:
    copy = Copy(1, "out", (0,) * sources, (0,) * destinations, (b"",) * keys)
    assert copy.num_blocks == 3


def test_a_factory_that_makes_no_new_manager_is_told() -> None:
    used = Plain(4, 2)
    used.admit("before", [1, 2, 3], b"")
    config = {"num_blocks": 4, "block_size": 2, "max_running": 1, "alphabet": 1}
    with pytest.raises(AdapterError) as caught:
        CacheSubject(lambda num_blocks, block_size: used).world(config)
    assert str(caught.value) == (
        "a new manager must have all of its 4 blocks available, this one has 2: the factory must "
        "make a new one for each world, that shares nothing"
    )


def scheduler_with(**methods: Any) -> SchedulerTarget:
    config = {**draw_config(lambda limit: 0), "policy": "fcfs"}
    return SchedulerTarget(type("Wrong", (ChunkWise,), methods), config)


@pytest.mark.parametrize(
    ("method", "result", "arguments", "wanted"),
    [
        ("add", "yes", [Submission("r1", [0], 1, 0, [], b"")],
         "add(request: Submission) -> True, or False if it is too large"),
        ("available", None, [], "available() -> how many blocks are free or could be evicted"),
        ("num_hit", True, ["r1"],
         "num_hit(name) -> tokens found in the cache at its last admission"),
        ("running", "ab", [], "running() -> the names that hold blocks, in order of admission"),
        ("block_table", None, ["r1"], "block_table(name) -> the ids of its blocks"),
        ("ask", None, [], "ask() -> whether blocks are granted to a waiting request"),
    ],
)  # fmt: skip
def test_a_wrong_result_of_a_scheduler_is_told(
    method: str, result: Any, arguments: list[Any], wanted: str
) -> None:
    target = scheduler_with(**{method: lambda *_: result})
    with pytest.raises(AdapterError) as caught:
        getattr(target, method)(*arguments)
    assert str(caught.value) == f"{method} returned {result!r}; it needs {wanted}"


def test_a_scheduler_without_a_method_is_told() -> None:
    with pytest.raises(AdapterError) as caught:
        scheduler_with(abort=None)
    assert (
        str(caught.value)
        == "Wrong has no method abort; it needs abort(name) -> whether it was live"
    )


def recorded_scheduler(config: dict[str, int], **attributes: Any) -> SchedulerTarget:
    """Return the target of a scheduler that has all methods but those that are None."""
    adapter = Recorder()
    vars(adapter).update(**{"promises": SchedulerPromises(), "depth": 1, **attributes})
    return SchedulerTarget(lambda config: adapter, config)


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({}, scheduler_target.REQUIRED),
        ({"host_blocks": 1}, scheduler_target.REQUIRED_OF_TIERS),
        ({"host_blocks": 1}, scheduler_target.REQUIRED_OF_DECODE),
    ],
)
def test_each_method_that_a_kind_of_scheduler_lacks_is_told(
    config: dict[str, int], needed: dict[str, str]
) -> None:
    for method, wanted in needed.items():
        with pytest.raises(AdapterError) as caught:
            recorded_scheduler(config, **{method: None})
        assert str(caught.value) == f"Recorder has no method {method}; it needs {wanted}"
    if config:
        assert recorded_scheduler(config).can >= needed.keys()


@pytest.mark.parametrize("promises", [True, {"whole": True}, None, SchedulerPromises, Promises()])
def test_promises_of_another_type_than_a_schedulers_are_refused(promises: Any) -> None:
    with pytest.raises(AdapterError) as caught:
        recorded_scheduler({}, promises=promises)
    kind = "radixkv.spec.adapters.scheduler.SchedulerPromises"
    assert str(caught.value) == f"promises must be {kind}, got {promises!r}"


def test_the_optional_methods_of_an_adapter_are_those_that_it_has() -> None:
    """What the target did not know of, no world would call."""
    optional = {
        "match", "append_batch", "evict", "reset", "misuse", "check", "refusal", "size",
        "begin_step", "end_step", "kv_events", "replay", "most_told", "take",
    }  # fmt: skip
    for lacks in (None, *sorted(optional)):
        adapter = Recorder(size=3)
        vars(adapter).update(promises=Promises(), **({lacks: None} if lacks else {}))
        made = Target(Mock(return_value=adapter), 4, 2, "api")
        assert made.can == optional - {lacks}
    for lacks in (None, "counts", "misuse", "check", "copies"):
        scheduler = recorded_scheduler({}, **({lacks: None} if lacks else {}))
        assert scheduler.can == {"counts", "misuse", "check", "copies"} - {lacks}


@pytest.mark.parametrize("chunks", [[("r1", 0)], None, 7, [("r1", "a", 2)], [("r1", None, 2)]])
def test_a_scheduler_that_returns_no_chunks_is_told(chunks: Any) -> None:
    with pytest.raises(AdapterError) as caught:
        scheduler_with(schedule=lambda self: chunks).schedule()
    told = f"schedule must return chunks (name, start, length), got {chunks!r}"
    assert str(caught.value) == told


# Files and modules of targets


@pytest.mark.parametrize("fault", ["1 / 0", "raise SystemExit(3)", "import no_such_module"])
@pytest.mark.parametrize("before", [None, ModuleType("broken_target")])
def test_a_file_that_fails_leaves_the_modules_as_they_were(
    fault: str, before: ModuleType | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broken_target.py"
    path.write_text(fault)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "broken_target", raising=False)
    if before is not None:
        monkeypatch.setitem(sys.modules, "broken_target", before)
    with pytest.raises(TargetError, match=f"importing {path} raised "):
        load_target(f"{path}:make")
    assert sys.modules.get("broken_target") is before


def test_a_file_is_imported_as_a_script_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_target.py").write_text("NUMBER = 3")
    path = tmp_path / "right_target.py"
    path.write_text("import beside_target\nclass Of:\n    make = lambda *sizes: sizes\n")
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    for _ in range(2):
        make = load_target(f"{path}:Of.make")
        assert make(4, 2) == (4, 2) and sys.path == [str(tmp_path), *before]
    assert inspect.unwrap(make) is sys.modules["right_target"].Of.make
    for name in ("right_target", "beside_target"):
        del sys.modules[name]


def test_a_module_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target_of_this_folder.py").write_text("def make(*sizes):\n    return sizes\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", ".")])
    try:
        assert load_target("target_of_this_folder:make")(4, 2) == (4, 2)
    finally:
        sys.modules.pop("target_of_this_folder", None)


@pytest.mark.parametrize(
    ("target", "missing", "is_told"),
    [
        ("no_such_target", "no_such_target", True),
        ("target_package.no_such_target", "target_package.no_such_target", True),
        ("no_such_target.inner.module", "no_such_target", True),
        ("importing_target", "importing", False),  # the start of its name
        ("importing_target", "importing_target_that_is_not", False),
    ],
)
def test_a_module_that_lacks_another_one_is_not_said_to_be_missing(
    target: str, missing: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target_package").mkdir()
    (tmp_path / "importing_target.py").write_text(f"import {missing}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    why = f"importing {target} raised ModuleNotFoundError: No module named '{missing}'"
    with pytest.raises(TargetError) as caught:
        load_target(f"{target}:make")
    assert str(caught.value) == (f"there is no module {target}" if is_told else why)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("beside.py:make", "{folder}/beside.py:make"),
        ("inner/deep.py:Of.make", "{folder}/inner/deep.py:Of.make"),
        ("elsewhere.py:make", "elsewhere.py:make"),
        ("inner.py:make", "inner.py:make"),  # a folder of this name
        ("package.module:make", "package.module:make"),
        ("beside.pyx:make", "beside.pyx:make"),
        ("", ""),
    ],
)
def test_a_file_beside_another_one_is_found(target: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "inner.py").mkdir()
    (tmp_path / "inner").mkdir()
    for name in ("beside.py", "beside.pyx", "inner/deep.py", "package.module"):
        (tmp_path / name).write_text("")
    shown = target_beside(target, tmp_path / "a.trace.json")
    assert shown == found.format(folder=tmp_path)


@pytest.mark.parametrize("error", ["ValueError('no')", "SystemExit(3)"])
def test_what_a_factory_raises_is_told_with_its_sizes(error: str, tmp_path: Path) -> None:
    path = tmp_path / "raising_target.py"
    path.write_text(f"def make(*sizes):\n    raise {error}\n")
    before = list(sys.path)
    try:
        with pytest.raises(AdapterError) as caught:
            load_target(f"{path}:make")(4, "b")
    finally:
        sys.path[:] = before
        del sys.modules["raising_target"]
    kind, _, text = error.partition("(")
    told = text.strip("')")
    assert str(caught.value) == f"make(4, 'b') raised {kind}: {told}"


def test_an_error_of_the_adapter_is_told_as_it_is() -> None:
    def make(num_blocks: int, block_size: int) -> Any:
        raise AdapterError("it lacks x")

    with pytest.raises(AdapterError, match=r"^it lacks x$"):
        load_target_module._explained(make, "make")(4, 2)


# What a target passes on


def recording_target(depth: Depth = "api", **answers: Any) -> tuple[Target, Recorder]:
    adapter = Recorder(**{"size": 3, **answers})
    vars(adapter)["promises"] = Promises()
    made = Target(lambda *sizes: adapter, 4, 2, depth)
    adapter.calls.clear()
    return made, adapter


@pytest.mark.parametrize(
    ("method", "arguments", "result"),
    [
        ("admit", ("r1", [1, 2], b"a"), 4),
        ("admit", ("r1", [1, 2], b"a"), None),
        ("match", ("r1", [1, 2], b"a"), 3),
        ("append", ("r1", [1]), True),
        ("append", ("r1", [1]), False),
        ("append_batch", (["r1", "r2"],), False),
        ("publish", ("r1", [1, 2]), None),
        ("release", ("r1",), None),
        ("block_table", ("r1",), [3, 4]),
        ("available", (), 5),
        ("evict", (2,), 1),
        ("refusal", (), (3, 4)),
        ("snapshot", (), Snapshot([1], {}, {}, [])),
        ("kv_events", (), ["batch"]),
        ("replay", (6,), ["batch"]),
        ("misuse", (3, "r1"), None),
    ],
)
def test_each_call_is_passed_on_with_its_result(
    method: str, arguments: tuple[Any, ...], result: Any
) -> None:
    made, adapter = recording_target(**{method: result})
    assert getattr(made, method)(*arguments) == result
    assert adapter.calls == [(method, *arguments)]


@pytest.mark.parametrize("method", ["reset", "check", "begin_step", "end_step"])
def test_a_call_without_arguments_breaks_its_own_rule(method: Any) -> None:
    made, adapter = recording_target()
    made.run(method)
    assert adapter.calls == [(method,)]
    adapter.answers[method] = ValueError("no")
    with pytest.raises(Violation) as caught:
        made.run(method)
    assert caught.value.rule.code == ("W6" if method == "check" else "S4")


@pytest.mark.parametrize("depth", ["api", "events", "full"])
def test_an_empty_manager_holds_no_more_than_a_new_one(depth: Depth) -> None:
    made, adapter = recording_target(depth)
    if depth != "api":
        made.report_to(events := Mock())
        assert adapter.calls == [("report_to", events), ("size",)]
    for size in (3, 2):
        adapter.answers["size"] = size
        made.check_empty()
    adapter.answers["size"] = 4
    with pytest.raises(Violation, match="an empty cache holds 4 references, a new one 3") as caught:
        made.check_empty()
    assert caught.value.rule.code == "D3"
    target(Plain).check_empty()


def test_methods_that_may_act_are_all_but_those_that_look() -> None:
    kinds = (Manager, TierManager, TierTarget, Target)
    names = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    methods = {name for name in names if callable(getattr(TierTarget, name, len))}
    acting = methods - LOOKS - {"run", "ask", "see", "check_empty", "can", "promises"}
    acting |= {"reset", "begin_step", "end_step"}
    assert acting == {
        "admit", "append", "append_batch", "begin_step", "cancel", "complete", "early", "end_step",
        "evict", "fence", "fork", "misuse", "park", "park_misuse", "prefetch", "publish",
        "release", "report_to", "reset", "reset_but", "take", "unpark", "used", "wrong_result",
    }  # fmt: skip
    adapter = Recorder(size=3)
    vars(adapter)["promises"] = Promises()
    made = TierTarget(lambda *sizes: adapter, 4, 2, "api")
    for method in (*sorted(LOOKS), *sorted(acting)):
        made.has_acted = made.may_have_decided = False
        made.ask(method, 1, [2])
        assert adapter.calls[-1] == (method, 1, [2])
        assert made.has_acted == (method in acting), method
        assert made.may_have_decided == (method in acting - {"take"}), method


# Results of a scheduler

OF_KIND: dict[Any, tuple[list[Any], list[Any]]] = {
    bool: ([True, False], [1, None, "yes"]),
    int: ([3, 0], [True, None, 1.5]),
    list: ([[1], (1, 2), deque([3])], [None, 3, "ab"]),
}
"""Right and wrong results by the type that a method must return."""


@pytest.mark.parametrize("method", [name for name, kind in KINDS.items() if kind in OF_KIND])
def test_each_result_of_a_scheduler_has_its_type(method: str) -> None:
    adapter = Recorder()
    vars(adapter).update(promises=SchedulerPromises(), depth=1)
    made = SchedulerTarget(lambda config: adapter, {"host_blocks": 1})
    kind = KINDS[method]
    right, wrong = OF_KIND[kind]
    for result in (*right, *wrong):
        adapter.answers[method] = result
        adapter.calls.clear()
        if result in wrong and type(result) is not kind:
            with pytest.raises(AdapterError, match=f"{method} returned .* it needs {method}"):
                getattr(made, method)("r1", 2)
        else:
            shown = getattr(made, method)("r1", 2)
            assert shown == (list(result) if kind is list else result)
        assert adapter.calls == [(method, "r1", 2)]


def test_what_only_tiers_have_is_nothing_without_them() -> None:
    adapter = Recorder(is_loading=True, num_copies=4)
    vars(adapter).update(promises=SchedulerPromises(), depth=1)
    for config, loads, number in (({}, False, 0), ({"host_blocks": 1}, True, 4)):
        made = SchedulerTarget(lambda config: adapter, config)
        assert (made.is_loading("r1"), made.num_copies()) == (loads, number)
        assert made.has_tiers == made.is_decode_node == bool(config)


@pytest.mark.parametrize(
    ("config", "depth", "smaller"), [({}, 2, 1), ({"depth": 2}, 3, 2), ({"depth": 3}, 2, 2)]
)
def test_a_scheduler_has_as_many_steps_in_flight_as_both_can(
    config: dict[str, int], depth: int, smaller: int
) -> None:
    adapter = Recorder()
    vars(adapter).update(promises=SchedulerPromises(), depth=depth)
    assert SchedulerTarget(lambda config: adapter, config).depth == smaller


def test_copies_and_results_of_a_scheduler_are_named() -> None:
    adapter = Recorder(copies=[("r1", "r2", 3, 4)], update=("r1",), receive=("r1", 1, 2, 3, [4]),
                       schedule=[("r1", 1, 2)])  # fmt: skip
    vars(adapter).update(promises=SchedulerPromises(), depth=1)
    made = SchedulerTarget(lambda config: adapter, {})
    assert made.copies() == {"r1": BlockCopy("r1", "r2", 3, 4)}
    assert made.receive() == Received("r1", 1, 2, 3, [4])
    assert made.schedule() == [("r1", 1, 2)] and made.update((5, 6)) == ["r1"]
    assert adapter.calls[-1] == ("update", [5, 6])
    vars(adapter)["copies"] = None
    assert SchedulerTarget(lambda config: adapter, {}).copies() == {}


def test_tokens_that_an_update_changes_are_a_violation() -> None:
    def update(self: Any, tokens: list[int]) -> list[str]:
        tokens[0] += 1
        return []

    with pytest.raises(Violation, match=r"update was given \[5\], and changed it to \[6\]"):
        scheduler_with(update=update).update([5])


@pytest.mark.parametrize(
    ("target", "told"),
    [
        *(
            (each, "expected package.module:factory or path/to/file.py:factory")
            for each in ("json", ":loads", "json:", ":", "", "a.py")
        ),
        ("json:nothing", "json has no nothing"),
        ("json:decoder.nothing", "json has no decoder.nothing"),
        ("json:__name__", "__name__ in json cannot be called, it is 'json'"),
        ("no_such_module:x", "there is no module no_such_module"),
        ("json.nothing:x", "there is no module json.nothing"),
        ("no/such.py:x", "there is no file no/such.py"),
    ],
)
def test_a_target_that_cannot_be_is_told(
    target: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(TargetError) as caught:
        load_target(target)
    assert str(caught.value) == told


@pytest.mark.parametrize("missing", ["missing", "missing_module.part", "missing_"])
def test_a_module_that_its_target_lacks_is_told(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may begin as that of the target."""
    (tmp_path / "missing_module.py").write_text(f"import {missing}\n")
    monkeypatch.syspath_prepend(tmp_path)
    why = r"^importing missing_module raised ModuleNotFoundError: No module named 'missing"
    try:
        with pytest.raises(TargetError, match=why):
            load_target("missing_module:make")
    finally:
        sys.modules.pop("missing_module", None)


@pytest.mark.parametrize("kind", ["class", "function", "method"])
def test_the_sizes_of_a_factory_are_those_of_what_it_wraps(tmp_path: Path, kind: str) -> None:
    """`load_target` wraps a factory, to explain its errors."""
    path = tmp_path / f"sized_{kind}.py"
    path.write_text(
        "class Sized:\n    block_sizes, pool_sizes = (16,), (5, 6)\n"
        "    def __init__(self, num_blocks, block_size): pass\n"
        "    @classmethod\n    def make(cls, num_blocks, block_size): pass\n"
        "    make.__func__.block_sizes, make.__func__.pool_sizes = (16,), (5, 6)\n"
        "def make(num_blocks, block_size): pass\n"
        "make.block_sizes, make.pool_sizes = (16,), (5, 6)\n"
    )
    name = {"class": "Sized", "function": "make", "method": "Sized.make"}[kind]
    before = list(sys.path)
    try:
        factory = load_target(f"{path}:{name}")
    finally:
        sys.path[:] = before
        sys.modules.pop(path.stem, None)
    assert sizes_of(factory, "block_sizes") == (16,)
    assert sizes_of(factory, "pool_sizes") == (5, 6)
    assert CacheSubject(factory).configure(random.Random(0).randrange)["block_size"] == 16
