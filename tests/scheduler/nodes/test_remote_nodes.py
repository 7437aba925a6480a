"""RemoteNodes when messages are lost, refused or dropped."""

from __future__ import annotations

from contextlib import closing
from itertools import count

import pytest

from radixkv.scheduler.errors import NodesMissingError
from radixkv.scheduler.gateway.network_gateway import NetworkGateway, SendToNode
from radixkv.scheduler.handoff import Hits
from radixkv.scheduler.handoff.gateway_messages import GATEWAY, Finished, NodeStatus, RunPrefill
from radixkv.scheduler.nodes.channel import DroppedFrame, RefusedConnection
from radixkv.scheduler.nodes.channel.zmq_channel import ZmqChannel
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.request import Request

from ...ports import reserved_port
from .fake_channel import SILENCE_S, Deployment

LATE_S = 60.0  # nothing ends by it
NUM_REQUESTS = 1100  # more than the queue of 1000 holds


def test_messages_dropped_by_a_full_queue_are_repeated() -> None:
    ticks = count()
    with (
        reserved_port() as port,
        closing(ZmqChannel(GATEWAY, epoch=1)) as gateway,
        closing(ZmqChannel("p", epoch=1)) as p,
        closing(ZmqChannel("d", epoch=1)) as d,
    ):
        elsewhere = f"127.0.0.1:{port}"  # nobody listens there yet
        nodes = RemoteNodes(gateway, silence_s=1e9, request_s=1e9, clock=lambda: next(ticks))
        for node, status in (
            (p, NodeStatus("prefill", elsewhere, "jax", 4, 64, "m")),
            (d, NodeStatus("decode", d.address, "jax", 4, 64, "m")),
        ):
            node.connect(GATEWAY, gateway.address)
            node.send(GATEWAY, status)
        while nodes.count("prefill") + nodes.count("decode") < 2:
            nodes.step()
        for number in range(NUM_REQUESTS):
            nodes.add_request(Request(str(number), [1, 2, 3], 1))
        ended = nodes.step()
        assert gateway.stats().unsent > 0
        with closing(ZmqChannel("p", epoch=1, bind=elsewhere)) as inbox:
            while nodes.has_work:
                for packet in inbox.receive():
                    if isinstance(packet.message, RunPrefill):
                        d.send(GATEWAY, Finished(packet.message.key, (7,), Hits(0, 0, 0), 0))
                ended += nodes.step()
    assert nodes.failures == {}
    assert sorted(int(request.request_id) for request in ended) == list(range(NUM_REQUESTS))


def test_a_request_that_cannot_be_encoded_fails_alone() -> None:
    ticks = count()
    with (
        closing(ZmqChannel(GATEWAY, epoch=1)) as gateway,
        closing(ZmqChannel("p", epoch=1)) as p,
        closing(ZmqChannel("d", epoch=1)) as d,
    ):
        nodes = RemoteNodes(gateway, silence_s=1e9, request_s=1e9, clock=lambda: next(ticks))
        for role, node in (("prefill", p), ("decode", d)):
            node.connect(GATEWAY, gateway.address)
            node.send(GATEWAY, NodeStatus(role, node.address, "jax", 4, 64, "m"))  # type: ignore[arg-type]
        while nodes.count("prefill") + nodes.count("decode") < 2:
            nodes.step()
        nodes.add_request(Request("x" * 300, [1], 1))
        nodes.add_request(Request("tenant", [1], 1, namespace=bytes(5000)))
        nodes.add_request(Request("good", [1], 1))
        ended = {request.request_id: request for request in nodes.step()}
        assert set(ended) == {"x" * 300, "tenant"}
        assert nodes.failures == {
            "x" * 300: "RunPrefill: Expected `str` of length <= 256 - at `$.message.key[0]`",
            "tenant": "RunPrefill: Expected `bytes` of length <= 4096 - at `$.message.namespace`",
        }
        assert nodes.num_open == 1
        assert p.wait(LATE_S)
        assert any(isinstance(packet.message, RunPrefill) for packet in p.receive())


def test_a_node_that_was_drained_ends_unnoticed_and_its_name_is_not_used_again() -> None:
    def join(peer: str, epoch: int, now: float) -> None:
        role = "prefill" if peer == "p0" else "decode"
        status = NodeStatus(role, "127.0.0.1:9", "jax", 4, 64, "m")  # type: ignore[arg-type]
        gateway.receive(peer, epoch, status, now)

    gateway = NetworkGateway(silence_s=5.0)
    for peer in ("p0", "d0", "d1"):
        join(peer, 1, 0.0)
    gateway.add_request(Request("a", [1, 2], 1), 0.0)
    gateway.tick(0.0)
    [run] = [each.message for each in gateway.take_actions() if isinstance(each, SendToNode)]
    assert isinstance(run, RunPrefill)
    busy = run.decode_node
    gateway.drain(busy)
    assert [gateway.num_attempts(peer) for peer in ("p0", busy, "d9")] == [1, 1, 0]
    gateway.receive(busy, 1, Finished(run.key, (7,), Hits(0, 0, 0), 0), 0.0)
    assert [request.output_tokens for request in gateway.take_ended()] == [[7]]
    assert gateway.num_attempts(busy) == 0
    join(busy, 2, 1.0)
    assert gateway.nodes[busy].refusal == "it was drained, and its name is not used again"
    assert (gateway.count("decode"), gateway.num_attempts(busy)) == (1, 0)
    other = {"d0": "d1", "d1": "d0"}[busy]
    gateway.tick(6.0)
    assert set(gateway.gone) == {"p0", other}
    gateway.drain(other)
    assert set(gateway.gone) == {"p0"}
    join(other, 1, 7.0)
    assert gateway.count("decode") == 0


def test_more_blocks_than_the_gateway_follows_are_refused_before_anything_is_allocated() -> None:
    gateway = NetworkGateway()
    for peer, num_blocks in (("p0", 2**31 - 1), ("p1", 1000), ("p2", 2**26)):
        gateway.receive(
            peer, 1, NodeStatus("prefill", "127.0.0.1:9", "jax", 4, num_blocks, "m"), 0.0
        )
    assert {peer: node.refusal for peer, node in gateway.nodes.items()} == {
        "p0": "it has 2147483647 blocks, others have 0, and the gateway follows 67108864 in all",
        "p1": "",
        "p2": "it has 67108864 blocks, others have 1000, and the gateway follows 67108864 in all",
    }


def test_nodes_have_the_model_of_the_gateway_or_one_model() -> None:
    models = {"p0": "llama " + 64 * "1", "p1": "qwen3 " + 64 * "2", "p2": "llama " + 64 * "1"}
    for model, refused in [
        (None, {"p1": "its model is qwen3 222222222222, but that of p0 is llama 111111111111"}),
        (
            "qwen3 " + 64 * "2",
            dict.fromkeys(["p0", "p2"], "its model is llama 111111111111, not qwen3 222222222222"),
        ),
    ]:
        gateway = NetworkGateway(model=model)
        for peer, theirs in models.items():
            gateway.receive(peer, 1, NodeStatus("prefill", "[::1]:9", "jax", 4, 64, theirs), 0.0)
        assert {peer: node.refusal for peer, node in gateway.nodes.items()} == {
            peer: refused.get(peer, "") for peer in models
        }


def test_nodes_have_kv_of_one_dtype() -> None:
    """A gateway that knows the model accepts the dtype of the first node."""
    models = {"p0": "float32", "d0": "bfloat16", "p1": "float32"}
    for model in (None, "llama " + 64 * "1"):
        gateway = NetworkGateway(model=model)
        for peer, dtype in models.items():
            theirs = f"llama {64 * '1'} {dtype}"
            gateway.receive(peer, 1, NodeStatus("prefill", "[::1]:9", "jax", 4, 64, theirs), 0.0)
        assert {peer: node.refusal for peer, node in gateway.nodes.items()} == {
            "p0": "",
            "d0": "its model is llama 111111111111 bfloat16, but that of p0 is llama 111111111111 "
            "float32",
            "p1": "",
        }


def test_answers_to_an_earlier_gateway_are_ignored() -> None:
    keys = []
    with closing(ZmqChannel("p", epoch=1)) as p, closing(ZmqChannel("d", epoch=1)) as d:
        for epoch in (1, 2):
            with closing(ZmqChannel(GATEWAY, epoch=epoch)) as gateway:
                nodes = RemoteNodes(gateway, silence_s=LATE_S)
                for role, node in (("prefill", p), ("decode", d)):
                    node.connect(GATEWAY, gateway.address)
                    node.send(GATEWAY, NodeStatus(role, node.address, "jax", 4, 64, "m"))  # type: ignore[arg-type]
                while nodes.count("prefill") + nodes.count("decode") < 2:
                    nodes.step()
                request = Request("same", [1, 2, 3], 1)
                nodes.add_request(request)
                nodes.step()
                assert p.wait(LATE_S)
                [run] = [packet.message for packet in p.receive()]
                assert isinstance(run, RunPrefill)
                keys.append(run.key)
                if epoch == 2:
                    for key, token in zip(keys, (1, 2), strict=True):
                        d.send(GATEWAY, Finished(key, (token,), Hits(0, 0, 0), 0))
                    nodes.run()
    assert request.output_tokens == [2]


def test_nodes_that_went_for_good_are_named() -> None:
    silent: set[str] = set()
    world = Deployment(lambda sender, *_: sender in silent)
    world.turn(2)
    world.nodes.check(0.0)
    silent.add("prefill-0")
    with pytest.raises(NodesMissingError) as error:
        while True:
            world.turn()
            world.nodes.check(9.0)
    assert str(error.value) == (
        "prefill-0 has not been heard of for 9 s, and no other prefill node serves"
    )
    assert list(world.nodes.gone) == ["prefill-0"]
    world.nodes.check(60.0)
    silent.clear()
    world.turn(8)
    world.nodes.check(0.0)
    assert world.nodes.gone == {}
    silent |= {"prefill-0", "decode-0"}
    world.turn(30)
    with pytest.raises(NodesMissingError, match=r"^prefill-0 has not been heard of for 5 s, and "):
        world.nodes.check(0.0)  # no sooner than after the silence that a node may have


def test_the_error_for_missing_nodes_names_dropped_messages() -> None:
    silent: set[str] = set()
    world = Deployment(lambda sender, *_: sender in silent)
    world.turn(2)
    assert (world.nodes.drop_summary, world.nodes.has_refused_secrets) == ("", False)
    for refused, strangers in (
        (RefusedConnection.TOO_MANY, False),
        (RefusedConnection.BROKEN, False),
        (RefusedConnection.NO_SECRET, True),
        (RefusedConnection.UNWANTED_SECRET, True),
        (RefusedConnection.OTHER_SECRET, True),
    ):
        world.ends[GATEWAY].done.refused[refused] += 1
        assert world.nodes.has_refused_secrets is strangers
        if refused is not RefusedConnection.BROKEN:
            del world.ends[GATEWAY].done.refused[refused]
    world.ends[GATEWAY].done.refused[RefusedConnection.OTHER_SECRET] += 1
    world.ends[GATEWAY].done.refused[RefusedConnection.OTHER_SECRET] += 1
    world.ends[GATEWAY].done.dropped[DroppedFrame.NOT_A_FRAME] += 3
    silent.add("prefill-0")
    world.turn(60)
    with pytest.raises(NodesMissingError) as error:
        world.nodes.check(9.0)
    assert str(error.value) == (
        "prefill-0 has not been heard of for 9 s, and no other prefill node serves; "
        "dropped messages: 3 not a frame; refused connections: 2 with another secret than that of "
        "this node, 1 that closed during the handshake"
    )


@pytest.mark.parametrize("is_waiting", [False, True])
def test_nodes_whose_messages_wait_are_not_silent(
    monkeypatch: pytest.MonkeyPatch, *, is_waiting: bool
) -> None:
    """However long the gateway's process was stopped, also while it waited for them."""
    world = Deployment()
    world.turn(2)

    def stop(timeout_s: float = 0.0) -> bool:
        world.now += 2 * SILENCE_S
        for loop in world.loops.values():
            loop.run_once()
        return True

    if is_waiting:
        with monkeypatch.context() as patch:
            patch.setattr(world.ends[GATEWAY], "wait", stop)
            world.nodes.step()
    else:
        stop()
    world.nodes.step()
    assert (world.nodes.num_nodes_lost, set(world.nodes.nodes)) == (0, {"prefill-0", "decode-0"})
