"""`radixkv serve`: from its start to its end, and what it refuses before it loads a model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from radixkv.scheduler import server
from radixkv.scheduler.cli import serve
from radixkv.scheduler.cli.errors import BadInputError
from radixkv.scheduler.cli.serve import API_KEY, _is_loopback, read_api_key
from radixkv.scheduler.cli.shared.backend import Backend
from radixkv.scheduler.events import EventSubscriber, decode_batch
from radixkv.scheduler.events.wire import Stored

from ...collector import Collector
from ...tokenizers import add_tokenizer

MAIN = [sys.executable, "-m", "radixkv.scheduler.cli.main"]
SIZES = ["--block-size=4", "--device-blocks=32", "--max-model-len=64", "--token-budget=8"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(
    tmp_path: Path, model_dir: Path, collector: Collector, stop: signal.Signals
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in model_dir.iterdir():
        (model / file.name).symlink_to(file)
    add_tokenizer(model)
    traces = f"--otlp-traces-endpoint={collector.endpoint}"
    events = [f"--kv-events{each}=tcp://127.0.0.1:0" for each in ("", "-replay")]
    process = subprocess.Popen(
        [
            *MAIN,
            "serve",
            str(model),
            "--port=0",
            "--served-model-name=tiny",
            traces,
            *events,
            *SIZES,
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, API_KEY: "sesame"},
    )
    assert process.stderr is not None and process.stdout is not None
    with process, process.stderr, process.stdout:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "is served at" in line:
                    break
            found = re.fullmatch(
                r"radixkv: tiny is served at (http://127\.0\.0\.1:\d+/v1)\n", lines[-1]
            )
            assert found is not None, lines
            assert "32 blocks of 4 tokens" in lines[-3]
            assert lines[-2].startswith("radixkv: at most 1,024 connections, and 256 choices ")
            [line] = [line for line in lines if "KV events" in line]
            endpoint, replay = re.findall(r"tcp://127\.0\.0\.1:\d+", line)
            prompt = list(range(9))
            body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 3}).encode()
            request = Request(f"{found[1]}/completions", body)
            with pytest.raises(HTTPError, match="401") as refused:
                urlopen(request)
            refused.value.close()
            request.add_header("Authorization", "Bearer sesame")
            request.add_header("Traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")
            with urlopen(request) as response:
                assert json.load(response)["choices"][0]["text"] is not None
            with EventSubscriber(endpoint, replay) as subscriber:
                while not (messages := list(subscriber.replay(0))):
                    pass  # a thread sends it, soon
                [event] = decode_batch(messages[0].payload).events
                assert isinstance(event, Stored) and event.token_ids == prompt[:8]
            process.send_signal(stop)
            assert process.wait(timeout=300) == 0
            assert (process.stderr.read(), process.stdout.read()) == ("", "")
        finally:
            process.kill()
    spans = {each.span.name: each.span for each in collector.spans}
    assert spans.keys() == {"llm_request", "queued", "prefill", "decode"}
    request_span = spans["llm_request"]
    assert {span.trace_id for span in spans.values()} == {bytes.fromhex("ab" * 16)}
    assert request_span.parent_span_id == bytes.fromhex("cd" * 8)
    attributes = {each.key: each.value for each in request_span.attributes}
    assert attributes["gen_ai.response.model"].string_value == "tiny"
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 3


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def test_a_later_process_hits_what_a_stopped_one_has_stored(
    tmp_path: Path, model_dir: Path
) -> None:
    """SIGTERM drains, and then stores all blocks."""
    tiers = [
        "--host-blocks=32",
        f"--storage=file://{tmp_path}/blocks",
        "--storage-max-bytes=1000000",
    ]
    fields = {"model": "m", "prompt": list(range(4, 44)), "max_tokens": 2, "temperature": 0}
    answers = []
    for _ in range(2):
        process = subprocess.Popen(
            [*MAIN, "serve", str(model_dir), "--port=0", "--served-model-name=m", *SIZES, *tiers],
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != API_KEY},
        )
        assert process.stderr is not None
        with process, process.stderr:
            try:
                line = next(line for line in process.stderr if "is served at" in line)
                url = line.split()[-1]
                request = Request(f"{url}/completions", json.dumps(fields).encode())
                with urlopen(request) as response:
                    answers.append(json.load(response)["usage"]["prompt_tokens_details"])
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=300) == 0
            finally:
                process.kill()
    assert answers == [{"cached_tokens": 0}, {"cached_tokens": 39}]  # the last is computed again


@pytest.mark.parametrize("library", ["msgspec", "prometheus_client", "starlette", "uvicorn"])
def test_a_library_that_is_missing_is_named(library: str) -> None:
    program = f"import sys; sys.modules[{library!r}] = None; "
    program += "from radixkv.scheduler.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", "m"], capture_output=True, text=True, check=False
    )
    message = f"serve needs the library {library!r}: pip install 'radixkv[serve]'"
    assert (done.returncode, done.stderr) == (2, f"radixkv: {message}\n")


@pytest.mark.parametrize("key", ["", "a b", "a\n", "schlüssel"])
def test_a_key_that_no_header_can_have(key: str) -> None:
    message = "RADIXKV_API_KEY must have printable ASCII characters without spaces"
    with pytest.raises(BadInputError, match=f"^{message}$"):
        read_api_key({API_KEY: key})


def test_the_key_is_that_of_the_environment() -> None:
    assert read_api_key({}) is None
    assert read_api_key({API_KEY: "sesame-1"}) == "sesame-1"


def test_an_address_in_use(radixkv: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        outcome = radixkv("serve", "m", "--port", other.getsockname()[1])
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "Address already in use" in outcome.stderr


@pytest.mark.parametrize("is_group", [False, True])
def test_the_application_and_the_server_get_their_options(
    radixkv: Any, monkeypatch: pytest.MonkeyPatch, is_group: bool
) -> None:
    """The engine of several processes cannot go on without one of them, and ends the server."""
    engine: Any = SimpleNamespace()
    given: dict[str, Any] = {}

    def make_app(model: Any, **options: Any) -> str:
        given.update(model=model, **{f"app_{name}": each for name, each in options.items()})
        return "the application"

    async def run(app: Any, of: Any, listener: socket.socket, **options: Any) -> bool:
        given.update(app=app, engine=of, port=listener.getsockname()[1], **options)
        return True

    monkeypatch.setenv(API_KEY, "sesame")
    monkeypatch.setattr(server, "make_app", make_app)
    monkeypatch.setattr(server, "serve", run)
    monkeypatch.setattr(serve, "group_of_options", lambda _: nullcontext())
    monkeypatch.setattr(serve, "_backend", lambda *_: nullcontext(Backend(lambda: engine, 77)))
    limits = ["--max-body-bytes=1000", "--max-requests=5", "--max-connections=9"]
    group = ["--coordinator=127.0.0.1:9", "--num-processes=2", "--process-id=0"] if is_group else []
    options = [*limits, "--drain-timeout-s=1.5", "--served-model-name=tiny", *group]
    outcome = radixkv("serve", "m", "--port=0", *options)
    assert outcome.status == 0
    model = given["model"]
    assert (model.name, model.engine, model.max_model_len) == ("tiny", engine, 77)
    assert (
        given["limits"]
        == given["app_limits"]
        == server.ServerLimits(
            max_body_bytes=1000, max_bodies_bytes=16_000, max_requests=5, max_connections=9
        )
    )
    assert (given["app_api_key"], given["app_metrics"], given["app_has_engine"]) == (
        *("sesame", None, True),
    )
    assert (given["app"], given["engine"]) == ("the application", engine)
    assert (given["drain_timeout_s"], given["outlives_engine"]) == (1.5, not is_group)
    given["on_ready"]()


def test_a_model_that_is_nowhere(radixkv: Any) -> None:
    outcome = radixkv("serve", "./nowhere", "--port=0")
    message = "./nowhere: no such directory, and not the name of a hub repository"
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {message}\n")


def test_an_open_address_without_a_key_is_warned_of(
    radixkv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = "warning: 0.0.0.0 is reached from the network, and RADIXKV_API_KEY is not set"
    monkeypatch.delenv(API_KEY, raising=False)
    outcome = radixkv("serve", "./nowhere", "--port=0", "--host=0.0.0.0")
    assert outcome.stderr.startswith(f"radixkv: {warning}\n")
    monkeypatch.setenv(API_KEY, "sesame")
    outcome = radixkv("serve", "./nowhere", "--port=0", "--host=0.0.0.0")
    assert "warning" not in outcome.stderr


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)]
)
def test_loopback_addresses(host: str, expected: bool) -> None:
    assert _is_loopback(host) is expected


@pytest.mark.parametrize("url", ["", "127.0.0.1:4318", "ftp://host/v1/traces", "http:///v1"])
def test_an_endpoint_that_is_none(radixkv: Any, url: str) -> None:
    outcome = radixkv("serve", "m", "--otlp-traces-endpoint", url)
    assert outcome.status == 2
    assert f"expected an address with http or https, got {url!r}" in outcome.stderr


def test_spans_without_the_library() -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; "
    program += "from radixkv.scheduler.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", "m", "--otlp-traces-endpoint=http://h"],
        capture_output=True,
        text=True,
        check=False,
    )
    message = "radixkv.scheduler.tracing needs OpenTelemetry: pip install 'radixkv[tracing]'"
    assert (done.returncode, done.stderr) == (2, f"radixkv: {message}\n")


@pytest.mark.parametrize("value", ["0", "1.1", "nan", "much"])
def test_a_fraction_that_is_none(radixkv: Any, value: str) -> None:
    outcome = radixkv("serve", "m", "--memory-fraction", value)
    assert outcome.status == 2
    message = f"argument --memory-fraction: expected a number above 0, at most 1, got {value!r}"
    assert message in outcome.stderr
