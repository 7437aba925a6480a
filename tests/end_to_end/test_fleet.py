"""`radixkv serve --ray` on a cluster of several raylets; needs ``ray[default]``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import pytest

from radixkv.scheduler.models import make_tiny_checkpoint

from ..tokenizers import add_tokenizer
from .small import NEW_TOKENS, NODE_OPTIONS, PROMPTS, generate

MAIN = [sys.executable, "-m", "radixkv.scheduler.cli.main"]
NUM_THREADS = 4
PATIENCE_S = 500
PASSWORD = "open-sesame-1001"


class Server:
    """A `radixkv serve --ray` in a process of its own, and what it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._new: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()
        self.url = self.wait_for(r"tiny is served at (\S+)")[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._new.put(line)
        self._new.put("")

    def wait_for(self, expression: str) -> re.Match[str]:
        """Wait for a line, after those that were waited for before."""
        while line := self._new.get(timeout=PATIENCE_S):
            self.lines.append(line)
            if found := re.search(expression, line):
                return found
        raise AssertionError("".join(self.lines))

    def complete(self, prompt: list[int]) -> list[int]:
        fields = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = Request(f"{self.url}/completions", json.dumps(fields).encode())
        with urlopen(request, timeout=PATIENCE_S) as response:
            [choice] = json.load(response)["choices"]
        tokens: list[int] = choice["token_ids"]
        return tokens


@contextmanager
def load(server: Server, expected: list[list[int]]) -> Iterator[None]:
    """Complete prompts all the time, and check the answers, until the block ends."""
    ended, numbers, begun = Event(), count(), [Event() for _ in range(NUM_THREADS)]

    def run(has_begun: Event) -> int:
        for done in count():
            place = next(numbers) % len(PROMPTS)
            assert server.complete(PROMPTS[place]) == expected[place]
            has_begun.set()
            if ended.is_set():
                return done + 1
        raise AssertionError("unreachable")

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        runs = [pool.submit(run, each) for each in begun]
        try:
            for each in begun:
                assert each.wait(PATIENCE_S)
            yield
        finally:
            ended.set()
        assert sum(each.result() for each in runs) >= NUM_THREADS


class Fleet(NamedTuple):
    """A server on a cluster of machines for one node each.

    Attributes:
        model: directory of the model.
        cluster, machines: Ray's cluster, and its machines but the first.
        server: the server.
        expected: the answers to `PROMPTS` of one engine with one device.
        environment: of its commands.
    """

    model: Path
    cluster: Any
    machines: list[Any]
    server: Server
    expected: list[list[int]]
    environment: dict[str, str]

    def node(self, name: str, ask: Callable[[Any], object]) -> Any:
        """Run a function in the process of a node."""
        import ray

        return ray.get(ray.get_actor(name).__ray_call__.remote(ask))

    def kill_machine_of(self, name: str) -> None:
        """Kill the raylet of the machine of a node, with all of its processes."""
        import ray

        host = self.node(name, lambda _: ray.get_runtime_context().get_node_id())
        [machine] = [each for each in self.machines if each.node_id == host]
        self.cluster.remove_node(machine, allow_graceful=False)

    def dashboard(self, page: str) -> str:
        """Return the text of a page of Ray's dashboard."""
        with urlopen(f"http://{self.cluster.head_node.webui_url}/{page}") as response:
            text: str = response.read().decode()
        return text

    def metrics(self) -> list[str]:
        """Return the lines of the server's metrics."""
        with urlopen(self.server.url.replace("/v1", "/metrics")) as response:
            lines: list[str] = response.read().decode().splitlines()
        return lines

    def count(self, name: str) -> int:
        """Return the value of a count."""
        [line] = [each for each in self.metrics() if each.startswith(f"radixkv:{name}_total{{")]
        return int(float(line.split()[-1]))

    def ups(self) -> dict[str, str]:
        """Return which nodes serve, by name."""
        return {
            re.findall('node="(.*?)"', line)[0]: line.split()[-1]
            for line in self.metrics()
            if line.startswith("radixkv:node_up")
        }


@contextmanager
def fleet(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silence_s: int | None = None
) -> Iterator[Fleet]:
    """Serve with a fleet; there are four machines for nodes of two devices."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    import ray
    from ray.cluster_utils import Cluster

    model = tmp_path / "model"
    model.mkdir()
    make_tiny_checkpoint(model)
    add_tokenizer(model)
    expected = generate(model, tmp_path, "--device-blocks", 64)["outputs"]
    head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    machines = [cluster.add_node(num_cpus=2, include_dashboard=False) for _ in range(4)]
    options = map(str, [*NODE_OPTIONS, "--ray", size])
    environment = {
        **os.environ,
        "RAY_ADDRESS": cluster.address,
        "STORAGE": f"file://{tmp_path / PASSWORD}",
    }
    storage = ["--host-blocks=8", "--storage=env:STORAGE", f"--timeout-s={PATIENCE_S}"]
    if silence_s is not None:
        storage += [f"--silence-s={silence_s}"]
    process = subprocess.Popen(
        [*MAIN, "serve", str(model), "--port=0", "--served-model-name=tiny", *options, *storage],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        server = Server(process)
        ray.init(address=cluster.address, namespace="radixkv", log_to_driver=False)
        yield Fleet(model, cluster, machines, server, expected, environment)
    finally:
        process.kill()
        process.wait()
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_a_fleet_survives_its_machines_and_scales_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A raylet and an actor are killed, and nodes are drained: every answer is right.

    Each node has two devices; the answers are those of one engine with one device. Ray's dashboard
    shows which nodes live and were started again, and no secret.
    """
    import ray
    from ray.util.state import list_actors

    with fleet("prefill=1,decode=2,tp=2", tmp_path, monkeypatch) as served:
        server, model, environment = served.server, served.model, served.environment
        another = subprocess.run(
            [*MAIN, "serve", str(model), "--port=0", "--device-blocks=9", "--ray=tp=1"],
            env=environment,
            capture_output=True,
            text=True,
        )
        message = "there is a fleet in this namespace of the Ray cluster already; name another with"
        assert (another.returncode, another.stdout) == (2, "")
        assert f"radixkv: {message} --ray-namespace: " in another.stderr
        with load(server, served.expected):
            served.kill_machine_of("decode-0")
            server.wait_for("decode-0 serves at")  # Ray has started it again
            ray.kill(ray.get_actor("decode-1"))  # for good: Ray does not start it again
            server.wait_for("decode-1 has failed, and another node replaces it: ActorDiedError")
            server.wait_for("decode-2 serves at")
            for number, message in ((1, "decode-2 has left the fleet"), (2, "decode-3 serves at")):
                scaled = subprocess.run(
                    [*MAIN, "fleet", "scale", "--decode", str(number)],
                    env=environment,
                    capture_output=True,
                    text=True,
                )
                said = f"the fleet shall have 1 prefill and {number} decode nodes\n"
                assert (scaled.returncode, scaled.stdout) == (0, said), scaled.stderr
                server.wait_for(message)
        ups = served.ups()
        assert ups.pop("decode-2", "0.0") == "0.0"  # until it has been silent for some time
        assert ups.pop("decode-1", "0.0") == "0.0"
        assert ups == dict.fromkeys(["prefill-0", "decode-0", "decode-3"], "1.0")
        names = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
        assert names == {"fleet", "prefill-0", "decode-0", "decode-3"}
        groups = {
            each["name"]: (each["state"], each["strategy"])
            for each in ray.util.placement_group_table().values()
            if each["state"] != "REMOVED"
        }
        assert groups == dict.fromkeys(names - {"fleet"}, ("CREATED", "STRICT_PACK"))
        actors = {each.name: each for each in list_actors(detail=True)}
        ended = {name for name, each in actors.items() if each.state == "DEAD"}
        assert {name for name, each in actors.items() if each.state == "ALIVE"} == names
        assert ended == {"decode-1", "decode-2"}
        restarts = {name: int(actors[name].num_restarts) for name in names}
        assert restarts.pop("decode-0") > 0 and set(restarts.values()) == {0}
        secret = ray.get(ray.get_actor("fleet").join.remote()).secret
        for page in ("api/v0/actors?detail=1", "api/v0/tasks?detail=1", "logical/actors"):
            text = served.dashboard(page)
            assert "decode-3" in text and secret not in text and PASSWORD not in text, page
        for entry in Path("/proc").glob("[0-9]*/*"):
            if entry.name in ("cmdline", "environ"):
                with suppress(OSError):  # it has ended, or is of another user
                    assert secret.encode() not in entry.read_bytes(), entry
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=PATIENCE_S) == 0
        session = Path(served.cluster.head_node.get_session_dir_path())
        logs = [file for file in (session / "logs").rglob("*") if file.is_file()]
        assert any("decode-0 serves at" in file.read_text(errors="replace") for file in logs)
        for file in logs:
            text = file.read_text(errors="replace")
            assert secret not in text and PASSWORD not in text, file.name
        assert not any(secret in line or PASSWORD in line for line in server.lines)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_a_fleet_survives_the_machine_of_a_prefill_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs each request one attempt, and Ray starts the node again on another machine."""
    import ray

    # A busy machine silences other nodes for seconds, and that costs attempts, too.
    with fleet("prefill=2,decode=1,tp=2", tmp_path, monkeypatch, silence_s=60) as served:
        assert served.count("num_nodes_lost") == served.count("num_attempts_lost") == 0
        with load(served.server, served.expected):
            served.kill_machine_of("prefill-0")
            served.server.wait_for("prefill-0 serves at")
            whole = dict.fromkeys(["prefill-0", "prefill-1", "decode-0"], "1.0")
            while served.ups() != whole:  # until the gateway hears the node
                assert served.server.complete(PROMPTS[0]) == served.expected[0]
        # A client waits for one answer at a time, so each loses one attempt to a node that is lost.
        num_lost = served.count("num_nodes_lost")
        assert num_lost >= 1
        assert served.count("num_attempts_lost") <= NUM_THREADS * num_lost
        print(f"{num_lost} nodes and {served.count('num_attempts_lost')} attempts were lost")
        names = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
        assert names == {"fleet", "prefill-0", "prefill-1", "decode-0"}
        assert not any("has failed" in line for line in served.server.lines)
