"""Nodes in one process: what their front keeps of attempts."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.scheduler.errors import RequestError
from radixkv.scheduler.gateway.gateway import Gateway, RunAttempt
from radixkv.scheduler.gateway.router import CacheSize
from radixkv.scheduler.handoff import (
    AttemptKey,
    DecodeFailed,
    Finished,
    Preempted,
    PrefillFailed,
    Started,
)
from radixkv.scheduler.nodes import Disaggregated, in_process
from radixkv.scheduler.request import Request, RequestStatus


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_request_that_was_preempted_on_a_replaced_node_is_forgotten(is_replaced: bool) -> None:
    gateway = Gateway(backoff_s=1.0)
    gateway.add_prefill("prefill-0", CacheSize(8, 4))
    gateway.add_decode("decode-0", CacheSize(8, 4))
    gateway.add_request(Request("a", [1, 2, 3], 4), 0.0)
    gateway.tick(0.0)
    [run] = gateway.take_actions()
    assert isinstance(run, RunAttempt)
    gateway.started(run.key)
    on_node = Request("a", [1, 2, 3], 4)
    on_node.append(7)
    on_node.status = RequestStatus.PREEMPTED
    front: Any = Disaggregated.__new__(Disaggregated)
    front.prefill, front.decode, front._gateway = {}, {}, gateway
    front._preempted = {run.key: on_node}
    if is_replaced:
        gateway.remove_node("decode-0")
        gateway.take_actions()
    front._offer_preempted()
    assert front._preempted == ({} if is_replaced else {run.key: on_node})
    on_node.status = RequestStatus.RUNNING
    front._offer_preempted()
    assert front._preempted == {}
    assert gateway.take_actions() == []


class Node:
    """A node that does what the test says, and notes what it is told."""

    def __init__(self, *, silence_s: float = 4.0, closes: bool = True) -> None:
        self.model_name = "m"
        self.manager = SimpleNamespace(num_blocks=8, block_size=4)
        self.timing = SimpleNamespace(silence_s=silence_s)
        self.scheduler: Any = SimpleNamespace(num_open=0, drain=self._drain, resume=self._resume)
        self.num_open_handoffs = 0
        self.is_drained = False
        self.refuses: Exception | None = None
        self.begun: list[AttemptKey] = []
        self.given_up: list[AttemptKey] = []
        self.polled: list[float] = []
        self.resets: list[object] = []
        self.closed: list[float] = []
        self.reports: list[Any] = []
        self._closes = closes

    def _drain(self, reason: str) -> None:
        self.is_drained = True

    def _resume(self) -> None:
        self.is_drained = False

    def check_request(self, request: Request) -> None:
        if self.refuses is not None:
            raise self.refuses

    def begin(self, request: Request, peer: str, attempt: int) -> None:
        self.begun.append(AttemptKey(request.request_id, attempt))
        if self.refuses is not None:
            raise self.refuses

    def give_up(self, key: AttemptKey, reason: str) -> None:
        self.given_up.append(key)

    def poll(self, now: float) -> bool:
        self.polled.append(now)
        return True

    def step(self) -> bool:
        return True

    def take_messages(self) -> list[Any]:
        return []

    def take_reports(self) -> list[Any]:
        reports, self.reports = self.reports, []
        return reports

    def check_reset(self, *_: object) -> None:
        """Whatever it is, it may be reset."""

    def reset_cache(self, keep: Collection[bytes], **weights: object) -> None:
        self.resets.append((keep, weights))

    def close(self, *, timeout_s: float) -> bool:
        self.closed.append(timeout_s)
        return self._closes


def front_of(prefill: Node, *decode: Node, **options: Any) -> Disaggregated:
    return Disaggregated([prefill], list(decode), **options)  # type: ignore[list-item,arg-type]


@pytest.mark.parametrize("stuck", [None, 0, 1, 2])
def test_every_node_is_closed_and_gets_the_time_that_there_is(stuck: int | None) -> None:
    """Also after one that did not end in time."""
    nodes = [Node(closes=number != stuck) for number in range(3)]
    assert front_of(*nodes).close(timeout_s=7.0) is (stuck is None)
    assert [node.closed for node in nodes] == [[7.0]] * 3


@pytest.mark.parametrize("end", ["finished", "aborted", "failed"])
@pytest.mark.parametrize("stream", [False, True])
def test_attempts_that_have_ended_are_not_followed(end: str, *, stream: bool) -> None:
    p, d = Node(), Node()
    front = front_of(p, d, stream=stream, clock=lambda: 0.0, max_attempts=1)
    client = Request("a", [1, 2, 3], 4)
    front.add_request(client)
    front.step()
    [key] = p.begun
    on_node = Request("a", [1, 2, 3], 4)
    on_node.append(7)
    d.reports = [Started(key, on_node, 0)]
    front.step()
    assert (client.output_tokens, front.advanced) == (([7], [client]) if stream else ([], []))
    assert set(front._decoding) == ({key} if stream else set())
    match end:
        case "finished":
            d.reports = [Finished(key, on_node)]
        case "aborted":
            assert front.abort("a")
        case "failed":
            d.reports = [DecodeFailed(key, "its model is gone")]
    front.step()
    assert not front._decoding and front.advanced == [] and not front.has_work


def test_all_nodes_give_up_a_request_that_is_aborted_before_their_next_step() -> None:
    nodes = [Node() for _ in range(3)]
    front = front_of(*nodes)
    front.add_request(Request("a", [1, 2, 3], 4))
    front.step()
    assert front.abort("a") and not front.abort("a")
    assert [node.given_up for node in nodes] == [nodes[0].begun] * 3


@pytest.mark.parametrize("refusing", range(3))
def test_a_request_is_added_only_if_all_nodes_take_it(refusing: int) -> None:
    nodes = [Node() for _ in range(3)]
    front = front_of(*nodes)
    nodes[refusing].refuses = RequestError("it is too long")
    with pytest.raises(RequestError, match=r"^it is too long$"):
        front.add_request(Request("a", [1, 2, 3], 4))
    assert not front.has_work and nodes[0].begun == []


def test_a_request_that_its_node_refuses_fails_at_once() -> None:
    """Such as one that was added before its node was replaced."""
    p = Node()
    front = front_of(p, Node(), clock=lambda: 0.0)
    front.add_request(Request("a", [1, 2, 3], 4))
    p.refuses = RequestError("it is too long")
    [ended] = front.step()
    assert (ended.request_id, front.failures, len(p.begun)) == ("a", {"a": "it is too long"}, 1)


@pytest.mark.parametrize("silences_s", [(4.0, 8.0), (8.0, 4.0)])
def test_time_of_nodes_runs_no_faster_than_their_turns(silences_s: tuple[float, float]) -> None:
    """Four turns make a silence of the least patient node, whatever a turn takes."""
    now = 100.0
    nodes = [Node(silence_s=each) for each in silences_s]
    front = front_of(*nodes, clock=lambda: now)
    for seconds in (0.25, 1.0, 50.0, 0.5, 1.5, 0.0):
        now += seconds
        front.step()
    for node in nodes:
        assert node.polled == [100.25, 101.25, 102.25, 102.75, 103.75, 103.75]


def test_a_reset_keeps_the_namespaces_of_nodes_and_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, kept = [Node() for _ in range(3)], list[object]()
    front, keep = front_of(*nodes), [b"tenant"]
    monkeypatch.setattr(front._gateway, "forget_cached", kept.append)
    params: Any = object()
    front.reset_cache(keep, params=params, weights_revision="second")
    weights = {"params": params, "weights_revision": "second"}
    assert [node.resets for node in nodes] == [[(keep, weights)]] * 3
    assert kept == [keep]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_only_during_a_reset_an_attempt_that_fails_does_not_count(
    monkeypatch: pytest.MonkeyPatch, *, is_interrupted: bool
) -> None:
    now = 0.0
    p, d = Node(), Node()
    front = front_of(p, d, max_attempts=1, clock=lambda: now)
    front.add_request(Request("a", [1, 2, 3], 4))
    front.step()
    p.reports = [PrefillFailed(p.begun[0], "it was drained")]
    p.num_open_handoffs = 1

    def end_handoff(at: float) -> bool:
        assert p.is_drained and d.is_drained
        p.num_open_handoffs = 0
        if is_interrupted:
            p.take_reports()
            raise KeyboardInterrupt
        return True

    with monkeypatch.context() as patch:
        patch.setattr(p, "poll", end_handoff)
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                front.reset_cache()
            assert not p.is_drained and not d.is_drained
            assert p.resets == d.resets == []
        else:
            front.reset_cache()
            assert front.failures == {} and front.has_work
    while not is_interrupted and len(p.begun) == 1:
        now += 1.0
        front.step()
    p.reports = [PrefillFailed(p.begun[-1], "it was lost")]
    front.step()
    assert front.failures == {"a": "it was lost"} and not front.has_work


def test_what_an_old_node_has_reported_still_counts_when_it_is_replaced() -> None:
    p, d = Node(), Node()
    front = front_of(p, d, clock=lambda: 0.0)
    client = Request("a", [1, 2, 3], 1)
    front.add_request(client)
    front.step()
    on_node = Request("a", [1, 2, 3], 1)
    on_node.append(7)
    on_node.num_preemptions = 2
    d.reports = [Started(p.begun[0], on_node, 0), Finished(p.begun[0], on_node)]
    new: Any = Node()
    front.replace("decode-0", new)
    assert list(front._nodes()) == [p, new]
    assert front.step() == [client] and len(p.begun) == 1
    assert (client.output_tokens, client.num_preemptions) == ([7], 2)


@pytest.mark.parametrize("room", [2, 1])
def test_a_preempted_request_moves_only_to_a_node_that_has_room(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    p, *decode = nodes = [Node() for _ in range(3)]
    monkeypatch.setattr(in_process, "free_blocks", lambda num_blocks, load: load)
    for node in nodes:
        monkeypatch.setattr(node, "load", lambda: room, raising=False)
    front = front_of(p, *decode, clock=lambda: 0.0)
    front.add_request(Request("a", [1, 2, 3], 4))
    front.step()
    on_node = Request("a", [1, 2, 3], 4)
    on_node.append(7)
    on_node.status = RequestStatus.PREEMPTED
    decode[0].reports = [Started(p.begun[0], on_node, 0), Preempted(p.begun[0], on_node)]
    front.step()
    assert front.num_moved == (room == 2)
    assert all(node.given_up == p.begun[: front.num_moved] for node in nodes)
