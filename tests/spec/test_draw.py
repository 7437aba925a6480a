"""A finding as text and as a drawing."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from radixkv.scheduler.fuzz.cache_adapter import make_factory
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Finding, Operation
from radixkv.spec.harness.findings.program import to_call, to_program, world_before
from radixkv.spec.harness.findings.svg import FILL, to_svg
from radixkv.spec.harness.pool_world import PoolSubject

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
    alone = to_program(FOUND).replace(", max_running=3", "")  # only the subject knows its use
    assert alone == PROGRAM.split("\n\nbefore")[0]


def test_a_program_of_one_call(subject: CacheSubject) -> None:
    alone = Finding("H1 hit-is-published", "nothing", SIZES, [["drain"]])
    assert "    drain()    # breaks H1 hit-is-published: nothing\n" in to_program(alone, subject)


def test_a_rule_that_is_no_more_is_shown_by_its_name() -> None:
    assert to_program(Finding("X1 gone", "why", {}, [["drain"]])).startswith("X1 gone\n\nwith")


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        (["drain"], "drain()"),
        (["submit", "r1", [], 0, 0], "submit(r1, [])"),
        (["submit", "r1", [5], 0, 1], "submit(r1, [5], namespace=1)"),
        (["submit", "r1", [5], 3, 0, [], 0], "submit(r1, [5], max_new_tokens=3)"),
        (
            ["submit", "r1", [5], 1, 2, [7], 1],
            "submit(r1, [5], max_new_tokens=1, priority=2, stop=[7], namespace=1)",
        ),
        (["append_batch", [["r1", 0], ["r12", 3]]], "append_batch([[r1, 0], [r12, 3]])"),
        (["done", "r1.2"], "done(r1.2)"),
        (["evict", 0], "evict(0)"),
        (["misuse", 3, ""], "misuse(kind=3)"),
        (["say", "two words", None, True], "say('two words', None, True)"),
    ],
)
def test_a_call(operation: Operation, call: str) -> None:
    assert to_call(operation) == call


def test_the_world_before_is_that_before_the_last_call(subject: CacheSubject) -> None:
    world = world_before(subject, FOUND)
    assert "r1 running" in world.picture()
    assert "r1" not in world_before(subject, Finding("", "", SIZES, TRACE[:1])).picture()


def shapes(svg: str) -> tuple[list[str], list[ElementTree.Element], ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    return texts, list(root.iter("{http://www.w3.org/2000/svg}rect")), root


def test_a_drawing_has_the_tree_and_the_pool(subject: CacheSubject) -> None:
    texts, boxes, root = shapes(to_svg(subject, FOUND))
    assert texts[:9] == [to_call(operation) for operation in TRACE]
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
