"""The operations of a hand-off's world one by one: what they do to memories, pulls and faults."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from radixkv.spec.adapters.handoff import Copy, Part, StorageOperation
from radixkv.spec.harness.handoff import operations
from radixkv.spec.harness.handoff.state import CopyInFlight, LiveNode, Transfer
from radixkv.spec.model.handoff import DecodeModel, PrefillModel

A, B, C = (1,), (1, 2), (1, 2, 3)
"""Contents of blocks."""


def world_of(*nodes: LiveNode, **parts: Any) -> Any:
    """A world with some nodes."""
    made = SimpleNamespace(
        nodes={node.name: node for node in nodes}, live=lambda: list(nodes), num_groups=2,
        block_size=1, storage={}, situations=Counter(), num_lost=3, transfers=[],
        is_severed=lambda one, other: False,
    )  # fmt: skip
    vars(made).update(parts)
    return made


def prefill_node(name: str = "p0") -> LiveNode:
    return LiveNode(name, 1, Mock(), PrefillModel(name, num_groups=2, block_size=1))


def calls_of(node: LiveNode) -> list[Any]:
    """Return what a node was told."""
    system: Any = node.system
    calls: list[Any] = system.mock_calls
    return calls


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("is_down", [True, False])
def test_a_copy_that_ends_well_writes_its_destinations(is_down: bool, ok: bool) -> None:
    node = prefill_node()
    content = {(5, 0): A, (5, 1): B}
    node.copies["c"] = CopyInFlight(Copy("id", is_down, [4], [5]), content)
    world = world_of(node)
    assert operations.copy(world, "c", ok) and not operations.copy(world, "c", ok)
    written, other = node.model.host.content, node.model.device.content
    if not is_down:
        written, other = other, written
    assert (written, other) == (content if ok else {}, {})
    assert node.num_faults == (not ok) and world.situations == {"copied": 1}
    assert calls_of(node) == [call.copied("id", [ok])]


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("kind", ["lookup", "store", "fetch"])
def test_an_operation_on_storage_has_all_groups_of_layers(kind: Any, ok: bool) -> None:
    node = prefill_node()
    read = {(5, 0): A, (5, 1): B, (6, 0): B, (6, 1): C}
    blocks = [] if kind == "lookup" else [5, 6]
    operation = StorageOperation("id", kind, blocks, ["one", "two"])
    node.copies["c"] = CopyInFlight(operation, read)
    stored = {"two": [C, A]}
    world = world_of(node, storage=dict(stored))
    assert operations.copy(world, "c", ok)
    if kind == "store" and ok:
        assert world.storage == {"one": [A, B], "two": [B, C]}
    else:
        assert world.storage == stored
    fetched = {(6, 0): C, (6, 1): A} if kind == "fetch" and ok else {}
    assert node.model.host.content == fetched and not node.model.device.content
    found = [ok and kind == "store", ok]
    assert calls_of(node) == [call.copied("id", found)]
    assert world.situations[f"{kind} in storage"] == ok and node.num_faults == (not ok)


def test_what_storage_loses_is_a_fault() -> None:
    world = world_of(storage={"one": [A, B], "two": [B, C]})
    assert operations.spoil(world, "one") and not operations.spoil(world, "one")
    assert world.storage == {"two": [B, C]} and world.num_lost == 4


def transfer(name: str = "t", node: str = "d0", peer: str = "p0", arrived: int = 0) -> Transfer:
    """A pull in two pieces, of which so many have arrived."""
    part = Part("r1.1.1", 0, f"key of {name}")
    return Transfer(name, node, peer, part, [3], 0, 0, 2, arrived=set(range(arrived)))


def decode_node(name: str = "d0") -> LiveNode:
    return LiveNode(name, 1, Mock(), Mock(spec=DecodeModel))


@pytest.mark.parametrize("arrived", [0, 1, 2])
@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("ok", [True, False])
def test_a_pull_ends_once_and_may_write_until_its_fence(
    ok: bool, fenced: bool, arrived: int
) -> None:
    node, pull = decode_node(), transfer(arrived=arrived)
    world = world_of(node, transfers=[transfer("other"), pull])
    model: Any = node.model
    applies = arrived == 2 or not ok
    assert operations.pull_end(world, "t", ok, fenced) == applies
    key, part = pull.part.key, pull.part
    assert (pull.ended, pull.may_fence) == (applies, applies)
    assert (pull in world.transfers) == (not applies or not (ok or fenced))
    if not applies:
        assert not calls_of(node) and not model.mock_calls and not world.situations
        return
    is_torn = arrived == 1
    assert world.situations["piece failed"] == is_torn
    if ok:
        assert calls_of(node) == [call.pulled(part)]
        assert model.mock_calls == [call.pulled(key)]
        return
    assert calls_of(node) == [call.pull_failed(part, fenced)]
    assert model.mock_calls == [call.fenced(key)] * fenced
    assert world.situations["piece never came"] == (is_torn and fenced)
    assert not operations.pull_end(world, "t", ok, fenced) and not operations.hang(world, "t")
    assert operations.pull_fence(world, "t") == (not fenced)
    assert pull not in world.transfers and model.mock_calls == [call.fenced(key)]
    if not fenced:
        assert calls_of(node)[1:] == [call.pull_fenced(part)]


def test_a_pull_that_hangs_ends_with_its_fence_after_it_is_cancelled() -> None:
    node, pull = decode_node(), transfer(arrived=2)
    world = world_of(node, transfers=[pull])
    assert operations.hang(world, "t") and not operations.hang(world, "t")
    assert not operations.pull_end(world, "t", True, True)
    assert not operations.pull_end(world, "t", False, True)
    assert not operations.pull_fence(world, "t")
    pull.may_fence = True
    assert operations.pull_fence(world, "t") and not world.transfers
    assert calls_of(node) == [call.pull_fenced(pull.part)]


def test_a_prefill_node_that_crashes_may_still_serve_what_it_had() -> None:
    """Only its own parts: those of others are read as they are when they are read."""
    nodes = [prefill_node("p0"), prefill_node("p1"), decode_node("d0")]
    pulls = [transfer("t0"), transfer("t1", peer="p1"), transfer("t2")]
    for node, pull in zip(nodes[:2], pulls[:2], strict=True):
        assert isinstance(node.model, PrefillModel)
        node.model.device.put([7], 0, [B])
        node.model.offered(pull.part.key, "r1.1.1", [7], 0)
    world = world_of(*nodes, transfers=[*pulls])
    assert operations.crash(world, "p0") and not operations.crash(world, "p0")
    assert [each.crashed_source for each in pulls] == [[B], None, None]
    assert world.nodes["p0"] is None and world.transfers == pulls
    assert operations._source(world, pulls[0]) == [B] == operations._source(world, pulls[1])
    assert operations._source(world, pulls[2]) is None


def test_no_pull_writes_to_a_decode_node_that_crashes() -> None:
    pulls = [transfer("t0"), transfer("t1", node="d1")]
    world = world_of(prefill_node(), decode_node("d0"), decode_node("d1"), transfers=[*pulls])
    assert operations.crash(world, "d0")
    assert world.transfers == pulls[1:] and world.nodes["d0"] is None
    assert all(each.crashed_source is None for each in pulls)


@pytest.mark.parametrize("piece", [0, 1, 2, 3])
def test_a_pull_writes_all_of_it_or_one_of_its_pieces(piece: int) -> None:
    source, target, pull = prefill_node(), decode_node(), transfer()
    assert isinstance(source.model, PrefillModel)
    source.model.device.put([7], 0, [B])
    source.model.offered(pull.part.key, "r1.1.1", [7], 0)
    device = Mock(block_size=1)
    target.model.device = device
    pull.may_fence = True
    world = world_of(source, target, transfers=[pull])
    if piece == 3:
        assert not operations.pull_write(world, "t", piece) and not device.mock_calls
        return
    for _ in range(2):
        assert operations.pull_write(world, "t", piece)
    if piece:
        assert device.mock_calls == [call.put_piece([3], 0, [B], piece - 1, 2)] * 2
    else:
        assert device.mock_calls == [call.put([3], 0, [B])] * 2
    assert pull.arrived == ({piece - 1} if piece else {0, 1})
    late = {"late write": 2, "late piece": 2 * bool(piece), "repeated piece": bool(piece)}
    assert {name: world.situations[name] for name in late} == late
    world.is_severed = lambda one, other: (one, other) == ("d0", "p0")
    assert not operations.pull_write(world, "t", piece)
    source.model.fenced("r1.1.1")
    world.is_severed = lambda one, other: False
    assert not operations.pull_write(world, "t", piece), "it is served no more"


@pytest.mark.parametrize("connects_at", [None, 5, 6, 7])
def test_a_link_is_severed_until_its_time_has_come(connects_at: int | None) -> None:
    world = world_of(severed={"p0>d0": connects_at}, now=4, gateway=Mock())
    assert operations.tick(world, 2)
    assert world.now == 6 and world.in_tick
    assert (world.severed == {}) == (connects_at in (5, 6))
    world.gateway.tick.assert_called_once_with(6)


def test_a_link_that_is_mended_connects_at_once_or_some_time_later() -> None:
    world = world_of(severed={"p0>d0": None, "d0>p0": None}, now=4)
    assert operations.mend(world, "p0>d0", 3) and operations.mend(world, "d0>p0", 0)
    assert world.severed == {"p0>d0": 7} and not operations.mend(world, "d0>p0", 0)
