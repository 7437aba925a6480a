"""Measure what the HTTP layer of `radixkv serve` costs beside the engine alone, and print a table.

Run:
    python benchmarks/http_layer.py [--step-ms 0,12,24] [--rounds N] [--aiperf PATH]

In turns, 64 chats at a time come from tasks in the process of an `AsyncEngine`, and as streams of
chunks over HTTP from another process. The figures are tokens per second, and the CPU time of the
server's process per token, with all its threads; that of the clients is apart. The ratio of CPU
times does not depend on what else the machine does.

The engine computes no model: each step sleeps for the time of one on a device, and gives a token to
each request. So the CPU time is that of the layer. A model on a CPU would compete with HTTP for
the core. The client reads chunks and does not parse them; with ``--aiperf``, it is AIPerf, which
does. AIPerf is not installed with radixkv: give the path of its command. It needs no network: the
tokenizer is a local directory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from machine import describe_machine

if TYPE_CHECKING:
    from radixkv.scheduler import AsyncEngine, Request

STREAMS = 64
PROMPT_TOKENS = 64
VOCABULARY = 340
_TIMES = ("time_to_first_token", "inter_token_latency", "request_latency")
SYSTEM_MODULES = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Turn:
    """One side of one round.

    Attributes:
        tokens: generated tokens.
        wall_s, cpu_s: elapsed time, and CPU time of the server's process.
        engine_s: of it, that of the engine's thread.
        steps: steps of the engine.
        chunks, client_s: chunks that an HTTP client read, and its own CPU time.
    """

    tokens: int
    wall_s: float
    cpu_s: float
    engine_s: float
    steps: int = 0
    chunks: int = 0
    client_s: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU time per token in microseconds."""
        return 1e6 * self.cpu_s / self.tokens

    def __str__(self) -> str:
        engine_us = 1e6 * self.engine_s / self.tokens
        text = (
            f"{self.rate:,.0f} tokens/s, {self.cpu_us:.1f} us of CPU per token, {engine_us:.1f} of "
            "them on the engine's thread"
        )
        if self.steps:  # of all requests together
            text += f", {1e3 * self.wall_s / self.steps:.2f} ms per step"
        if self.chunks:
            client_us = 1e6 * self.client_s / self.tokens
            text += f", {self.tokens / self.chunks:.2f} tokens per chunk, client {client_us:.1f} us"
        return text


def _times(report: dict[str, Any], name: str) -> str:
    found = report[name]
    return f"{name} p50 {found['p50']:.1f}, p99 {found['p99']:.1f} {found['unit']}"


class PacedEngine:
    """What `AsyncEngine` uses of an `Engine`, over a device that needs a given time for a step.

    As in an `Engine`, the next step is dispatched before the tokens of the last one are read::

        host     dispatch 2, wait for 1, tokens of 1 │ dispatch 3, wait for 2, tokens of 2 │ ...
        device      1      │          2          │          3          │

    So a delay of the host delays no step, if it is shorter than one.

    Attributes:
        steps: number of steps.
        step_s: time of a step.
    """

    def __init__(self, step_s: float, tokens: Sequence[int]) -> None:
        self.steps = 0
        self.step_s = step_s
        self._tokens = tokens
        self.advanced: list[Request] = []
        self._ends = [0.0]
        self._requests: dict[str, Request] = {}
        self._random = random.Random(0)

    @property
    def scheduler(self) -> PacedEngine:
        """Itself: it has the running requests."""
        return self

    @property
    def running(self) -> list[Request]:
        """All requests."""
        return list(self._requests.values())

    @property
    def has_work(self) -> bool:
        """Whether any request runs."""
        return bool(self._requests)

    def add_request(self, request: Request) -> None:
        """Begin a request."""
        self._requests[request.request_id] = request
        request.has_begun = True

    def abort(self, request_id: str) -> bool:
        """End a request."""
        return self._requests.pop(request_id, None) is not None

    def step(self) -> list[Request]:
        """Dispatch a step, wait for the one before it, and append a token to each request."""
        now = time.monotonic()
        self._ends.append(max(now, self._ends[-1]) + self.step_s)
        time.sleep(max(0.0, self._ends.pop(0) - now))
        self.steps += 1
        self.advanced = self.running
        ended = []
        for request in self.advanced:
            request.finish_reason = request.append(self._random.choice(self._tokens))
            if request.finish_reason is not None:
                del self._requests[request.request_id]
                ended.append(request)
        return ended

    def close(self, timeout_s: float) -> bool:
        """Do nothing."""
        return True


class Measured:
    """An engine that is served over HTTP in this process.

    Attributes:
        num_prompt: length of the prompts of `bare`.
        num_steps: counts the steps of the engine.
    """

    def __init__(self, engine: AsyncEngine, directory: Path, url: str, num_new: int) -> None:
        self.engine = engine
        self.directory = directory
        self.url = url
        self.num_new = num_new
        self.num_prompt = PROMPT_TOKENS
        self.num_steps: Callable[[], int] = lambda: 0

    async def bare(self, num_chats: int) -> Turn:
        """Let tasks in this process read the streams of the engine."""
        from radixkv.scheduler import GenerationParams, SamplingParams

        chats = iter(range(num_chats))

        async def client() -> int:
            num_tokens = 0
            for _ in chats:
                prompt = [random.randrange(4, VOCABULARY) for _ in range(self.num_prompt)]
                sampling = SamplingParams(1.0, seed=random.getrandbits(32))
                params = GenerationParams(self.num_new, sampling, ignore_eos=True)
                async for output in self.engine.generate(prompt, params):
                    num_tokens += len(output.new_token_ids)
            return num_tokens

        async def clients() -> dict[str, float]:
            return {"tokens": sum(await asyncio.gather(*(client() for _ in range(STREAMS))))}

        return await self._measure(clients)

    async def http(self, num_chats: int) -> Turn:
        """Let another process read as many chats as streams of chunks."""

        async def clients() -> dict[str, float]:
            port = self.url.rpartition(":")[2]
            arguments = (str(__file__), "--client", port, str(num_chats), str(self.num_new))
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
            )
            printed, _ = await process.communicate()
            if process.returncode:
                raise SystemExit("the client has failed")
            return cast("dict[str, float]", json.loads(printed))

        return await self._measure(clients)

    async def aiperf(self, path: str, num_chats: int) -> Turn:
        """Let AIPerf do the same."""
        artifacts = Path(tempfile.mkdtemp(dir=self.directory))
        command = [
            *(path, "profile", "--model", "tiny"),
            *("--url", self.url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", str(self.directory), "--concurrency", str(STREAMS)),
            *("--request-count", str(num_chats), "--isl", str(PROMPT_TOKENS)),
            *("--osl", str(self.num_new), "--extra-inputs", "ignore_eos:true"),
            *("--workers-max", "1", "--record-processors", "1", "--ui", "none"),
            *("--output-artifact-dir", str(artifacts), "--random-seed", "0"),
            *("--use-server-token-count", "--no-server-metrics"),
        ]

        async def clients() -> dict[str, float]:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            printed, _ = await process.communicate()
            found = sorted(artifacts.rglob("profile_export_aiperf.json"))
            if not found:
                raise SystemExit(f"AIPerf failed:\n{printed.decode()[-4000:]}")
            report = json.loads(found[0].read_text())
            print("  AIPerf:", ", ".join(_times(report, each) for each in _TIMES), flush=True)
            num_tokens = round(report["total_output_tokens"]["avg"])
            rate = report["output_token_throughput"]["avg"]
            # As the server counts: with the chat template, and as this tokenizer reads the words.
            self.num_prompt = round(report["input_sequence_length"]["avg"])
            return {"tokens": num_tokens, "wall_s": num_tokens / rate}

        return await self._measure(clients)

    async def _measure(self, clients: Callable[[], Awaitable[dict[str, float]]]) -> Turn:
        [thread] = [each for each in threading.enumerate() if each.name == "radixkv-engine"]
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        begun, cpu = time.perf_counter(), time.process_time()
        engine, steps = time.clock_gettime(clock), self.num_steps()
        counted = await clients()
        return Turn(
            tokens=int(counted["tokens"]),
            wall_s=counted.get("wall_s", time.perf_counter() - begun),
            cpu_s=time.process_time() - cpu,
            engine_s=time.clock_gettime(clock) - engine,
            steps=self.num_steps() - steps,
            chunks=int(counted.get("chunks", 0)),
            client_s=counted.get("cpu_s", 0.0),
        )


def main() -> int:
    """Measure, and print."""
    if sys.argv[1:2] == ["--client"]:
        port, num_chats, num_new = map(int, sys.argv[2:])
        print(json.dumps(asyncio.run(read_chats(port, num_chats, num_new))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aiperf", metavar="PATH")
    parser.add_argument("--step-ms", default="12,24", help="times of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=256, help="chats per turn")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(Path(directory), options))
    return 0


async def measure(directory: Path, options: argparse.Namespace) -> None:
    """Compare, with steps of several times."""
    from radixkv.scheduler import AsyncEngine
    from radixkv.scheduler.text import TextTokenizer

    sys.path.insert(0, str(SYSTEM_MODULES))
    from radixkv.scheduler.models import make_tiny_checkpoint
    from tests.tokenizers import add_tokenizer

    make_tiny_checkpoint(directory, "qwen3", overrides={"vocab_size": VOCABULARY})
    # AIPerf's library is stricter about the tokenizer's configuration than radixkv.
    add_tokenizer(directory, eos_token="</s>", tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = TextTokenizer(directory)
    # Each token is whole characters, and so a chunk, as with a real model.
    texts = {token: tokenizer.decode([token]) for token in range(VOCABULARY)}
    tokens = [token for token, text in texts.items() if text.strip() and text.isascii()]
    paced = PacedEngine(0.0, tokens)
    engine = AsyncEngine(cast(Any, paced), tokenizer)
    print(describe_machine(), flush=True)

    async def measure_steps(measured: Measured) -> None:
        async def client(num_chats: int) -> Turn:
            if options.aiperf is None:
                return await measured.http(num_chats)
            return await measured.aiperf(options.aiperf, num_chats)

        measured.num_steps = lambda: paced.steps
        await client(STREAMS)  # warm-up
        for step_ms in options.step_ms.split(","):
            paced.step_s = float(step_ms) / 1e3
            print(f"steps of {step_ms} ms and more:", flush=True)
            await compare(measured.bare, client, options)

    await with_server(engine, directory, options.new_tokens, measure_steps)


async def with_server(
    engine: AsyncEngine,
    directory: Path,
    num_new: int,
    measure: Callable[[Measured], Awaitable[None]],
) -> None:
    """Serve an engine over HTTP while it is measured."""
    from radixkv.scheduler.server import ServedModel, make_app, serve
    from radixkv.scheduler.server.run import bind

    listener, ready = bind("127.0.0.1", 0), asyncio.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = make_app(ServedModel("tiny", engine, 1024, created=0))
    server = asyncio.create_task(serve(app, engine, listener, on_ready=ready.set))
    await ready.wait()
    try:
        await measure(Measured(engine, directory, url, num_new))
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


async def compare(
    one: Callable[[int], Awaitable[Turn]],
    other: Callable[[int], Awaitable[Turn]],
    options: argparse.Namespace,
) -> None:
    """Take turns, and print the ratios."""
    pairs = []
    for index in range(options.rounds):
        http = await other(options.chats)  # first: it may say how long the prompts are
        pairs.append((await one(options.chats), http))
        print(f"  round {index}: engine {pairs[-1][0]}", flush=True)
        print(f"           HTTP   {pairs[-1][1]}", flush=True)
    cpu = median(http.cpu_us / bare.cpu_us for bare, http in pairs)
    more_us = median(http.cpu_us - bare.cpu_us for bare, http in pairs)
    rate = median(http.rate / bare.rate for bare, http in pairs)
    print(
        f"  median: CPU per token {cpu:.2f} times that of the engine alone, {more_us:+.1f} us; "
        f"throughput {rate:.3f} times",
        flush=True,
    )


# The client, in its own process


async def read_chats(port: int, num_chats: int, num_new: int) -> dict[str, float]:
    """Read chats as streams, 64 at a time; count their chunks, and the CPU time."""
    chats = iter(range(num_chats))
    words = ("the", "cache", "holds", "keys", "and", "values")

    def body() -> bytes:
        content = " ".join(random.choice(words) for _ in range(PROMPT_TOKENS // 2))
        fields = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": num_new,
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(fields).encode()

    async def client() -> int:
        num_chunks = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in chats:
            data = body()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}"
            writer.write(head.encode() + b"\r\n\r\n" + data)
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = await reader.read(65536)
                if not data:
                    raise SystemExit(f"the server has closed a connection after {tail!r}")
                num_chunks += data.count(b"data: ")
                tail = (tail + data)[-200:]
            num_chunks -= 2  # the role of the assistant, and the end
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return num_chunks

    begun, cpu = time.perf_counter(), time.process_time()
    chunks = sum(await asyncio.gather(*(client() for _ in range(STREAMS))))
    return {
        "tokens": num_chats * num_new,
        "chunks": chunks,
        "wall_s": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu,
    }


if __name__ == "__main__":
    sys.exit(main())
