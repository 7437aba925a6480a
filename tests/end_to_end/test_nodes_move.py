"""A preempted request moves from one decode process to another, through a redis-server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from radixkv.scheduler.engine import Engine
from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.models import Model
from radixkv.scheduler.nodes.channel.zmq_channel import ZmqChannel
from radixkv.scheduler.nodes.processes import NodeProcesses
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.request import GREEDY, Request, SamplingParams

from ..kvcache.storage.redis_server import running

SIZES: Final[dict[str, Any]] = {
    "block_size": 16,
    "token_budget": 16,
    "max_running": 4,
    "max_model_len": 224,
}
NUM_BLOCKS: Final = 17
"""One long request needs 14, and the short one 3."""

PENALIZED: Final = SamplingParams(
    temperature=0.9, seed=7, presence_penalty=0.5, frequency_penalty=0.2
)
"""What a moved request gets wrong that forgets which tokens of its prompt are output."""

SILENCE_S: Final = 10.0
MAX_ROUNDS: Final = 5


def make_requests(sampling: SamplingParams, round_: int) -> list[Request]:
    """Two long requests, which go to one decode node, and between them one for the other node.

    The gateway assigns all three at once, by the blocks of their prompts, 2, 3 and 2, of which no
    node has any.
    """
    sizes = [("long", 20, 204), ("short", 40, 2), ("other long", 20, 204)]
    return [
        Request(
            f"{name} {round_}",
            [(11 * i + 300 * place + 50 * round_) % 1000 + 2 for i in range(num_prompt)],
            num_new,
            sampling=sampling,
        )
        for place, (name, num_prompt, num_new) in enumerate(sizes)
    ]


@contextmanager
def cluster(model_dir: Path, storage: str) -> Iterator[tuple[RemoteNodes, NodeProcesses]]:
    """A prefill node and two equal decode nodes over storage, and their processes."""
    with NodeProcesses() as processes:
        channel = ZmqChannel(GATEWAY, epoch=1, secret=processes.secret)
        with closing(channel):
            options: list[object] = [model_dir, "--device-blocks", NUM_BLOCKS]
            options += [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
            options += ["--gateway", channel.address, "--silence-s", SILENCE_S]
            options += ["--host-blocks", 2 * NUM_BLOCKS, "--storage", storage]
            processes.start("prefill-0", "prefill-node", options)
            options += ["--preempt", "storage", "--reserve-tokens", 0]
            for name in ("decode-0", "decode-1"):
                processes.start(name, "decode-node", options)
            nodes = RemoteNodes(channel, silence_s=SILENCE_S, max_attempts=100, stream=True)
            while len(nodes.nodes) < 3:
                nodes.step()
                processes.check()
            yield nodes, processes


def complete(
    nodes: RemoteNodes, processes: NodeProcesses, requests: list[Request]
) -> list[list[int]]:
    """Return the tokens that the client of each request was told, which it never takes back."""
    told: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        nodes.add_request(request)
    while nodes.has_work:
        ended = nodes.step()
        processes.check()
        for request in (*nodes.advanced, *ended):
            seen = told[request.request_id]
            assert request.output_tokens[: len(seen)] == seen
            seen += request.output_tokens[len(seen) :]
    assert nodes.failures == {}
    return list(told.values())


@pytest.mark.nightly
@pytest.mark.parametrize("sampling", [GREEDY, PENALIZED], ids=["greedy", "penalized"])
def test_a_preempted_request_moves_to_another_process(
    model: Callable[[str], Model], model_dir: Callable[[str], Path], sampling: SamplingParams
) -> None:
    """Sizes alone give the order of events, with one exception.

    The long request that is not preempted must still run, for 80 steps, when the last blocks of
    the other one are in storage. Should the machine be so slow, there is another round.
    """
    engine = Engine(model("qwen3"), num_blocks=NUM_BLOCKS, **SIZES)
    requests: list[Request] = []
    with (
        running() as server,
        cluster(model_dir("qwen3"), f"redis://127.0.0.1:{server.port}") as (nodes, processes),
    ):
        for round_ in range(MAX_ROUNDS):
            expected = make_requests(sampling, round_)
            for request in expected:
                engine.add_request(request)
                engine.run()
            requests += (latest := make_requests(sampling, round_))
            assert complete(nodes, processes, latest) == [
                list(each.output_tokens) for each in expected
            ]
            if nodes.num_moved:
                break
        stats = processes.stop()
    assert nodes.num_moved > 0
    decode = [stats[name]["engine"]["scheduler"] for name in ("decode-0", "decode-1")]
    total = {name: sum(each[name] for each in decode) for name in decode[0]}
    assert total["preemptions"] == sum(each.num_preemptions for each in requests)
    assert total["resumed"] == total["preemptions"] - nodes.num_moved
    assert total["admitted"] == len(requests) + nodes.num_moved
    # Nearly all of what it moves with was in storage.
    assert total["storage_hit_tokens"] >= 5 * SIZES["block_size"]
    for node in stats.values():
        assert node["storage"]["errors"] == node["transport"]["faults"] == {}
        if sampling is GREEDY:  # what only penalties need is compiled when one comes
            assert node["engine"]["compilations_after_warm_up"] == 0
        cache = node["engine"]["cache"]
        assert cache["live_leases"] == cache["private_blocks"] == 0
