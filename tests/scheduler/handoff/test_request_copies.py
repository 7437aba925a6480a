"""Copies of a request on its way through gateway and nodes: each has all that it does not change.

The arguments come from the signature of `Request`, so a new one is either copied or listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Final

import pytest

from radixkv.scheduler import PrefillScheduler, Request, SamplingParams
from radixkv.scheduler.gateway.gateway import Gateway, RunAttempt
from radixkv.scheduler.gateway.router import CacheSize
from radixkv.scheduler.handoff import AttemptKey, Header
from radixkv.scheduler.handoff.attempts import make_ask, request_of
from radixkv.scheduler.handoff.gateway_messages import RunPrefill
from radixkv.scheduler.nodes.channel.codec import Packet, decode, encode

from .prefill_harness import scheduler

GIVEN: Final[dict[str, Any]] = {
    "prompt": [5, 6, 7],
    "max_new_tokens": 4,
    "priority": 3,
    "sampling": SamplingParams(0.5, 2, 0.75, 9, 0.125, 1.5, 0.25, -0.5, 1),
    "stop_token_ids": [2, 8],
    "namespace": b"tenant",
    "logprobs": 1,
}
"""Each argument with another value than its default, but for those that no node takes."""
NOT_BY_NODES: Final = {"request_id", "prompt_logprobs", "guide", "sample_of"}


def of_gateway(request: Request) -> Request:
    gateway = Gateway()
    gateway.add_prefill("p0", CacheSize(8, 4))
    gateway.add_decode("d0", CacheSize(8, 4))
    gateway.add_request(request, 0.0)
    gateway.tick(0.0)
    [run] = [action for action in gateway.take_actions() if isinstance(action, RunAttempt)]
    return run.request


def over_the_channel(request: Request) -> Request:
    run = RunPrefill.of(AttemptKey("a", 1), 1, request, "d0", "127.0.0.1:5")
    received = decode(encode(Packet("gateway", "p0", 1, 1, run))).message
    assert isinstance(received, RunPrefill)
    return received.request()


def of_prefill(request: Request) -> Request:
    p: PrefillScheduler = scheduler()
    p.begin(request, "d0")
    [prompt] = p.waiting
    return prompt


def of_decode(request: Request) -> Request:
    return request_of(make_ask(Header(AttemptKey("a", 1), 1), request, 4, 1))


@pytest.mark.parametrize(
    ("copy", "changed"),
    [
        (of_gateway, set()),
        (over_the_channel, set()),
        (of_prefill, {"max_new_tokens", "stop_token_ids"}),
        (of_decode, {"sampling", "stop_token_ids", "logprobs"}),  # they come with COMMIT
    ],
)
def test_a_copy_of_a_request_has_all_that_it_does_not_change(
    copy: Callable[[Request], Request], changed: set[str]
) -> None:
    parameters = signature(Request).parameters
    assert parameters.keys() == GIVEN.keys() | NOT_BY_NODES
    for name, value in GIVEN.items():
        assert value != parameters[name].default
    request = Request("a", **GIVEN)
    copied = copy(request)
    for name in GIVEN.keys() - changed:
        value, original = getattr(copied, name), getattr(request, name)
        assert (value == original).all() if name == "prompt" else value == original, name
    if copy is not of_decode:  # P samples the first token, which must not stop the request too soon
        assert copied.late_token_ids == {2, 8}
