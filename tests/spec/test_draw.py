"""A finding as text and as a drawing."""

from __future__ import annotations

import random
import re
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from radixkv.scheduler.fuzz import targets
from radixkv.scheduler.fuzz.cache_adapter import make_factory
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Finding, Operation
from radixkv.spec.harness.findings.program import to_call, to_program, world_before
from radixkv.spec.harness.findings.svg import CHAR, FILL, to_svg
from radixkv.spec.harness.pool_world import PoolSubject
from radixkv.spec.harness.random_engine import run_case
from radixkv.spec.harness.subjects import WHATS, What, make_subject

from .designs.hashed import Hashed
from .toys import Plain

SIZES = {"num_blocks": 6, "block_size": 2, "max_running": 3, "alphabet": 2, "rare": 5, "often": 0}
TRACE: list[Operation] = [
    ["submit", "r1", [0, 0, 0, 0, 3], 2, 0],
    ["admit", "r1"],
    ["forward", "r1", 5],
    ["submit", "r2", [0, 0, 3, 3], 0, 0],
    ["submit", "r3", [0, 0, 7], 0, 1],
    ["admit", "r2"],
    ["forward", "r2", 4],
    ["launch", "r9", 1, "r9.1"],
    ["finish", "r1"],
]
FOUND = Finding("H1 hit-is-published", "seen <here> & there", SIZES, TRACE)

PROGRAM = """\
H1 hit-is-published: A hit contains only blocks that are published in the namespace of the request.

with num_blocks=6, block_size=2
    submit(r1, [0, 0, 0, 0, 3], more=2)
    admit(r1)
    forward(r1, 5)
    submit(r2, [0, 0, 3, 3])
    submit(r3, [0, 0, 7], namespace=1)
    admit(r2)
    forward(r2, 4)
    launch(r9, 1, r9.1)
    finish(r1)    # breaks H1 hit-is-published: seen <here> & there

before the last call:
    +- [0 0] block 1, used by r1, r2
       +- [0 0] block 2, used by r1
       +- [3 3] block 4, used by r2
    r1 running, 5/5 computed, table [1, 2, 3]
    r2 running, 4/4 computed, table [1, 4]
    r3 waiting, 0/3 computed
    blocks |ccrc..|  . free  r private  c cached  ! belongs to nobody"""


@pytest.fixture
def subject() -> CacheSubject:
    return CacheSubject(make_factory(), "full")


def test_a_program_with_its_picture(subject: CacheSubject) -> None:
    assert to_program(FOUND, subject) == PROGRAM
    alone = PROGRAM.split("\n\nbefore")[0]
    for known, text in (  # only the subject knows the use of a size, and the names of arguments
        ("block_size=2", "block_size=2, max_running=3, alphabet=2, rare=5, often=0"),
        ("more=2", "2, 0"), ("[0, 0, 3, 3])", "[0, 0, 3, 3], 0, 0)"), ("namespace=1", "0, 1"),
    ):  # fmt: skip
        alone = alone.replace(known, text)
    assert to_program(FOUND) == alone


def test_a_program_of_one_call(subject: CacheSubject) -> None:
    alone = Finding("H1 hit-is-published", "nothing", SIZES, [["drain"]])
    assert "    drain()    # breaks H1 hit-is-published: nothing\n" in to_program(alone, subject)


def test_a_rule_that_is_no_more_is_shown_by_its_name() -> None:
    assert to_program(Finding("X1 gone", "why", {}, [["drain"]])).startswith("X1 gone\n\nwith")


@pytest.mark.parametrize(
    ("what", "operation", "call"),
    [
        ("cache", ["drain"], "drain()"),
        ("cache", ["submit", "r1", [], 0, 0], "submit(r1, [])"),
        ("cache", ["submit", "r1", [5], 0, 1], "submit(r1, [5], namespace=1)"),
        ("tiers", ["submit", "r1", [5], 1, 1], "submit(r1, [5], more=1, namespace=1)"),
        ("tiers", ["fork", "r1", "r2", 1], "fork(r1, r2, 1)"),
        ("scheduler", ["submit", "r1", [5], 3, 0, [], 0], "submit(r1, [5], max_new_tokens=3)"),
        (
            "scheduler",
            ["submit", "r1", [5], 1, 2, [7], 1],
            "submit(r1, [5], max_new_tokens=1, priority=2, stop=[7], namespace=1)",
        ),
        (
            "handoff",
            ["submit", "r1", [5], 3, 2, 1, [7]],
            "submit(r1, [5], max_new_tokens=3, seed=2, namespace=1, stop=[7])",
        ),
        ("handoff", ["submit", "r1", [5], 3, 2], "submit(r1, [5], max_new_tokens=3, seed=2)"),
        ("cache", ["append_batch", [["r1", 0], ["r12", 3]]], "append_batch([[r1, 0], [r12, 3]])"),
        ("cache", ["done", "r1.2"], "done(r1.2)"),
        ("cache", ["evict", 0], "evict(0)"),
        ("cache", ["misuse", 3, ""], "misuse(kind=3)"),
        ("cache", ["say", "two words", None, True], "say('two words', None, True)"),
        (
            "cache",
            ["say", "r1 is", "xr1", "r1.", "r1.2x", "R1"],
            "say('r1 is', 'xr1', 'r1.', 'r1.2x', 'R1')",
        ),
        ("cache", ["say", [["r1 is", ""]], 0, []], "say([['r1 is', '']], 0, [])"),
    ],
)
def test_a_call(what: What, operation: Operation, call: str) -> None:
    assert to_call(operation, make_subject(what, getattr(targets, what), "full")) == call


@pytest.mark.parametrize("what", WHATS)
def test_a_replay_reads_no_part_of_a_configuration_that_is_not_shown(what: What) -> None:
    subject = make_subject(what, getattr(targets, what), "full")
    below = random.Random(1).randrange
    for _ in range(3 if what == "costs" else 10):
        config, other = subject.configure(below), subject.configure(below)
        shown = to_program(Finding("", "", config, []), subject)
        assert "rare=" not in shown and "often=" not in shown
        changed = {
            name: value if f"{name}={value!r}" in shown else other[name]
            for name, value in config.items()
        }
        one, two = subject.world(config), subject.world(changed)
        for operation in run_case(one, below, 30)[0]:
            two.apply(operation)
        assert (one.situations, one.picture()) == (two.situations, two.picture()), changed


def test_the_world_before_is_that_before_the_last_call(subject: CacheSubject) -> None:
    world = world_before(subject, FOUND)
    assert "r1 running" in world.picture()
    assert "r1" not in world_before(subject, Finding("", "", SIZES, TRACE[:1])).picture()


def test_a_rule_that_breaks_earlier_than_it_did_leaves_the_world_as_it_was_then() -> None:
    class Short(Plain):
        def append(self, name: str, tokens: Any) -> bool:
            if name == "r2":
                raise KeyError(name)
            return super().append(name, tokens)

    subject = CacheSubject(Short, "api")
    picture = world_before(subject, FOUND).picture()
    assert "r1 running" in picture and "r2 waiting" in picture
    assert to_program(FOUND, subject).endswith("".join(f"\n    {x}" for x in picture.split("\n")))
    nothing = to_program(Finding("", "", SIZES, [["drain"]]), subject)
    assert nothing.endswith("\n\nbefore the last call:\n    (nothing has happened yet)")


def shapes(svg: str) -> tuple[list[str], list[ElementTree.Element], ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    return texts, list(root.iter("{http://www.w3.org/2000/svg}rect")), root


def test_a_drawing_has_the_tree_and_the_pool(subject: CacheSubject) -> None:
    texts, boxes, root = shapes(to_svg(subject, FOUND))
    assert texts[:9] == [to_call(operation, subject) for operation in TRACE]
    assert "H1 hit-is-published: seen <here> & there" in texts
    assert {"1: 0 0", "2: 0 0", "4: 3 3", "r1 r2", "r2"} <= set(texts)
    assert len(boxes) == 1 + 3 + 6, "the background, three published blocks, six of the pool"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}line"))) == 2
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in boxes:
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert x + float(box.get("width", 0)) <= width
        assert y + float(box.get("height", 0)) <= height


def test_a_drawing_without_the_calls(subject: CacheSubject) -> None:
    texts, _, _ = shapes(to_svg(subject, FOUND, calls=False))
    assert "admit(r1)" not in texts and "1: 0 0" in texts


def test_without_a_model_the_tables_and_the_memory_are_drawn() -> None:
    finding = Finding("S4 no-unexpected-error", "block 1 did " + "it " * 60, SIZES, TRACE)
    texts, boxes, root = shapes(to_svg(CacheSubject(Plain, "api"), finding))
    assert {"r1 5/5", "r2 4/4", "block 1", "0: 0 r1 r2", "3: 3 r2"} <= set(texts)
    assert texts.count("before the last call") == texts.count("when the rule is broken") == 1
    pointers = list(root.iter("{http://www.w3.org/2000/svg}line"))
    assert len(pointers) >= 4 and len(boxes) > 2 * len(pointers), "a line per entry of a table"
    assert max(map(len, texts)) <= 110, "long lines are broken"
    assert any(FILL["evicted"] == box.get("fill") for box in boxes), "the block of the finding"


def test_what_has_no_blocks_is_drawn_as_text() -> None:
    pool = Finding("F5 allocate-exact-count", "no", {"num_blocks": 3}, [["allocate", 1]])
    from radixkv.scheduler.fuzz.pool_adapter import make_factory as make_pool

    texts, boxes, _ = shapes(to_svg(PoolSubject(make_pool()), pool))
    assert "blocks |...|  . free  x allocated" in texts and len(boxes) == 1


# Every figure of a drawing

BRANCHES: list[Operation] = [
    ["submit", "r1", [0, 0, 1, 1, 2, 2], 0, 0],
    ["admit", "r1"],
    ["forward", "r1", 6],
    ["submit", "r2", [0, 0, 3, 3, 123456789, 123456789], 0, 0],
    ["admit", "r2"],
    ["forward", "r2", 6],
    ["submit", "r3", [0, 0, 1, 1, 7], 2, 0],
    ["admit", "r3"],
    ["forward", "r3", 5],
    ["submit", "r4", [8, 8], 0, 1],
    ["admit", "r4"],
    ["forward", "r4", 2],
    ["submit", "r5", [9, 9], 0, 1],
    ["finish", "r1"],
    ["finish", "r4"],
    ["evict", 1],
    ["drain"],
]
"""Two trees: branches of other lengths, a label too long for its box, blocks of all kinds."""

TABLES: list[Operation] = [
    ["submit", "r1", [4] * 12, 3, 0],
    ["admit", "r1"],
    ["forward", "r1", 9],
    ["submit", "r2", [4] * 3, 3, 0],
    ["admit", "r2"],
    ["forward", "r2", 3],
    ["submit", "r3", [4] * 3, 3, 0],
    ["admit", "r3"],
    ["forward", "r3", 3],
    ["finish", "r3"],
    ["append", "r2", [5]],
    ["forward", "r2", 1],
]
"""Blocks with more slots than are shown, full, begun and free; the last call changes one."""

DRAWINGS = {
    "tree": (CacheSubject(make_factory(), "full"), 12, 2, BRANCHES),
    "tables": (CacheSubject(Plain, "api"), 5, 9, TABLES),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_as_it_was_seen_to_be_right(name: str) -> None:
    """If a change is meant, look at the new drawing and store it; its elements are on lines."""
    subject, num_blocks, block_size, trace = DRAWINGS[name]
    sizes = {**SIZES, "num_blocks": num_blocks, "block_size": block_size}
    drawn = to_svg(subject, Finding("C1 read-own-prefix", "block 3 <is> & bad", sizes, trace))
    stored = Path(__file__).with_name("drawings") / f"{name}.svg"
    assert drawn.replace("><", ">\n<") == stored.read_text("utf-8")


class Box(NamedTuple):
    """A rectangle of a drawing."""

    left: float
    top: float
    right: float
    bottom: float

    def holds(self, x: float, y: float) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def overlaps(self, other: Box) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.get(name, 0)) for name in names]


def boxes_of(root: ElementTree.Element) -> list[Box]:
    rects = root.iter("{http://www.w3.org/2000/svg}rect")
    sizes = [numbers(each, "x", "y", "width", "height") for each in rects]
    return [Box(x, y, x + width, y + height) for x, y, width, height in sizes]


def test_the_tree_has_each_block_once_though_others_have_its_prefix() -> None:
    trace: list[Operation] = []
    for name in ("r1", "r2"):  # they compute the same blocks
        trace += [["submit", name, [0, 0, 1, 1], 0, 0], ["admit", name]]
    trace += [["forward", name, 4] for name in ("r1", "r2")]
    trace += [
        ["submit", "r3", [0, 0, 2, 2], 0, 0],
        ["admit", "r3"],
        ["forward", "r3", 2],
        ["drain"],
    ]
    subject = CacheSubject(Hashed, "events")
    drawn = to_svg(subject, Finding("C1 read-own-prefix", "", SIZES, trace))
    labels = re.findall(r">(\d+: [^<]*)<", drawn)
    words = [label.partition(": ")[2] for label in labels]
    assert sorted(words) == ["0 0", "0 0", "1 1", "1 1", "2 2"]
    assert len({label.partition(": ")[0] for label in labels}) == 5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("factory", "depth"),
    [(make_factory(), "full"), (make_factory(), "api"), (Hashed, "events")],
    ids=["full", "api", "several copies"],
)
def test_boxes_do_not_overlap_and_lines_join_them(factory: Any, depth: Any, seed: int) -> None:
    subject = CacheSubject(factory, depth)
    below = random.Random(seed).randrange
    world = subject.world(subject.configure(below))
    trace, violation = run_case(world, below, 30)
    assert violation is None
    finding = Finding("C1 read-own-prefix", "block 1", world.config, trace[:-1])
    root = ElementTree.fromstring(to_svg(subject, finding))
    document, *boxes = boxes_of(root)
    assert all(
        document.holds(*each[:2]) and document.holds(*each[2:]) and each.left < each.right
        for each in boxes
    )
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    bottoms = {((each.left + each.right) / 2, each.bottom) for each in boxes}
    tops = {((each.left + each.right) / 2, each.top) for each in boxes}
    for line in root.iter("{http://www.w3.org/2000/svg}line"):
        x1, y1, x2, y2 = numbers(line, "x1", "y1", "x2", "y2")
        assert (x1, y1) in bottoms and (x2, y2) in tops and y1 < y2
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y = numbers(text, "x", "y")
        width = CHAR * len("".join(text.itertext()))
        assert document.holds(x + width, y)
        if around := [each for each in boxes if each.holds(x, y)]:
            assert around[0].holds(x + width, y), "a label ends in its box"
