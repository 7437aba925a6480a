"""`radixkv.LLM` with a host tier and storage: two keywords, and a second process finds the KV."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.kvcache.storage import StorageInUseError, StorageUrlError, open_storage
from radixkv.kvcache.tiers import state
from radixkv.scheduler import ConfigError, GenerationParams, PrefixHits
from radixkv.scheduler.models import make_tiny_checkpoint

from .conftest import let_copies_end
from .test_engine_tiers import LONG_S
from .test_exit import LAST

BLOCK_SIZE = 4
BYTES_PER_BLOCK = 4096
SIZES: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_blocks": 16,
    "max_model_len": 60,
    "max_running": 2,
    "token_budget": 16,
}
PROMPT = list(range(1, 42))
NUM_CACHED = 40
PARAMS = GenerationParams(max_tokens=6)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let storage wait for a slow disk."""
    monkeypatch.setattr(state, "STORAGE_TIMEOUT_S", LONG_S)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llm")
    make_tiny_checkpoint(directory, "qwen3")
    return directory


def generate(llm: radixkv.LLM, prompt: list[int]) -> tuple[tuple[int, ...], PrefixHits]:
    [output] = llm.generate([prompt], PARAMS)
    return output.token_ids, output.hits


OTHERS = [list(range(100 * i, 100 * i + 41)) for i in range(1, 4)]
"""Prompts that take all blocks of the device, one after another."""


def test_the_host_keeps_what_the_device_evicts(model_directory):
    with radixkv.LLM(model_directory, host_memory=101 * BYTES_PER_BLOCK, **SIZES) as llm:
        assert llm.sizes.host_blocks == 100
        assert llm.sizes.bytes_per_block == BYTES_PER_BLOCK
        assert str(llm.sizes).endswith("; 100 blocks on the host take 404 KiB")
        tokens, hits = generate(llm, PROMPT)
        assert hits == PrefixHits()
        for other in OTHERS:
            generate(llm, other)
        let_copies_end(llm.engine._runner)
        again, hits = generate(llm, PROMPT)
        assert again == tokens
        assert hits.host > 0 and hits.device + hits.host == NUM_CACHED


SECOND = """
import json, sys
import radixkv
from radixkv.kvcache.tiers import state
from radixkv.scheduler import GenerationParams

state.STORAGE_TIMEOUT_S = 1000.0
with radixkv.LLM(sys.argv[1], storage=sys.argv[2], **json.loads(sys.argv[3])) as llm:
    [output] = llm.generate([json.loads(sys.argv[4])], GenerationParams(max_tokens=6))
    print(json.dumps([output.token_ids, output.hits, llm.sizes.host_blocks]))
"""


def test_a_second_process_finds_the_kv_in_storage(model_directory, tmp_path):
    url = (tmp_path / "blocks").as_uri()
    command = [
        sys.executable,
        "-c",
        SECOND,
        model_directory,
        url,
        *map(json.dumps, (SIZES, PROMPT)),
    ]
    (first, second) = (
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    assert first == [first[0], [0, 0, 0], 16]
    assert second == [first[0], [0, 0, NUM_CACHED], 16]
    # This process does, too; a host tier of its own size is enough.
    with radixkv.LLM(
        model_directory, storage=url, host_memory=13 * BYTES_PER_BLOCK, preempt="storage", **SIZES
    ) as llm:
        assert llm.sizes.host_blocks == 12
        assert generate(llm, PROMPT) == (tuple(first[0]), PrefixHits(storage=NUM_CACHED))
        with pytest.raises(StorageInUseError):
            open_storage(url, None)


def test_an_async_engine_closes_the_storage(model_directory, tmp_path):
    url = (tmp_path / "blocks").as_uri()

    async def main() -> list[PrefixHits]:
        hits = []
        async with radixkv.LLM(model_directory, storage=url, **SIZES).serve() as engine:
            for prompt in (PROMPT, *OTHERS, PROMPT):
                await engine.call(lambda engine: let_copies_end(engine._runner))
                [*_, last] = [output async for output in engine.generate(prompt, PARAMS)]
                hits.append(last.hits)
        return hits

    first, *_, last = asyncio.run(main())
    assert sum(first) == 0
    assert sum(last) == NUM_CACHED and last.device < NUM_CACHED
    open_storage(url, None).close()


def test_a_storage_of_the_caller_stays_open(model_directory, tmp_path):
    url = (tmp_path / "blocks").as_uri()
    storage = open_storage(url, None, max_bytes=2**20)
    for expected in (PrefixHits(), PrefixHits(storage=NUM_CACHED)):
        with radixkv.LLM(model_directory, storage=storage, **SIZES) as llm:
            assert generate(llm, PROMPT)[1] == expected
    assert storage.close()


def test_a_host_tier_without_room(model_directory):
    with pytest.raises(ConfigError) as caught:
        radixkv.LLM(model_directory, host_memory=2 * BYTES_PER_BLOCK - 1, **SIZES)
    assert str(caught.value) == (
        "host_memory of 8,191 bytes has no room for blocks of 4 KiB: 2 need 8,192 bytes, one of "
        "them as padding"
    )


def test_what_cannot_be_made_leaves_no_storage_open(model_directory, tmp_path):
    url = (tmp_path / "blocks").as_uri()
    with pytest.raises(StorageUrlError):
        radixkv.LLM(model_directory, storage="/var/tmp/blocks", **SIZES)
    with pytest.raises(ConfigError, match=r"^max_model_len must be at most the model's 8192 pos"):
        too_long = SIZES | {"num_blocks": 3_000, "max_model_len": 10_000}
        radixkv.LLM(model_directory, storage=url, **too_long)
    with pytest.raises(TypeError):
        radixkv.LLM(model_directory, storage=url, colour="red", **SIZES)
    open_storage(url, None).close()


UNCLOSED = LAST + SECOND.replace("with radixkv.LLM(", "llm = radixkv.LLM(").replace(
    ") as llm:\n    ", ")\nif True:\n    "
)


def test_a_program_may_end_without_closing(model_directory, tmp_path):
    url = (tmp_path / "blocks").as_uri()
    command = [sys.executable, "-c", UNCLOSED, model_directory, url]
    command += map(json.dumps, (SIZES, PROMPT))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1:], done.stderr) == (0, ["[]"], "")
