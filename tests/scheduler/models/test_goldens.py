"""Our forward pass against transformers, through a paged cache with scattered blocks."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from radixkv.scheduler.models import Model, RopeConfig

from . import reference

CASES = ("llama", "qwen3", "llama_biases_linear_rope")
MAX_LOGIT_DIFFERENCE = 1e-4


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def test_checkpoint_is_the_one_of_the_goldens(goldens, golden_directory, case):
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(golden_directory(case) / "model.safetensors").items()):
        digest.update(name.encode() + tensor.tobytes())
    assert digest.hexdigest() == goldens["cases"][case]["sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [384, 23, 1])
def test_greedy_tokens_equal_transformers(goldens, golden_model, make_runner, case, chunk):
    for golden in goldens["cases"][case]["prompts"]:
        runner = make_runner(golden_model(case))
        logits = runner.prefill(golden["prompt"], chunk=chunk)
        assert runner.decode_greedily(logits, 64) == golden["tokens"]


def test_logits_agree_with_transformers(goldens, golden_model, make_runner, case):
    stride = goldens["logit_stride"]
    for golden in goldens["cases"][case]["prompts"]:
        runner = make_runner(golden_model(case))
        tokens = golden["prompt"] + golden["tokens"]
        for position, expected in golden["logits"].items():
            start, stop = int(runner.computed[0]), int(position) + 1
            # Chunks of one compiled shape; other chunks give the same tokens (above).
            logits = runner.prefill(tokens[start:stop], chunk=64)
            assert logits.dtype == np.float32
            difference = np.abs(logits[::stride] - np.array(expected)).max()
            assert difference < MAX_LOGIT_DIFFERENCE, f"position {position}: {difference}"


def test_the_oracle_of_long_contexts_agrees_with_transformers(goldens, golden_model, case):
    """`reference` is not needed where transformers' own results are; far from there it is."""
    stride, model = goldens["logit_stride"], golden_model(case)
    for golden in goldens["cases"][case]["prompts"]:
        positions = [int(position) for position in golden["logits"]]
        tokens = golden["prompt"] + golden["tokens"]
        logits = reference.logits_at(model.config, model.params, tokens, positions)
        expected = np.array([*golden["logits"].values()])
        assert np.abs(logits[:, ::stride] - expected).max() < MAX_LOGIT_DIFFERENCE


def test_decode_and_extend_give_the_same_logits(goldens, golden_model, make_runner, case):
    golden = goldens["cases"][case]["prompts"][2]
    runner = make_runner(golden_model(case))
    runner.prefill(golden["prompt"], chunk=384)
    decoded = runner.step({0: golden["tokens"][:1]}, decode=True)
    runner.computed[0] -= 1
    extended = runner.step({0: golden["tokens"][:1]})
    np.testing.assert_allclose(decoded, extended, atol=MAX_LOGIT_DIFFERENCE, rtol=0)


@pytest.mark.slow
def test_requests_in_one_batch_do_not_meet(goldens, golden_model, make_runner, case):
    prompts = goldens["cases"][case]["prompts"][:3]
    runner = make_runner(golden_model(case), num_rows=5)
    rows = (3, 0, 2)  # the others stay padding
    # One step holds the three prompts, each as a ragged chunk.
    logits = runner.step({row: golden["prompt"] for row, golden in zip(rows, prompts, strict=True)})
    tokens = {row: [int(logits[row].argmax())] for row in rows}
    for step in range(63):
        # A step of decodes alone, or the same as an extend step of one-token chunks.
        chunks = {row: tokens[row][-1:] for row in rows}
        logits = runner.step(chunks, decode=step % 2 == 0)
        assert np.isfinite(logits).all()
        for row in rows:
            tokens[row].append(int(logits[row].argmax()))
    for row, golden in zip(rows, prompts, strict=True):
        assert tokens[row] == golden["tokens"]


def test_masked_write_recomputes_a_token_and_leaves_its_block(goldens, golden_model, make_runner):
    golden = goldens["cases"]["qwen3"]["prompts"][1]  # 16 tokens: one full block
    runner = make_runner(golden_model("qwen3"))
    first = runner.prefill(golden["prompt"], chunk=384)
    before = [np.asarray(pool) for pool in runner.k_pools + runner.v_pools]
    runner.computed[0] = 15
    again = runner.step({0: golden["prompt"][-1:]}, masked=16)[0]
    after = [np.asarray(pool) for pool in runner.k_pools + runner.v_pools]
    np.testing.assert_allclose(again, first, atol=MAX_LOGIT_DIFFERENCE, rtol=0)
    for old, new in zip(before, after, strict=True):
        # Block 0 is the sink: masked writes may land there.
        np.testing.assert_array_equal(old[1:], new[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama", {"rope": RopeConfig(10_000.0)}),
        ("llama_biases_linear_rope", {"rope": RopeConfig(50_000.0)}),
        ("qwen3", {"rms_norm_eps": 1e-2}),
    ],
)
def test_goldens_notice_a_wrong_setting(goldens, golden_model, make_runner, case, change):
    golden = goldens["cases"][case]["prompts"][3]
    model = golden_model(case)
    wrong = Model(replace(model.config, **change), model.params)
    runner = make_runner(wrong)
    logits = runner.prefill(golden["prompt"], chunk=384)
    assert runner.decode_greedily(logits, 64) != golden["tokens"]


def test_goldens_are_far_from_rounding(goldens):
    assert goldens["versions"].keys() == {"torch", "transformers", "numpy"}
    for case in CASES:
        for golden in goldens["cases"][case]["prompts"]:
            assert golden["gap"] >= goldens["min_gap"] == 0.005
            assert len(golden["tokens"]) == 64
