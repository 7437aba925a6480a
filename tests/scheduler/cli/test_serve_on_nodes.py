"""`radixkv serve --disaggregate`: in front of nodes in other processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock
from urllib.request import Request, urlopen

import pytest

from radixkv.scheduler.cli import serve_on_nodes
from radixkv.scheduler.cli.main import build_parser
from radixkv.scheduler.cli.serve import API_KEY
from radixkv.scheduler.cli.serve_on_nodes import connect
from radixkv.scheduler.errors import NodesMissingError
from radixkv.scheduler.handoff.gateway_messages import GATEWAY, NodeStatus
from radixkv.scheduler.models import load_config
from radixkv.scheduler.nodes.channel import ZmqChannel

from ...ports import reserved_port
from ...tokenizers import add_tokenizer

MAIN = [sys.executable, "-m", "radixkv.scheduler.cli.main"]
PROMPTS = [list(range(4, 8 + index)) for index in range(6)]
NEW_TOKENS = 40
SIZES = ["--block-size=4", "--device-blocks=64", "--token-budget=16"]
OF_GENERATE = ["--max-running=6", f"--max-model-len={len(PROMPTS[-1]) + NEW_TOKENS}"]
"""What `radixkv generate` takes for these prompts: the nodes run the programs that it compiled."""


def pid_of(parent: int, node: str) -> int:
    """The process of a node that another process has started."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        options = dict(pairwise(words))
        if (options.get(b"--name"), options.get(b"--parent-pid")) == (
            node.encode(),
            str(parent).encode(),
        ):
            return int(entry.parent.name)
    raise AssertionError(f"there is no {node}")


def test_a_node_is_killed_while_it_decodes(
    tmp_path: Path, model_dir: Path, radixkv: Callable[..., Any]
) -> None:
    """Every answer is that of one engine, also after the kill; the node is started again."""
    model = tmp_path / "model"
    model.mkdir()
    for file in model_dir.iterdir():
        (model / file.name).symlink_to(file)
    add_tokenizer(model)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    options = [*SIZES, "--max-new-tokens", NEW_TOKENS, "--ignore-eos"]
    radixkv("generate", model, "--prompts", prompts, *options, "--json", tmp_path / "out.json")
    expected = json.loads((tmp_path / "out.json").read_text())["outputs"]
    nodes = ["--disaggregate", "--decode=2", "--transport=jax", *OF_GENERATE]
    process = subprocess.Popen(
        [*MAIN, "serve", str(model), "--port=0", "--served-model-name=tiny", *SIZES, *nodes],
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != API_KEY},
    )
    assert process.stderr is not None
    with process, process.stderr, ThreadPoolExecutor(len(PROMPTS)) as pool:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "is served at" in line:
                    break
            url = lines[-1].split()[-1]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url), lines

            def complete(index: int, num_tokens: int) -> None:
                fields = {
                    "model": "tiny",
                    "prompt": PROMPTS[index],
                    "max_tokens": num_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                request = Request(f"{url}/completions", json.dumps(fields).encode())
                with urlopen(request) as response:
                    [choice] = json.load(response)["choices"]
                assert choice["token_ids"] == expected[index][:num_tokens]

            asked = [
                pool.submit(complete, index, NEW_TOKENS if index else 2)
                for index in range(len(PROMPTS))
            ]
            next(as_completed(asked)).result()  # so the nodes are at work
            killed = [pid_of(process.pid, name) for name in ("decode-0", "decode-1")]
            os.kill(killed[0], signal.SIGKILL)
            for each in asked:
                each.result()
            assert process.stderr.readline().startswith("radixkv: decode-0 was ended (Killed); ")
            assert process.stderr.readline() == "radixkv: decode-0 is started again\n"
            os.kill(killed[1], signal.SIGKILL)  # only nodes that were started again can answer
            complete(1, NEW_TOKENS)
            assert pid_of(process.pid, "decode-0") != killed[0]
            with urlopen(url.replace("/v1", "/metrics")) as response:
                metrics = response.read().decode().splitlines()
            labels = '{model_name="tiny",node="prefill-0",role="prefill"}'
            assert f"radixkv:node_up{labels} 1.0" in metrics
            queries = f"radixkv:prefix_cache_queries_total{labels} "
            assert any(each.startswith(queries) for each in metrics)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=300) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "of_nodes", "expected"),
    [
        ((), (64, 64), 64),
        ((), (64, 48), 48),
        ((), (32, 48), 32),
        ((), (9000, 9000), 8192),  # the positions of the model
        (("--max-model-len", "40"), (64, 48), 40),
        (("--max-model-len", "400"), (64, 48), 48),
    ],
)
def test_a_server_tells_what_all_of_its_nodes_take(
    model_dir: Path, options: tuple[str, ...], of_nodes: tuple[int, int], expected: int
) -> None:
    config = load_config(model_dir)
    assert config.max_positions == 8192
    with ExitStack() as stack:
        address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        for role, length in zip(("prefill", "decode"), of_nodes, strict=True):
            node = stack.enter_context(closing(ZmqChannel(role, epoch=1)))
            node.connect(GATEWAY, address)  # what is sent waits for the gateway
            status = NodeStatus(role, node.address, "jax", 4, 64, config.name)  # type: ignore[arg-type]
            node.send(GATEWAY, replace(status, max_model_len=length))
        command = ["serve", str(model_dir), "--disaggregate", "--gateway", address, *options]
        with connect(build_parser().parse_args(command), print) as backend:
            assert backend.max_model_len == expected
            assert backend.nodes is not None
            asyncio.run(backend.start().close())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefill", 2], "--prefill needs --disaggregate"),
        (["--gateway", "127.0.0.1:0"], "--gateway needs --disaggregate"),
        (["--disaggregate"], "--disaggregate needs --device-blocks, or --gateway"),
        (
            ["--disaggregate", "--device-blocks", 9, "--memory-fraction", 0.5],
            "--memory-fraction cannot be combined with --disaggregate",
        ),
        (
            ["--disaggregate", "--gateway", "127.0.0.1:0", "--device-blocks", 9],
            "--device-blocks cannot be combined with --gateway: give it to the nodes",
        ),
        *(
            (
                ["--disaggregate", "--gateway", "127.0.0.1:0", option, value],
                f"{option} cannot be combined with --gateway: give it to the nodes",
            )
            for option, value in (
                ("--max-running", 9),
                ("--block-size", 16),
                ("--preempt", "recompute"),
                ("--reserve-tokens", 512),
            )
        ),
    ],
)
def test_options_that_exclude_or_need_each_other(
    radixkv: Callable[..., Any], options: list[object], message: str
) -> None:
    outcome = radixkv("serve", "m", "--port=0", *options)
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {message}\n")


@pytest.mark.parametrize(
    ("options", "silence_s", "timeout_s"),
    [((), 5.0, 120.0), (("--silence-s", "3", "--timeout-s", "0"), 3.0, 0.0)],
)
def test_a_gateway_gets_its_times_and_is_closed_if_no_node_comes(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    silence_s: float,
    timeout_s: float,
) -> None:
    channel, found = Mock(), list[Any]()

    def make(own: object, **options: Any) -> Mock:
        assert own is channel
        found.append(options["silence_s"])
        return Mock()

    def wait_for(nodes: object, arguments: object, limit_s: float, check: object) -> NoReturn:
        found.append(limit_s)
        raise NodesMissingError("none came")

    monkeypatch.setattr(serve_on_nodes, "open_gateway", lambda *_: channel)
    monkeypatch.setattr(serve_on_nodes, "RemoteNodes", make)
    monkeypatch.setattr(serve_on_nodes, "wait_for", wait_for)
    gateway = ("--disaggregate", "--gateway", "127.0.0.1:9")
    arguments = build_parser().parse_args(["serve", str(model_dir), *gateway, *options])
    with (
        pytest.raises(NodesMissingError, match=r"^none came$"),
        connect(arguments, lambda _: None),
    ):
        pass
    assert found == [silence_s, timeout_s]
    channel.close.assert_called_once_with()
