"""Node processes: over each transport, started by hand, and when one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.errors import NodeProcessError, NodesMissingError
from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.nodes.channel.zmq_channel import ZmqChannel
from radixkv.scheduler.nodes.processes import NodeProcesses
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.request import Request, RequestStatus

from ..ports import reserved_port
from ..readable import readable
from .small import NODE_OPTIONS, NUM_BLOCKS, PREFIX, PROMPTS, SIZES, generate, make_requests

SILENCE_S = 1.0
WALL_CLOCK = Path(__file__).parent / "wall_clock"


@pytest.fixture
def wall_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each process that is started a wall clock of its own, which jumps by hours."""
    monkeypatch.setenv("PYTHONPATH", str(WALL_CLOCK))


def check_node(stats: dict[str, Any]) -> None:
    """Assert that nodes hold nothing and compiled nothing late."""
    assert stats["engine"]["compilations_after_warm_up"] == 0
    cache, transport = stats["engine"]["cache"], stats["transport"]
    assert cache["live_leases"] == cache["private_blocks"] == 0
    assert cache["free_blocks"] + cache["idle_blocks"] == cache["num_blocks"]
    assert transport["pulls"] == transport["received"] == transport["quarantined_bytes"] == 0


@pytest.mark.parametrize(
    "depth", [(), pytest.param(("--depth", 1), marks=pytest.mark.slow)], ids=["2", "1"]
)
@pytest.mark.usefixtures("wall_clocks")
def test_two_processes_give_the_tokens_of_one_engine(
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    small_outputs: list[list[int]],
    depth: tuple[object, ...],
) -> None:
    options = ("--disaggregate", "--device-blocks", NUM_BLOCKS, *depth)
    results = generate(model_dir("qwen3"), tmp_path, *options)
    assert results["outputs"] == small_outputs
    stats = results["stats"]
    assert list(stats) == ["prefill-0", "decode-0"]
    for node in stats.values():
        check_node(node)
        assert node["transport"]["faults"] == {}
    assert stats["decode-0"]["transport"]["bytes_received"] > 0
    # The prefix is computed once, though all asked at once.
    prefill = stats["prefill-0"]["engine"]["scheduler"]
    assert prefill["prefill_tokens"] + prefill["hit_tokens"] == sum(map(len, PROMPTS))
    assert prefill["hit_tokens"] == 20 + 19 + 20


@contextmanager
def cluster(
    model_dir: Path, *names: str
) -> Iterator[tuple[RemoteNodes, NodeProcesses, Callable[[str], None]]]:
    """Node processes and their gateway."""
    with NodeProcesses() as processes:
        channel = ZmqChannel(GATEWAY, epoch=1, secret=processes.secret)
        with closing(channel):
            options = [model_dir, *NODE_OPTIONS, "--silence-s", SILENCE_S]

            def start(name: str) -> None:
                command = f"{name.split('-')[0]}-node"
                processes.start(name, command, [*options, "--gateway", channel.address])

            for name in names:
                start(name)
            # As many attempts as it takes: a node that is slow is silent for a while, too.
            nodes = RemoteNodes(channel, silence_s=SILENCE_S, max_attempts=100)
            while set(nodes.nodes) != set(names):
                nodes.step()
                processes.check()
            yield nodes, processes, start


def submit(nodes: RemoteNodes) -> list[Request]:
    requests = make_requests()
    for request in requests:
        nodes.add_request(request)
    return requests


def run(nodes: RemoteNodes, disturb: Callable[[], object] = int) -> list[list[int]]:
    """Complete all prompts; call disturb when they have been sent to nodes."""
    requests = submit(nodes)
    nodes.step()
    disturb()
    nodes.run()
    assert nodes.failures == {}
    return [list(request.output_tokens) for request in requests]


@pytest.mark.slow
def test_another_node_takes_over_the_requests_of_a_lost_node(
    model_dir: Callable[[str], Path], small_outputs: list[list[int]]
) -> None:
    expected = small_outputs
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with cluster(model_dir("qwen3"), *names) as (nodes, processes, start):

        def send(victim: str, sign: signal.Signals) -> None:
            os.kill(processes.pid(victim), sign)

        for victim in ("prefill-1", "decode-1"):
            assert run(nodes, lambda: send(victim, signal.SIGSTOP)) == expected  # noqa: B023
            send(victim, signal.SIGCONT)
            while nodes.count("prefill") + nodes.count("decode") < 4:
                nodes.step()
            assert run(nodes) == expected
        while "decode-1" not in nodes.nodes:
            nodes.step()
        first = nodes.nodes["decode-1"]
        assert run(nodes, lambda: send("decode-1", signal.SIGKILL)) == expected
        while "decode-1" in nodes.nodes:
            nodes.step()
        start("decode-1")
        assert run(nodes, lambda: send("prefill-1", signal.SIGKILL)) == expected
        while "decode-1" not in nodes.nodes or "prefill-1" in nodes.nodes:
            nodes.step()
        assert nodes.nodes["decode-1"].epoch > first.epoch
        # Then the last of its kind goes, too, before it can answer what it is sent.
        send("prefill-0", signal.SIGKILL)
        requests = submit(nodes)
        nodes.step()
        with pytest.raises(NodesMissingError) as missing:
            while True:
                nodes.step()
                nodes.check(timeout_s=0.0)
        assert str(missing.value) == (
            "prefill-1 and prefill-0 have not been heard of for 1 s, and no other prefill node "
            "serves"
        )
        with pytest.raises(NodeProcessError) as ended:
            processes.check()
        assert re.fullmatch(
            r"prefill-0 was ended \(Killed\); last line of its stderr: radixkv: prefill-0 serves "
            r"at 127\.0\.0\.1:\d+",
            str(ended.value),
        )
        for request in requests:
            nodes.abort(request.request_id)
        assert not nodes.has_work
        assert all(request.status is RequestStatus.ABORTED for request in requests)
        stats = processes.stop()
        assert set(stats) == {"decode-0", "decode-1"}
        for node in stats.values():
            check_node(node)


@pytest.fixture
def gateway() -> Iterator[str]:
    """The address of a gateway that starts later."""
    with reserved_port() as port:
        yield f"127.0.0.1:{port}"


def test_nodes_that_were_started_by_hand_serve(
    model_dir: Callable[[str], Path], tmp_path: Path, gateway: str, small_outputs: list[list[int]]
) -> None:
    """Over NIXL, with a secret in a file, and with storage."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the test, long enough")
    secret.chmod(0o600)
    directory, command = model_dir("qwen3"), [sys.executable, "-m", "radixkv.scheduler.cli.main"]
    options = [directory, *NODE_OPTIONS, "--gateway", gateway, "--secret-file", secret]
    options += ["--transport", "nixl"]
    storage = ["--host-blocks", 32, "--storage", "env:KV_STORAGE"]
    with subprocess.Popen(
        list(map(str, [*command, "prefill-node", *options, *storage])),
        stdout=subprocess.PIPE,
        env={**os.environ, "KV_STORAGE": f"file://{tmp_path / 'blocks'}"},
    ) as prefill:
        with subprocess.Popen(
            list(map(str, [*command, "decode-node", *options])), stdout=subprocess.PIPE
        ) as decode:
            apart = ("--disaggregate", "--gateway", gateway, "--secret-file", secret)
            results = generate(directory, tmp_path, *apart)
            assert (results["outputs"], results["stats"]) == (small_outputs, {})
            decode.terminate()
            out, _ = decode.communicate()
            check_node(json.loads(out))
        prefill.send_signal(signal.SIGINT)
        out, _ = prefill.communicate()
        stats = json.loads(out)
        check_node(stats)
        assert stats["storage"]["blocks"]["stored"] == len(PREFIX) // SIZES["block_size"]


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["jax", "nixl"])
def test_unequal_nodes_give_the_tokens_of_one_engine(
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    gateway: str,
    small_outputs: list[list[int]],
    transport: str,
) -> None:
    """Two devices and blocks of 4 tokens on P, four devices and blocks of 6 on D."""
    command = [sys.executable, "-m", "radixkv.scheduler.cli.main"]
    options = [model_dir("qwen3"), *NODE_OPTIONS, "--gateway", gateway, "--transport", transport]
    flags = "--xla_force_host_platform_device_count=4"
    with ExitStack() as stack:
        nodes = []
        for role, own in (("prefill", ["--tp", 2]), ("decode", ["--tp", 4, "--block-size", 6])):
            node = subprocess.Popen(
                list(map(str, [*command, f"{role}-node", *options, *own])),
                stdout=subprocess.PIPE,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            )
            nodes.append(stack.enter_context(node))
            stack.callback(node.kill)
        results = generate(model_dir("qwen3"), tmp_path, "--disaggregate", "--gateway", gateway)
        assert results["outputs"] == small_outputs
        for node, num_devices in zip(nodes, (2, 4), strict=True):
            node.terminate()
            stats = json.loads(node.communicate()[0])
            check_node(stats)
            assert stats["engine"]["num_devices"] == num_devices
            assert stats["transport"]["faults"] == {}


def test_a_node_that_cannot_start_is_named(tmp_path: Path) -> None:
    with NodeProcesses() as processes:
        processes.start("prefill-0", "prefill-node", [tmp_path, *NODE_OPTIONS])
        os.waitid(os.P_PID, processes.pid("prefill-0"), os.WEXITED | os.WNOWAIT)
        with pytest.raises(
            NodeProcessError, match=r"^prefill-0 has ended with status 2: radixkv: .*--gateway"
        ):
            processes.check()


STARTER = """
import sys, time
from radixkv.scheduler.nodes.processes import NodeProcesses
with NodeProcesses() as processes:
    processes.start("prefill-0", "prefill-node", sys.argv[1:])
    print(processes.pid("prefill-0"), flush=True)
    while True:
        time.sleep(1)
"""


def test_nodes_end_with_the_process_that_started_them(model_dir: Callable[[str], Path]) -> None:
    options = [model_dir("qwen3"), "--gateway", "127.0.0.1:9", *NODE_OPTIONS]
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, *map(str, options)], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        node = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
    try:
        # It looks for its parent when it has compiled its programs.
        assert readable([node], 600), "the node goes on without its parent"
    finally:
        os.close(node)
