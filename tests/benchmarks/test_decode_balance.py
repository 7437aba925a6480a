"""The model of `benchmarks/decode_balance.py`, which predicts how evenly a batch is divided."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
decode_balance = import_module("decode_balance")
sys.path.remove(BENCHMARKS)


MIXED = ("34 x 4k", "1 x 128k, 63 x 1k", "8 x 32k, 56 x 1k", "256 rows, 64k / i")


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_batch_uses_the_bandwidth(name):
    lengths = decode_balance.BATCHES[name]
    assert all(decode_balance.predicted(lengths, kv_heads) >= 0.85 for kv_heads in (8, 4))


# What the model predicts of one thread block per row and KV head.
@pytest.mark.parametrize(("name", "before"), [("64 x 4k", 0.93), ("256 x 1k", 0.90)])
def test_nothing_is_lost_on_a_rectangle(name, before):
    assert decode_balance.predicted(decode_balance.BATCHES[name], 8) >= before


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_batch_of_latents_uses_the_tensor_cores(name):
    """The rest is the first latency, changes of work tiles, and the merge."""
    balance = decode_balance
    alone = balance.LATENT_PRODUCT_SECONDS / balance.LATENT_TILE_SECONDS
    assert balance.predicted_latent(balance.BATCHES[name]) >= 0.74 * alone


@pytest.mark.parametrize(
    ("name", "rate", "bandwidth"),
    [
        ("8,192 new", 450e12, 0),
        ("128 new, 32k cached", 300e12, 0),
        ("8 new, 32k cached", 0, 0.6),
        ("512 new, and 63 x 1 new, 4k cached", 0, 0.85),
    ],
)
def test_work_tiles_of_extend_fill_the_gpu(name, rate, bandwidth):
    predicted = decode_balance.predicted_extend(decode_balance.EXTENDS[name])
    assert predicted.flops_per_s >= rate and predicted.bandwidth >= bandwidth
    assert predicted.if_whole >= 0.999
