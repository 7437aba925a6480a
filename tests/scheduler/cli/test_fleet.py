"""`radixkv serve --ray` and `radixkv fleet`: options, errors, and the registry, without Ray."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.cli.fleet import library
from radixkv.scheduler.cli.fleet.registry import Deployment, FleetRegistry
from radixkv.scheduler.cli.fleet.roster import Roster
from radixkv.scheduler.cli.main import build_parser
from radixkv.scheduler.cli.options.fleet import FleetSize, expand_ray

COUNTS = st.dictionaries(st.sampled_from(FleetSize._fields), st.integers(1, 9999), min_size=1)
DEPLOYMENT = Deployment("127.0.0.1:5557", "sesame", "redis://:pass@host")
SIZE = FleetSize(2, 4, 1)
LATE_S = 25.0


@given(COUNTS)
def test_a_size_names_each_count_once_in_any_order(counts: dict[str, int]) -> None:
    text = ",".join(f"{name}={number}" for name, number in counts.items())
    assert FleetSize.parse(text) == FleetSize(**counts)


@pytest.mark.parametrize(
    "text",
    ["", "2", "prefill", "prefill=", "prefill=0", "prefill=-1", "prefill=1.0", "prefill=1,",
     "prefill=1,prefill=1", "nodes=1", "prefill=10000", "prefill=²", "prefill = 1"],
)  # fmt: skip
def test_other_sizes_are_rejected(text: str) -> None:
    message = f"expected counts like prefill=2,decode=4,tp=2, got {text!r}"
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{re.escape(message)}$"):
        FleetSize.parse(text)


@pytest.mark.parametrize(("text", "tp"), [("prefill=2,decode=3,tp=4", 4), ("prefill=2", None)])
def test_ray_stands_for_options_of_nodes(text: str, tp: int | None) -> None:
    arguments = build_parser().parse_args(["serve", "m", "--device-blocks=9", "--ray", text])
    expand_ray(arguments)
    size = FleetSize.parse(text)
    assert (arguments.disaggregate, arguments.tp) == (True, tp)
    assert (arguments.prefill, arguments.decode) == size[:2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray-namespace", "n"], "--ray-namespace needs --ray"),
        (["--ray", "tp=2"], "--ray needs --device-blocks"),
        (
            ["--ray", "tp=2", "--disaggregate"],
            "--disaggregate cannot be combined with --ray",
        ),
        (
            ["--ray", "tp=2", "--tp", 2],
            "--tp cannot be combined with --ray: give it with --ray, like prefill=2,decode=4,tp=2",
        ),
        (
            ["--ray", "tp=2", "--kv-events", "tcp://127.0.0.1:0"],
            "--kv-events cannot be combined with --ray",
        ),
        (
            ["--ray", "x"],
            "argument --ray: expected counts like prefill=2,decode=4,tp=2, got 'x' (see `radixkv "
            "serve --help`)",
        ),
    ],
)
def test_options_that_exclude_or_need_each_other(
    radixkv: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    options: list[object],
    message: str,
) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: name)
    outcome = radixkv("serve", "m", "--port=0", *options)
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {message}\n")


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["serve", "m", "--port=0", "--device-blocks=9", "--ray", "tp=1"], "serve --ray"),
        (["fleet", "scale", "--decode=2"], "fleet"),
    ],
)
def test_without_ray_the_error_names_the_extra(
    radixkv: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: list[str], what: str
) -> None:
    monkeypatch.setattr(library, "find_spec", {}.get)
    outcome = radixkv(*command)
    message = f"{what} needs the library 'ray': pip install 'radixkv[ray]'"
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {message}\n")


def test_a_scale_needs_a_number(radixkv: Callable[..., Any]) -> None:
    outcome = radixkv("fleet", "scale")
    message = "fleet scale needs --prefill or --decode"
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {message}\n")


def test_nodes_wait_for_the_server_and_the_server_for_another_size() -> None:
    async def run() -> None:
        registry = FleetRegistry()
        joins = [asyncio.create_task(registry.join()) for _ in range(2)]
        scale = asyncio.create_task(registry.scale(decode=4))  # as many as there will be
        await asyncio.sleep(0)
        assert not any(task.done() for task in (*joins, scale))
        lead = asyncio.create_task(registry.lead(DEPLOYMENT, SIZE))
        assert await asyncio.gather(*joins) == [DEPLOYMENT, DEPLOYMENT]
        assert await scale == SIZE
        assert not lead.done()
        assert await registry.scale(prefill=1) == FleetSize(1, 4, 1)
        assert await lead == FleetSize(1, 4, 1)
        elsewhere = Deployment("127.0.0.1:5558", "sesame", None)
        lead = asyncio.create_task(registry.lead(elsewhere, FleetSize(1, 4, 1)))
        await asyncio.sleep(0)
        assert await registry.join() == elsewhere
        with pytest.raises(ValueError, match=r"^each role needs 1 node or more, got FleetSize\("):
            await registry.scale(decode=0)
        assert not lead.done(), "nobody wants a size that was refused"
        assert await registry.scale(decode=5) == await lead == FleetSize(1, 5, 1)
        with pytest.raises(ValueError, match=r"^each role"):
            await registry.scale(prefill=0)
        assert await registry.scale(decode=2) == FleetSize(1, 2, 1)

    asyncio.run(asyncio.wait_for(run(), LATE_S))


def test_a_size_that_a_user_wants_between_two_calls_of_the_server_is_not_lost() -> None:
    async def run() -> None:
        registry = FleetRegistry()
        lead = asyncio.create_task(registry.lead(DEPLOYMENT, SIZE))
        assert await registry.scale(decode=5) == await lead
        wanted = await registry.scale(prefill=3)
        lead = asyncio.create_task(registry.lead(DEPLOYMENT, FleetSize(2, 5, 1)))
        await asyncio.sleep(0)
        assert lead.done() and lead.result() == wanted == FleetSize(3, 5, 1)

    asyncio.run(asyncio.wait_for(run(), LATE_S))


def test_what_a_node_needs_to_join_is_not_printed() -> None:
    assert repr(DEPLOYMENT) == "Deployment(gateway='127.0.0.1:5557')"


def started(roster: Roster) -> list[str]:
    return [name for name, _ in roster.take_missing()]


def test_a_node_that_leaves_ends_when_it_has_no_attempts_and_its_name_is_not_used_again() -> None:
    roster, attempts = Roster(FleetSize(1, 2)), {"decode-1": 2}
    names = [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]
    assert roster.take_missing() == names
    assert (roster.take_missing(), roster.take_surplus()) == ([], [])
    roster.size = FleetSize(2, 1)
    assert started(roster) == ["prefill-1"]
    assert roster.take_surplus() == ["decode-1"]
    assert roster.take_surplus() == []
    assert roster.idle(lambda name: attempts.get(name, 0)) == []
    roster.size = FleetSize(2, 2)
    assert started(roster) == ["decode-2"], "decode-1 still leaves"
    attempts["decode-1"] = 0
    assert roster.idle(lambda name: attempts.get(name, 0)) == ["decode-1"]
    roster.remove("decode-1")
    assert roster.idle(lambda _: 0) == []
    roster.let_go("prefill-0")
    assert roster.is_leaving("prefill-0") and not roster.is_leaving("prefill-1")
    assert started(roster) == ["prefill-2"]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=10), st.randoms())
def test_a_fleet_has_the_size_that_was_asked_for_last(
    sizes: list[tuple[int, int]], random: Random
) -> None:
    roster, serving, seen = Roster(FleetSize()), set[str](), set[str]()
    for prefill, decode in sizes:
        roster.size = FleetSize(prefill, decode)
        new = started(roster)
        assert seen.isdisjoint(new)
        seen.update(new)
        serving |= set(new)
        serving -= set(roster.take_surplus())
        roles = [name.partition("-")[0] for name in serving]
        assert (roles.count("prefill"), roles.count("decode")) == (prefill, decode)
        idle = roster.idle(lambda _: random.getrandbits(1))
        assert serving.isdisjoint(idle)
        for name in idle:
            roster.remove(name)
