"""Nodes whose blocks differ in size give the tokens of one engine."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.engine import Engine
from radixkv.scheduler.handoff import Timing
from radixkv.scheduler.models import load_model, make_tiny_checkpoint
from radixkv.scheduler.nodes import DecodeEngine, Disaggregated, PrefillEngine
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport
from radixkv.scheduler.request import Request

from .conftest import complete

SIZES: dict[str, Any] = {"token_budget": 8, "max_running": 4, "max_model_len": 40}
PREFIX = [(11 * i) % 250 + 2 for i in range(17)]
PROMPTS = [[*PREFIX, 3], [*PREFIX[:13], 4, 5], PREFIX, [7], PREFIX[:12], [9, *PREFIX]]


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(4, 6), (6, 4)])
def test_nodes_with_different_blocks_give_the_tokens_of_one_engine(
    tmp_path: Path, prefill: int, decode: int
) -> None:
    make_tiny_checkpoint(tmp_path, overrides={"num_hidden_layers": 2, "vocab_size": 256})
    model = load_model(tmp_path)
    engine = Engine(model, block_size=4, num_blocks=64, **SIZES)
    expected = [complete(engine, [prompt], 6)[0] for prompt in PROMPTS]
    exchange, ticks = InProcessExchange(), count()
    options: dict[str, Any] = {"num_blocks": 64, "timing": Timing(), **SIZES}
    nodes = (
        PrefillEngine(
            model, InProcessTransport(exchange), block_size=prefill, epoch=1, now=0.0, **options
        ),
        DecodeEngine(
            model, InProcessTransport(exchange), block_size=decode, epoch=1, now=0.0, **options
        ),
    )
    front = Disaggregated([nodes[0]], [nodes[1]], clock=lambda: next(ticks) * 0.001)
    requests = [Request(str(place), prompt, 6) for place, prompt in enumerate(PROMPTS)]
    for request in requests:
        front.add_request(request)
        front.run()  # the next prompt finds what this one has left on both nodes
    assert front.failures == {}
    assert [list(request.output_tokens) for request in requests] == expected
    assert requests[1].num_hit_tokens > 0
    assert [each.engine.compilations_after_warm_up for each in front.stats().values()] == [0, 0]
    for node in nodes:
        node.manager.check()
        assert node.manager.stats().private_blocks == 0
    assert front.close()
