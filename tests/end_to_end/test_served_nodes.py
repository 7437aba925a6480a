"""`serve_nodes`: prefill and decode nodes with the interface of an `AsyncEngine`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from radixkv.scheduler import AsyncEngine, Engine, GenerationParams, Request
from radixkv.scheduler.errors import HandoffFailedError
from radixkv.scheduler.server import ServedModel, make_app
from radixkv.scheduler.serving.nodes_front import serve_nodes

from .cluster import Cluster
from .conftest import MAX_MODEL_LEN, fresh
from .test_server import COMPLETIONS, Served, in_loop

PROMPTS = [list(range(2, 2 + length)) for length in (3, 9, 17)]


@pytest.fixture(scope="module")
def compiled(engine: Callable[[str, int], Engine]) -> Engine:
    """An engine to take programs from."""
    return engine("qwen3", 4)


@asynccontextmanager
async def serving(
    compiled: Engine,
    *,
    on_told: Callable[[Cluster, Request], object] | None = None,
    front: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """Nodes in this process, which the thread of the result steps.

    Args:
        on_told: called on that thread when the first request has three tokens, once.
    """
    cluster, closed = Cluster(compiled, front={"stream": True, **front}, **options), []
    told: list[Request] = []
    step = cluster.front.step

    def watched_step() -> list[Request]:
        ended = step()
        for request in cluster.front.advanced:
            if on_told is not None and len(request.output_tokens) >= 3 and not told:
                told.append(request)
                on_told(cluster, request)
        return ended

    cluster.front.step = watched_step  # type: ignore[method-assign]
    async with serve_nodes(cluster.front, lambda: closed.append(True)) as nodes:
        yield cluster, nodes
    assert closed == [True] and bool(told) == (on_told is not None)
    cluster.front.run()
    cluster.assert_nothing_leaked()
    assert cluster.front.failures == {}


def test_nodes_are_looked_after_before_each_step_also_without_requests():
    calls: list[tuple[str, threading.Thread]] = []
    has_idled = threading.Event()

    class Idle:
        failures: dict[str, str] = {}  # noqa: RUF012
        advanced: tuple[Request, ...] = ()
        has_work = False
        add_request = abort = None

        def step(self) -> list[Request]:
            note("step")
            if len(calls) >= 6:
                has_idled.set()
            return []

    def note(name: str) -> None:
        calls.append((name, threading.current_thread()))

    idle: Any = Idle()
    nodes = serve_nodes(idle, partial(note, "close"), supervise=partial(note, "supervise"))
    assert has_idled.wait(60)
    assert asyncio.run(nodes.close())
    *names, end = [name for name, _ in calls]
    assert names == ["supervise", "step"] * (len(names) // 2) and end == "close"
    assert {thread.name for _, thread in calls} == {"radixkv-engine"}


async def last(nodes: AsyncEngine, prompt: Any, params: GenerationParams) -> Any:
    return [output async for output in nodes.generate(prompt, params)][-1]


def test_the_tokens_are_those_of_one_engine(compiled):
    @in_loop
    async def test() -> None:
        params = GenerationParams(8)
        async with serving(compiled, num_prefill=2, num_decode=2) as (cluster, nodes):
            outputs = await asyncio.gather(*(last(nodes, each, params) for each in PROMPTS))
        cluster = Cluster(compiled)
        expected = cluster.complete(PROMPTS, 8)
        assert [list(output.token_ids) for output in outputs] == expected
        assert {output.finish_reason for output in outputs} == {"length"}

    test()


def test_a_stream_that_is_closed_frees_the_blocks_of_both_nodes(compiled):
    waits, is_closed = threading.Event(), threading.Event()

    @in_loop
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with serving(compiled) as (cluster, nodes):
            step = cluster.front.step

            def cancelling_step() -> list[Request]:
                """Cancel when both nodes have blocks, before a token is told."""
                ended = step()
                leases = [node.stats().engine.cache.live_leases for node in (cluster.p, cluster.d)]
                if all(leases) and not is_closed.is_set():
                    waits.wait()
                    loop.call_soon_threadsafe(waiting.cancel)
                    is_closed.wait()
                return ended

            cluster.front.step = cancelling_step
            stream = nodes.generate(PROMPTS[1], GenerationParams(40))
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)  # it waits
            waits.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            is_closed.set()
            while await nodes.call(lambda _: cluster.front.has_work):
                pass
            assert cluster.p.stats().engine.cache.live_leases == 0
            assert cluster.d.stats().engine.cache.live_leases == 0
            assert cluster.d.stats().engine.steps < 10

    test()


def test_a_node_that_is_lost_is_replaced(compiled):
    """The request is tried again, and its stream goes on where it stopped."""
    [expected] = Cluster(compiled).complete([PROMPTS[2]], 24)

    @in_loop
    async def test() -> None:
        async with serving(compiled, on_told=lambda cluster, _: cluster.restart_decode()) as (
            _,
            nodes,
        ):
            told = []
            async for output in nodes.generate(PROMPTS[2], GenerationParams(24)):
                told += output.new_token_ids
            assert told == list(output.token_ids) == expected

    test()


def _lose_with_another_token(cluster: Cluster, request: Request) -> None:
    cluster.restart_decode()
    request.output_tokens[1] += 1  # as if the lost node had generated another one


def test_a_stream_ends_with_an_error_if_another_node_has_other_tokens(compiled):
    """As nodes with other arithmetic have."""
    [expected] = Cluster(compiled).complete([PROMPTS[2]], 24)

    @in_loop
    async def test() -> None:
        async with serving(compiled, on_told=_lose_with_another_token) as (_, nodes):
            with pytest.raises(
                HandoffFailedError,
                match=rf"^request 'a': attempt 2 has {expected[1]} as output token 1, and an "
                rf"earlier attempt, whose tokens were told, had {expected[1] + 1}$",
            ):
                async for _output in nodes.generate(
                    PROMPTS[2], GenerationParams(24), request_id="a"
                ):
                    pass

    test()


def test_the_other_samples_end_with_one_that_fails(compiled):
    """Nobody reads them: they would decode to their ends, and hold blocks on both nodes."""
    num_new = MAX_MODEL_LEN - len(PROMPTS[2])

    @in_loop
    async def test() -> None:
        async with serving(compiled, on_told=_lose_with_another_token) as (cluster, nodes):
            stream = nodes.generate(PROMPTS[2], GenerationParams(num_new, n=3))
            samples = [each.request for each in stream._consumer.deliveries]
            with pytest.raises(HandoffFailedError, match="whose tokens were told, had"):
                async for _output in stream:
                    pass
            while await nodes.call(lambda _: cluster.front.has_work):
                pass
            assert [each.finish_reason for each in samples] == ["abort"] * 3
            assert all(len(each.output_tokens) < num_new for each in samples)

    test()


def test_the_tokens_of_a_stream_come_before_its_end(compiled):
    numbers = []

    def note(_: Cluster, request: Request) -> None:
        numbers.append(len(request.output_tokens))

    @in_loop
    async def test() -> None:
        async with serving(compiled, on_told=note) as (_, nodes):
            output = await last(nodes, PROMPTS[1], GenerationParams(24))
            assert len(output.token_ids) == 24 and numbers == [3]

    test()


def test_a_request_that_fails_on_all_nodes(compiled, monkeypatch):
    @in_loop
    async def test() -> None:
        async with serving(compiled, front={"request_s": 0.0}) as (_, nodes):
            with pytest.raises(HandoffFailedError, match=r"^request 'a': not done in time"):
                async for _output in nodes.generate(PROMPTS[0], request_id="a"):
                    raise AssertionError
            app = make_app(ServedModel("tiny", nodes, MAX_MODEL_LEN, created=7), has_engine=False)
            server = Served.__new__(Served)
            server.app = app
            answer = await server.post(COMPLETIONS, prompt=PROMPTS[0])
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "nodes_failed"
            metrics = await server.ask("GET", "/metrics")
            assert metrics.status == 200 and b"radixkv:" not in metrics.body
            assert b"http_requests_total" in metrics.body
            assert (await server.ask("GET", "/health")).status == 200

    test()


def test_a_chat_asks_nodes_for_no_more_tokens_than_they_take(compiled):
    @in_loop
    async def test() -> None:
        async with serving(compiled) as (_, nodes):
            assert nodes.max_new_tokens == 2**17

    test()


def test_log_probabilities_over_http(compiled):
    """Those of a stream are the same, and come with their tokens."""
    fields: dict[str, Any] = {
        "prompt": PROMPTS[1],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 2,
    }
    first = fresh(compiled)
    first.add_request(Request("a", [3], 2, logprobs=0))
    first.run()  # compiles the program for all

    @in_loop
    async def test() -> None:
        async with serving(compiled) as (_, nodes):
            server = Served.__new__(Served)
            server.app = make_app(
                ServedModel("tiny", nodes, MAX_MODEL_LEN, created=7), has_engine=False
            )
            whole = await server.post(COMPLETIONS, **fields)
            stream = await server.post(COMPLETIONS, stream=True, **fields)
        [choice] = whole.json()["choices"]
        parts = [event["choices"][0]["logprobs"] for event in stream.events() if event["choices"]]
        written = choice["logprobs"]
        assert len(written["token_logprobs"]) == 8 and max(written["token_logprobs"]) <= 0.0
        for field in ("token_logprobs", "tokens"):
            streamed = [each for part in parts for each in part[field]]
            assert streamed == pytest.approx(written[field], abs=1e-4)

    test()
