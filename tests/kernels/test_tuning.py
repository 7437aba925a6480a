"""Lookup of measured configurations by shape; the rules serve all other shapes."""

import json
from functools import partial

import pytest

from radixkv.kernels import paged_decode, tuning
from radixkv.kernels.paged_decode.api import config_for
from radixkv.kernels.paged_decode.config import DecodeConfig, choose_config
from radixkv.kernels.paged_extend.api import config_for as extend_config_for
from radixkv.kernels.paged_extend.config import ExtendConfig
from radixkv.kernels.paged_extend.config import choose_config as extend_rule

from .lowering import H100, lowered_for_h100, on_h100, shaped

SHAPE = {"dtype": "bfloat16", "head_dim": 128, "group": 4, "block_size": 16}
ENTRY = SHAPE | {
    "rows": 512,
    "tokens": 4096,
    "config": {"tile_tokens": 128, "stages": 3, "programs": 200},
}


EXTEND = SHAPE | {"tokens": 128, "config": {"block_kv": 64, "stages": 3, "overlap": True}}


@pytest.fixture
def one_entry(tmp_path, monkeypatch):
    """A table for an H100 with one entry for each kernel."""
    about = {
        "device_kind": H100.device_kind,
        "paged_decode": [ENTRY],
        "paged_extend": [EXTEND],
    }
    (tmp_path / "nvidia_h100_80gb_hbm3.json").write_text(json.dumps(about))
    monkeypatch.setattr(tuning, "_folder", lambda: tmp_path)
    tuning._table.cache_clear()
    yield
    tuning._table.cache_clear()


def arguments(batch=64, width=256):
    pool = shaped((1025, 8, 16, 128), "bfloat16")
    q = shaped((batch, 32, 128), "bfloat16")
    return q, pool, pool, shaped((batch, width), "int32"), shaped((batch,), "int32")


def config(*args):
    q, pool, _, tables, _ = args
    with on_h100():
        return config_for(q.shape[1], pool, tables)


def extend_config(tokens, q_heads=32, head_dim=128, block_size=16, dtype="bfloat16"):
    q = shaped((tokens, q_heads, head_dim), "bfloat16")
    with on_h100():
        return extend_config_for(q, shaped((1025, 8, block_size, head_dim), dtype))


@pytest.mark.usefixtures("one_entry")
class TestWithATable:
    # 64 rows of 8 KV heads, 256 blocks of 16 tokens; and sizes in the same buckets.
    @pytest.mark.parametrize(("batch", "width"), [(64, 256), (33, 129)])
    def test_a_measured_shape(self, batch, width):
        assert config(*arguments(batch, width)) == DecodeConfig(**ENTRY["config"])

    @pytest.mark.parametrize(("batch", "width"), [(65, 256), (32, 256), (64, 257), (64, 128)])
    def test_the_rule_serves_other_buckets(self, batch, width):
        assert config(*arguments(batch, width)) == choose_config(batch, 8, 128, 2, 132)

    def test_the_kernel_is_lowered_with_it(self):
        text = lowered_for_h100(partial(paged_decode, sm_scale=0.1), *arguments())
        assert f"{64 * 8 + 200}x4x128xf32" in text  # the parts

    @pytest.mark.parametrize("tokens", [65, 128])
    def test_extend_of_a_measured_shape(self, tokens):
        config = ExtendConfig(132, **EXTEND["config"])
        assert extend_config(tokens) == config != extend_rule(128, 132)

    @pytest.mark.parametrize(
        ("tokens", "q_heads", "head_dim", "block_size", "dtype"),
        [
            (64, 32, 128, 16, "bfloat16"),
            (129, 32, 128, 16, "bfloat16"),
            (128, 64, 128, 16, "bfloat16"),
            (128, 32, 64, 16, "bfloat16"),
            (128, 32, 128, 32, "bfloat16"),
            (128, 32, 128, 16, "int8"),
        ],
    )
    def test_the_rule_serves_other_shapes_of_extend(
        self, tokens, q_heads, head_dim, block_size, dtype
    ):
        found = extend_config(tokens, q_heads, head_dim, block_size, dtype)
        assert found == extend_rule(head_dim, 132)

    def test_other_kernels_and_devices_have_none(self):
        assert tuning.tuned("kv_write", H100.device_kind, **SHAPE) is None
        assert tuning.tuned("paged_decode", "NVIDIA H200", **SHAPE) is None


def test_every_table_that_is_shipped_can_be_used():
    for path in tuning._folder().iterdir() if tuning._folder().is_dir() else ():
        table = json.loads(path.read_text())
        assert path.name == tuning.file_name(table["device_kind"])
        assert table["measured"]["time"]
        for entry in table.get("paged_decode", []):
            DecodeConfig(**entry["config"])
        for entry in table.get("paged_extend", []):
            ExtendConfig(132, **entry["config"])


def test_buckets():
    assert [tuning.bucket(n) for n in (0, 1, 2, 3, 4, 5, 4096, 4097)] == [
        1, 1, 2, 4, 4, 8, 4096, 8192,
    ]  # fmt: skip
