"""Prompts that end around every size at which a step or a kernel cuts its work, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from radixkv.kernels.paged_decode import config as decode
from radixkv.kernels.paged_extend import config as extend
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.models import Model
from radixkv.scheduler.request import Request

from ..scheduler.models.reference import logits_at

BLOCK_SIZE: Final = 16
TOKEN_BUDGET: Final = 96
BUCKETS: Final = (32, TOKEN_BUDGET)
NEW_TOKENS: Final = 3
EDGES: Final = sorted({
    BLOCK_SIZE, *BUCKETS, 2 * TOKEN_BUDGET, extend.TILE_TOKENS, extend.CHUNK_TOKENS,
    decode.CHUNK_TOKENS,
})  # fmt: skip
"""Sizes of a block, of the compiled steps and of the kernels, in tokens."""


@pytest.fixture(scope="module")
def small(model: Callable[[str], Model]) -> Engine:
    """One request at a time, and no prompt finds another's blocks."""
    served = Engine(
        model("llama"),
        block_size=BLOCK_SIZE,
        num_blocks=40,
        token_budget=TOKEN_BUDGET,
        max_running=1,
        max_model_len=EDGES[-1] + 1 + NEW_TOKENS,
        prefix_cache=False,
        depth=1,
    )
    shapes = served._runner._shapes.extend
    assert [shape.num_tokens for shape in shapes] == [*BUCKETS]
    return served


@pytest.mark.parametrize("edge", EDGES)
def test_logits_at_the_edge(small: Engine, model: Callable[[str], Model], edge: int) -> None:
    """A prompt with one token less, of the size, and one more; decode goes on over the edge."""
    for length in (edge - 1, edge, edge + 1):
        prompt = np.random.default_rng(length).integers(2, 1000, length).tolist()
        request, found = Request(str(length), prompt, NEW_TOKENS), []
        small.add_request(request)
        while small.has_work:
            before = len(request.output_tokens)
            small.step()
            if len(request.output_tokens) > before:
                found.append(np.asarray(small._runner._programs.logits)[0].astype(np.float64))
        tokens = [*prompt, *request.output_tokens]
        positions = range(length - 1, len(tokens) - 1)
        exact = logits_at(model("llama").config, model("llama").params, tokens, positions)
        np.testing.assert_allclose(found, exact, atol=2e-4, rtol=0)
