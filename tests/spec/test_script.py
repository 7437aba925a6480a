"""A finding as a script of calls on the manager, which runs and fails without radixkv."""

from __future__ import annotations

import dataclasses
import importlib
import random
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.cli.main import main
from radixkv.scheduler.fuzz import targets
from radixkv.spec import CacheSubject, recorded, run, shrink, to_script
from radixkv.spec.adapters.load_target import load_target
from radixkv.spec.adapters.recorder import Line, Recording, _of, recording
from radixkv.spec.harness.engine import Finding, Operation
from radixkv.spec.harness.findings.known import KnownSubject
from radixkv.spec.harness.findings.script import _write
from radixkv.spec.harness.random_engine import run_case
from radixkv.spec.harness.subjects import WHATS, What, make_subject
from radixkv.spec.rules.rule import RULES, require

from .toys import Leaky

MANAGERS = Path(__file__).parents[2] / "docs" / "examples" / "managers"
BROKEN = f"{MANAGERS}/mini_style.py:make_without_repointing"


def execute(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter that cannot import radixkv."""
    path.write_text(f"import sys\nsys.modules['radixkv'] = None\n{text}")
    return subprocess.run([sys.executable, "-I", path], capture_output=True, text=True)


def script_of(subject: Any) -> str:
    # A seed whose calls are valid for a repaired manager, too.
    finding = run(subject, 1, 20_000).finding
    assert finding is not None
    factory = subject.factory
    try:
        return to_script(shrink(subject, finding), subject)
    finally:
        assert subject.factory is factory


def test_the_script_fails_as_long_as_the_manager_does(tmp_path: Path) -> None:
    text = script_of(CacheSubject(load_target(BROKEN)))
    assert "radixkv" not in text.replace(str(MANAGERS), "")
    assert "\nfrom mini_radix import CacheManager\n\ncache_manager = CacheManager(2, " in text
    assert "\navailable_1 = cache_manager.available()  # 1\n" in text
    failed = execute(tmp_path / "script.py", text)
    assert failed.returncode == 1
    assert "AssertionError: S2 available-is-free-plus-unused: 1 of 2 available, " in failed.stderr
    repaired = execute(tmp_path / "script.py", text.replace(", False)", ", True)"))
    assert repaired.returncode == 0, repaired.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("                del self.by_hash[block.hash]\n", ""),  # found under its old hash
        ("blake2b(before + ", "blake2b("),  # a hash without the prefix
        ("for number in unused:\n            self.free.remove(number)\n", "pass\n"),
        ("if num_new > len(self.free) - len(unused):", "if False:"),  # it raises IndexError
    ],
)
def test_a_script_of_each_kind_of_finding(tmp_path: Path, right: str, wrong: str) -> None:
    (tmp_path / "nano_style.py").write_text((MANAGERS / "nano_style.py").read_text())
    source = (MANAGERS / "nano_blocks.py").read_text()
    assert source.count(right) == 1
    (tmp_path / "nano_blocks.py").write_text(source.replace(right, wrong))
    sys.modules.pop("nano_blocks", None)
    before = list(sys.path)
    try:
        text = script_of(CacheSubject(load_target(f"{tmp_path}/nano_style.py:make")))
    finally:
        sys.path[:] = before
        sys.modules.pop("nano_blocks", None)
    failed = execute(tmp_path / "script.py", text)
    assert failed.returncode == 1 and "Error" in failed.stderr, text
    (tmp_path / "nano_blocks.py").write_text(source)
    repaired = execute(tmp_path / "script.py", text)
    assert repaired.returncode == 0, (text, repaired.stderr)


def test_the_command_writes_a_script(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "script.py"
    assert main(["fuzz", "--target", BROKEN, "--script", str(path)]) == 1
    assert execute(tmp_path / "run.py", path.read_text()).returncode == 1
    capsys.readouterr()
    path.unlink()
    target = f"{Path(__file__).with_name('toys.py')}:Leaky"
    assert main(["fuzz", "--target", target, "--script", str(path)]) == 1
    assert "no --script: " in capsys.readouterr().out and not path.exists()


def test_known_findings_are_left_out_of_a_script_too() -> None:
    known = KnownSubject(CacheSubject(load_target(BROKEN)), ["S2", "A3", "C2"])
    finding = run(known, 0, 20_000).finding
    assert finding is not None and finding.rule.startswith("C1")
    shrunk = shrink(known, finding)
    factory = known.factory
    assert "C1 read-own-prefix: " in to_script(shrunk, known)
    assert known.factory is factory, "what was recorded is not what is tested next"
    other = dataclasses.replace(shrunk, rule="S1 no-leak")
    assert to_script(other, known) == "", "another rule breaks"


def test_known_rules_change_nothing_of_a_script_that_breaks_another() -> None:
    subject = CacheSubject(load_target(BROKEN))
    finding = run(subject, 1, 20_000).finding
    assert finding is not None
    shrunk = shrink(subject, finding)
    assert to_script(shrunk, KnownSubject(subject, ["E4"])) == to_script(shrunk, subject) != ""


def test_nothing_is_recorded_without_need() -> None:
    assert recorded(Leaky) is Leaky
    with suppress(KeyError), recording():
        raise KeyError
    assert recorded(Leaky) is Leaky, "a recording has ended with an error"
    finding = run(CacheSubject(Leaky), 0, 5_000).finding
    assert finding is not None and to_script(finding, CacheSubject(Leaky)) == ""


class Mute(Leaky):
    """Records nothing but what it makes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.shelf = recorded(Shelf)(num_blocks)


def test_a_script_without_an_answer_to_compare_is_none() -> None:
    finding = run(CacheSubject(Mute), 0, 5_000).finding
    assert finding is not None
    assert to_script(finding, CacheSubject(Mute)) == "", "it would fail for a right manager, too"


class Seldom(Mute):
    """Records one answer, when it is made."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        assert self.shelf.mirror(7) == 7


def test_the_last_operation_is_shown_if_it_calls_nothing_too() -> None:
    finding = run(CacheSubject(Seldom), 0, 5_000).finding
    assert finding is not None
    text = to_script(finding, CacheSubject(Seldom))
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# drain()"]


@pytest.mark.parametrize("what", WHATS)
def test_there_is_a_script_of_each_kind_of_world(
    what: What, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last operation breaks a rule while there are requests, of which not all have a table."""

    def factory(*sizes: Any) -> Any:
        assert recorded(Shelf)().mirror(7) == 7
        return getattr(targets, what)(*sizes)

    subject, below = make_subject(what, factory, "full"), random.Random(1).randrange
    config = subject.configure(below)
    world: Any = subject.world(config)
    trace = run_case(world, below, 20)[0][:-1]
    apply = type(world).apply

    def breaks(self: Any, operation: Operation) -> bool:
        require(operation != ["break"], RULES["S1 no-leak"], "")
        return bool(apply(self, operation))

    monkeypatch.setattr(type(world), "apply", breaks)
    finding = Finding("S1 no-leak", "", config, [*trace, ["break"]])
    text = to_script(finding, subject)
    assert text.startswith('"""S1 no-leak: ')
    assert bool(re.search(r"\n# block tables: r\d+ \[", text)) == (what in ("cache", "tiers"))


class Place(NamedTuple):
    """Where a book is."""

    row: Any
    column: int = 0


class Shelf:
    """Returns and takes objects of all kinds."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.books = [0]
        self.held: dict[str, Any] = {}

    def pair(self) -> tuple[Shelf, list[int]]:
        return self, [1]

    def same(self, other: Any) -> bool:
        return other is self

    def mirror(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise KeyError(self.size)

    def parts(self) -> Iterator[Any]:
        yield from [self, Shelf()]

    def shelves(self) -> list[Shelf]:
        return [Shelf(7)]

    def put(self, book: int) -> list[int]:
        self.books.append(book)
        return self.books


def test_objects_have_names_and_plain_values_stay_plain() -> None:
    with recording() as log:
        shelf = recorded(Shelf)(size=3)
        other, books = shelf.pair()
        assert shelf.same(other) and books == [1] and shelf.size == 3
        shelf.size = 4
        shelf.books[0] += 1
        with pytest.raises(KeyError):
            shelf.fail()
        place = shelf.mirror(Place(other, 2))
        assert (type(place), place.column) == (Place, 2) and shelf.mirror(Place(1)).row == 1
        assert shelf.mirror((7,)) == (7,) and shelf.mirror(([8], 9)) == ([8], 9)
    shown = [(line.name, line.text, line.result, line.error) for line in log.lines]
    assert shown == [
        ("shelf", "Shelf(size=3)", "", ""),
        ("items", "shelf.pair()", "", ""),
        ("", "shelf.same(items[0])", "True", ""),
        ("", "shelf.size", "3", ""),
        ("", "shelf.size = 4", "", ""),
        ("", "shelf.books", "[0]", ""),
        ("", "shelf.fail()", "", "KeyError(4)"),
        ("place", "shelf.mirror(Place(items[0], 2))", "", ""),
        ("", "shelf.mirror(Place(1, 0))", "Place(1, 0)", ""),
        ("", "shelf.mirror((7,))", "(7,)", ""),
        ("", "shelf.mirror(([8], 9))", "([8], 9)", ""),
    ]


def test_a_member_of_an_enum_stays_itself() -> None:
    with recording() as log:
        shelf = recorded(Shelf)()
        for each in MEMBERS:
            assert shelf.mirror(each) is each
        shelf.size = Level.LOW
    assert [(line.text, line.result) for line in log.lines[1:]] == [
        ("shelf.mirror(Status.FREE)", "Status.FREE"),
        ("shelf.mirror(Status.USED)", "Status.USED"),
        ("shelf.mirror(Level.LOW)", "Level.LOW"),
        ("shelf.mirror(Access(0))", "Access(0)"),
        ("shelf.mirror(Access.READ)", "Access.READ"),
        ("shelf.mirror(Access(3))", "Access(3)"),
        ("shelf.size = Level.LOW", ""),
    ]


def test_what_objects_hold_has_names_too() -> None:
    with recording() as log:
        shelf = recorded(Shelf)()
        mine, other = shelf.parts()
        assert shelf.same(mine) and not shelf.same(other)
        for each in shelf.shelves():
            shelf.mirror(each)
        shelf.held = {"a": other}
        assert list(shelf.held) == ["a"]
    assert [f"{line.name} = {line.text}" if line.name else line.text for line in log.lines] == [
        "shelf = Shelf()",
        "generator = shelf.parts()",
        "items = list(generator)",
        "shelf.same(shelf)",
        "shelf.same(items[1])",
        "items2 = shelf.shelves()",
        "shelf2 = shelf.mirror(items2[0])",
        "shelf.held = {'a': items[1]}",
        "list(shelf.held)",
    ]


LIVE = '''
class View:
    def __init__(self, free):
        self.free = free

    def size(self):
        return len(self.free)


class Blocks:
    def __init__(self, num_blocks):
        self.free, self.tables = list(range(num_blocks)), {}

    def view(self):
        return View(self.free)

    def take(self, name, grows):
        """Returns the table itself, which the next call changes."""
        table = self.tables.setdefault(name, [])
        table.append(self.free.pop() if RIGHT or not grows else table[0])
        return table

    def give_back(self, name):
        self.free += self.tables.pop(name)


class Adapter:
    def __init__(self, num_blocks, block_size):
        self.blocks, self.lengths, self.view = recorded(Blocks)(num_blocks), {}, None

    def admit(self, name, tokens, namespace):
        self.lengths[name] = 0
        if self.append(name, tokens, False):
            return 0
        del self.lengths[name]

    def append(self, name, tokens, grows=True):
        if self.view.size() < len(tokens):
            return False
        for _ in tokens:
            self.table = self.blocks.take(name, grows)
            self.lengths[name] += 1
        return True

    def publish(self, name, tokens):
        pass

    def release(self, name):
        if self.lengths.pop(name):
            self.blocks.give_back(name)

    def block_table(self, name):
        return list(self.blocks.tables.get(name, ()))

    def available(self):
        self.view = self.view or self.blocks.view()  # a look that later calls use
        return self.view.size()
'''


def test_a_script_keeps_answers_as_they_were(tmp_path: Path) -> None:
    """A list that the manager changes later is copied when it is returned."""
    path = tmp_path / "live_blocks.py"
    start = "from radixkv.spec import recorded\nRIGHT = False\n"
    path.write_text(start + LIVE)
    before = list(sys.path)
    try:
        subject = CacheSubject(load_target(f"{path}:Adapter"), "api", [1])
        text = script_of(subject)
    finally:
        sys.path[:] = before
        sys.modules.pop("live_blocks", None)
    assert "\nfrom copy import deepcopy\n" in text
    assert " = deepcopy(blocks.take('" in text
    assert text.count("deepcopy(") == text.count(".take(") - 1, "all but the last answer change"
    path.write_text("RIGHT = False\n" + LIVE)
    failed = execute(tmp_path / "script.py", text)
    assert failed.returncode == 1 and "AssertionError: " in failed.stderr, (text, failed.stderr)
    path.write_text("RIGHT = True\n" + LIVE)
    repaired = execute(tmp_path / "script.py", text)
    assert repaired.returncode == 0, (text, repaired.stderr)


# Values as text


class Status(Enum):
    FREE = "free"
    USED = ("used", 1)


class Level(IntEnum):
    LOW = 1


class Access(Flag):
    READ = 1
    WRITE = 2


ENUMS = ("Status", "Level", "Access")
MEMBERS = [*Status, Level.LOW, Access(0), Access.READ, Access.READ | Access.WRITE]

PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.sampled_from(MEMBERS)
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda each: (
        st.lists(each) | st.lists(each).map(tuple) | st.tuples(each)
        | st.dictionaries(st.integers() | st.text() | st.sampled_from(Status), each)
        | st.frozensets(PLAIN) | st.sets(PLAIN)
    ),
    max_leaves=5,
)  # fmt: skip


@given(VALUES)
def test_a_value_is_written_as_an_expression_that_gives_it(value: Any) -> None:
    log = Recording()
    names: dict[str, Any] = {}
    text = log.text(value)
    exec("\n".join(log.imports), names)
    assert eval(text, names) == value and names.keys() <= {"__builtins__", *ENUMS}


@pytest.mark.parametrize(
    ("value", "text", "imports"),
    [
        (deque([1, (2,)]), "[1, (2,)]", set()),
        (SimpleNamespace(a=1, b=[2]), "SimpleNamespace(a=1, b=[2])",
         {"from types import SimpleNamespace"}),
        (np.array([1, 2], np.int32), "numpy.array([1, 2], dtype='int32')", {"import numpy"}),
        (np.array([-np.inf]), "numpy.array([float('-inf')], dtype='float64')", {"import numpy"}),
        ([float("inf"), float("nan"), 0.5], "[float('inf'), float('nan'), 0.5]", set()),
        ({Status.FREE}, "{Status.FREE}", {f"from {__name__} import Status"}),
        (Access.READ | Access.WRITE, "Access(3)", {f"from {__name__} import Access"}),
        ({"a": (Place(1),)}, "{'a': (Place(1, 0),)}", {f"from {__name__} import Place"}),
    ],
)  # fmt: skip
def test_other_values_are_written_with_what_they_need(
    value: Any, text: str, imports: set[str]
) -> None:
    log = Recording()
    assert (log.text(value), log.imports) == (text, imports)


class Echo:
    """Returns the index, and keeps what is set."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        return index

    def __setitem__(self, index: Any, value: Any) -> None:
        self.kept.append((index, value))

    def __len__(self) -> int:
        return len(self.kept)

    def __int__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "an echo"


BOUND = st.none() | st.integers(-9, 9)
INDEX = st.integers(-9, 9) | st.builds(slice, BOUND, BOUND, BOUND) | st.text(max_size=2)


@given(INDEX | st.lists(INDEX, max_size=3).map(tuple), VALUES)
def test_an_index_is_written_as_an_expression_that_gives_it(index: Any, value: Any) -> None:
    with recording() as log:
        echo: Any = recorded(Echo)()
        found = echo[index]
        assert not echo and len(echo) == 0 and int(echo) == 7 and repr(echo) == "an echo"
        echo[index] = value
        assert echo and len(echo) == 1
    _, read, write = log.lines
    assert eval(read.text, {"echo": Echo()}) == index and read.is_read and not write.is_read
    assert found == index
    exec(write.text, {**globals(), "echo": (other := Echo())})
    assert other.kept == [(index, value)]


def test_an_index_is_written_as_one_writes_it() -> None:
    with recording() as log:
        echo: Any = recorded(Echo)()
        assert echo[1:2, ::3] == (slice(1, 2), slice(None, None, 3)) and echo[-4:] and echo["a", 5]
    assert [line.text for line in log.lines[1:]] == [
        "echo[1:2, ::3]", "echo[-4:]", "echo['a', 5]"
    ]  # fmt: skip


@pytest.mark.parametrize("wrap", [dict.fromkeys, list, tuple, deque, lambda each: {1: each[0]}])
def test_what_holds_an_object_is_one(wrap: Callable[[Any], Any]) -> None:
    with recording() as log:
        shelf: Any = recorded(Shelf)()
        held = shelf.mirror(wrap([7]))
        shelf.mirror(wrap([shelf]))
    assert held == wrap([7]) and not log.lines[1].name and log.lines[1].result
    assert log.lines[2].name and not log.lines[2].result


class HTTPServerOf:
    """Has a name of many capital letters, and makes its like."""

    def make(self, *given: Any, **named: Any) -> HTTPServerOf:
        self.given = given, named
        return HTTPServerOf()

    def me(self) -> HTTPServerOf:
        return self


def test_objects_are_numbered_by_kind_and_known_again() -> None:
    with recording() as log:
        first: Any = recorded(HTTPServerOf)()
        second, third = first.make(1), first.make()
        assert first.me() is first and second.me() is second
        first.make([second, (third, 1)], {"of": third}, key=second)
    assert [line.text for line in log.lines if line.name] == [
        "HTTPServerOf()", "httpserver_of.make(1)", "httpserver_of.make()",
        "httpserver_of.make([httpserver_of2, (httpserver_of3, 1)], {'of': httpserver_of3}, "
        "key=httpserver_of2)",
    ]  # fmt: skip
    names = [line.name for line in log.lines if line.name]
    assert names == ["httpserver_of", *(f"httpserver_of{number}" for number in (2, 3, 4))]


@pytest.mark.parametrize("module", ["folder_of_a_package", "folder_of_a_package.inner.module"])
def test_a_script_finds_the_folder_of_a_package(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "folder_of_a_package" / "inner"
    inner.mkdir(parents=True)
    for path in (inner.parent / "__init__.py", inner / "__init__.py", inner / "module.py"):
        path.write_text("class Outer:\n    class Made:\n        pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module(module).Outer.Made
    with recording() as log:
        recorded(made)()
    assert log.folders == {str(tmp_path)} and log.imports == {f"from {module} import Outer"}
    assert [line.text for line in log.lines] == ["Outer.Made()"]
    for name in [each for each in sys.modules if each.startswith("folder_of_a_package")]:
        del sys.modules[name]


@pytest.mark.parametrize("made", [Fraction, pytest.MonkeyPatch])
def test_what_is_installed_needs_no_folder(made: Any) -> None:
    with recording() as log:
        recorded(made)()
    assert not log.folders


class Keeper:
    """Keeps all that it is given, in every way."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.kept: Any = None

    def take(self, *given: Any, **named: Any) -> None:
        self.given += [*given, *named.values()]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.given += [index, value]

    def __getitem__(self, index: Any) -> int:
        self.given.append(index)
        return 0

    def other(self) -> Keeper:
        return Keeper()


HELD: list[Callable[[Any], Any]] = [
    lambda each: each,
    lambda each: [1, each],
    lambda each: (each, 2),
    lambda each: [[each], 3],
    lambda each: Place(each),
    lambda each: {"of": each, "no": 1},
    lambda each: {"of": [(each, 1)]},
    lambda each: SimpleNamespace(of=each, no=1),
    lambda each: [SimpleNamespace(of=[each])],
]
"""Values that hold an object."""


@pytest.mark.parametrize("hold", HELD)
def test_a_manager_gets_no_stand_in_however_it_gets_it(hold: Callable[[Any], Any]) -> None:
    def text_of(value: Any) -> str:
        """Return a value with the types of all that it holds."""
        if isinstance(value, SimpleNamespace):
            return text_of(vars(value))
        if isinstance(value, dict):
            return text_of(list(value.items()))
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}{[text_of(each) for each in value]}"
        return type(value).__name__

    with recording() as log:
        made = recorded(Keeper)()
        keeper: Any = made
        other = keeper.other()
        _, real, _ = _of(keeper)
        keeper.take(hold(other), key=hold(other))
        keeper[hold(other)] = hold(other)
        assert keeper[hold(other)] == 0
        keeper.kept = hold(other)
    assert len(real.given) == 5
    for each in (*real.given, real.kept):
        assert text_of(each) == text_of(hold(Keeper()))
    shown = log.text(hold(other))
    assert "keeper2" in shown
    assert [line.text for line in log.lines[2:]] == [
        f"keeper.take({shown}, key={shown})",
        f"keeper[{index_of(shown, hold(other))}] = {shown}",
        f"keeper[{index_of(shown, hold(other))}]",
        f"keeper.kept = {shown}",
    ]


def index_of(shown: str, value: Any) -> str:
    """Return a value as an index, where a tuple has no brackets."""
    return shown[1:-1] if type(value) is tuple else "keeper2, 0" if type(value) is Place else shown


def test_equal_findings_have_equal_scripts() -> None:
    """Python orders a set of strings anew in each process."""
    words = [str(number) for number in range(10, 30)]
    assert Recording().text({*words}) == f"{{{', '.join(map(repr, words))}}}"
    folders = [f"/packages/{number}" for number in range(10, 30)]
    log = Recording(folders=set(folders))
    text = _write(Finding("S1 no-leak", "", {}, []), log, [("", [Line("f()", error="E")])], "", "")
    assert re.findall(r"insert\(0, '(.*)'\)", text) == folders
