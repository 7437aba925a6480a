"""Engines of a group in one process: what process 0 tells is all that another one needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from radixkv.kvcache import HostConfig
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.engine.calls import (
    Call,
    CallReceiver,
    CallSender,
    bytes_to_array,
    decode_call,
    encode_call,
)
from radixkv.scheduler.engine.group_runners import FollowingRunner, describe_options, digest_params
from radixkv.scheduler.errors import CallError, ConfigError
from radixkv.scheduler.models import load_model, make_tiny_checkpoint
from radixkv.scheduler.request import GREEDY, Request, SamplingParams
from radixkv.scheduler.serving import GenerationParams

from .on_processes import PREFIX, PROMPTS, SIZES, make_requests

pytestmark = pytest.mark.slow  # compiles for both processes

TINY = {"num_hidden_layers": 1, "vocab_size": 256}


class Wire:
    """The group of one process: calls are bytes in a list, which the other one reads.

    All have the devices of one process, so each computes the whole model by itself.
    """

    num_processes = 2

    def __init__(self, process_id: int, messages: list[list[bytes]]) -> None:
        self.process_id, self.messages = process_id, messages
        self.options: dict[str, str] = {}
        self.sender, self.receiver = CallSender(b"", [1]), CallReceiver(b"")
        self.num_waits = self.num_checks = 0

    def join(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)

    def share(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers), list(numbers)]

    def check(self) -> None:
        self.num_checks += 1

    def tell(self, name: str, flags: Sequence[int] = (), *arrays: np.ndarray) -> None:
        self.messages.append(self.sender.send(Call(name, tuple(flags), arrays)))

    def wait(self, arrays: Any) -> None:
        self.num_waits += 1

    def calls(self) -> Iterator[Call]:
        while self.messages:
            yield self.receiver.receive(self.messages.pop(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_checkpoint(directory, overrides=TINY)
    return load_model(directory)


@pytest.fixture(scope="module")
def engines(model: Any) -> Iterator[list[Engine]]:
    """Process 0 and another one, which share compiled programs."""
    messages: list[list[bytes]] = []
    made = []
    for process_id in (0, 1):
        group = Wire(process_id, messages)
        made.append(Engine(model, **SIZES, host=HostConfig(15, "through"), group=group))
    yield made
    assert all(engine.close(timeout_s=1000) for engine in made)


def test_the_other_process_computes_the_same_kv(engines):
    leader, follower = engines
    requests = make_requests()
    for request in requests:
        leader.add_request(request)
    leader.run()
    for request in make_requests()[:2]:  # hits on the host
        leader.add_request(request)
    leader.run()
    sampled = Request("n", PROMPTS[0], 4, sampling=SamplingParams(temperature=0.7, seed=9))
    leader.add_request(sampled)
    params = GenerationParams(4, sampled.sampling, n=3)
    for request in params.make_requests("samples", [33, 44, *PREFIX, 55, 66], None, ()):
        leader.add_request(request)
    leader.run()

    group: Any = leader._runner._group
    names = {decode_call(frames[2:]).name for frames in group.messages}
    assert names == {
        *("request", "step", "draw", "set_counts", "adjust", "count", "logprobs"),
        *("prompt_logprobs", "gather", "scatter", "copy_sample"),
    }
    assert leader.stats().scheduler.preemptions > 0
    assert leader.stats().scheduler.host_hit_tokens > 0
    assert group.num_waits == leader._runner._steps <= group.num_checks

    follower.follow()
    for ours, theirs in zip(leader._runner.arrays.keys, follower._runner.arrays.keys, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(
        leader._runner._batch.state, follower._runner._batch.state, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    counts = [engine._runner._adjustments._counts for engine in engines]
    np.testing.assert_array_equal(*counts)
    np.testing.assert_array_equal(*(each._runner._programs.logits for each in engines))
    kept = [each._runner._programs.take_hidden() for each in engines]
    assert kept == [None, None], "what the log probabilities of prompts need, once"


def test_new_weights_come_to_each_process(engines, model):
    leader, follower = engines
    other = jax.tree.map(lambda leaf: leaf * 1.25, model.params)
    requests = make_requests()[:3]
    for request in requests:
        leader.add_request(request)
    for _ in range(3):
        leader.step()
    leader.reset_cache()  # with the same weights
    leader.step()
    leader.reset_cache(params=other, weights_revision="twice äs good")
    leader.run()
    asked = []

    def get_params(revision: str) -> Any:
        asked.append(revision)
        return jax.tree.map(np.asarray, other)

    follower.follow(get_params)
    assert asked == ["twice äs good"]
    for ours, theirs in zip(leader._runner.arrays.keys, follower._runner.arrays.keys, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for engine in engines:
        embedding = engine._runner.model.params.embedding
        np.testing.assert_array_equal(embedding, other.embedding)


def test_other_weights_than_those_of_process_0_end_the_group(engines, model):
    runner: Any = engines[1]._runner
    given = Call("weights", (), (bytes_to_array(b"b"),))
    runner._get_params = None
    with pytest.raises(CallError, match=r"^process 0 has new weights, and follow was called witho"):
        runner.execute(given)
    runner._get_params = lambda _: model.params._replace(embedding=model.params.embedding[1:])
    with pytest.raises(ConfigError, match=r"^params must have the same shapes and dtypes as those"):
        runner.execute(given)
    runner._get_params = lambda _: model.params
    runner.execute(given)
    for params in (model.params, jax.tree.map(np.asarray, model.params)):
        digest = digest_params(params)
        assert len(digest) == 8
        runner.execute(Call("check_weights", (), (bytes_to_array(digest),)))
    with pytest.raises(
        CallError, match=r"^new weights differ: process 0 has 3{16}, this one \w{16}$"
    ):
        runner.execute(Call("check_weights", (), (bytes_to_array(b"3" * 8),)))


def test_each_process_describes_the_same_options(engines, model):
    ours, theirs = (engine._runner._group.options for engine in engines)
    assert ours == theirs
    assert ours["block_size"] == "4" and ours["host_blocks"] == "15"
    other = describe_options(model, engines[0].manager, {"token_budget": 9})
    assert other["weights"] == ours["weights"] and other["token_budget"] != ours["token_budget"]


def test_what_a_group_refuses(engines, model):
    leader, follower = engines
    with pytest.raises(ConfigError, match=r"^process 1 of the group takes no requests: call fol"):
        follower.add_request(Request("a", [2], 1, sampling=GREEDY))
    other_shapes = model.params._replace(embedding=model.params.embedding[1:])
    with pytest.raises(ConfigError, match=r"^params must have the same shapes and dtypes as those"):
        leader.reset_cache(params=other_shapes)
    for engine in (leader, Engine(model, **SIZES)):
        with pytest.raises(ConfigError, match=r"^follow is for the processes of a group other tha"):
            engine.follow()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Call("draw"), "call 'draw' of process 0 follows no step"),
        (Call("gather"), "process 0 copies blocks of a host tier, this process has none"),
    ],
)
def test_calls_that_cannot_follow(engines, call, message):
    runner = FollowingRunner.__new__(FollowingRunner)
    runner._step = runner._tier_copies = None
    vars(runner).update(_batch=engines[1]._runner._batch)
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        runner.execute(call)


def test_a_call_that_there_is_not(engines):
    with pytest.raises(CallError, match=r"^no call is named 'sort', or it does not follow this"):
        engines[1]._runner.execute(decode_call(encode_call(Call("sort"))))
