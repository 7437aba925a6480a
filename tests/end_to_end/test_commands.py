"""`radixkv generate` as a user runs it: a process of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .small import NUM_BLOCKS, PROMPTS, generate


@pytest.mark.slow
def test_one_process_gives_the_tokens_of_the_engine(
    model_dir: Callable[[str], Path], tmp_path: Path, small_outputs: list[list[int]]
) -> None:
    results = generate(model_dir("qwen3"), tmp_path, "--device-blocks", NUM_BLOCKS)
    assert results["outputs"] == small_outputs
    stats = results["stats"]
    prompt_tokens = sum(map(len, PROMPTS))
    assert stats["scheduler"]["hit_tokens"] > 0
    assert stats["scheduler"]["hit_tokens"] + stats["prefill_tokens_computed"] == prompt_tokens
    assert stats["compilations_at_warm_up"] > 0
    assert stats["compilations_after_warm_up"] == 0
