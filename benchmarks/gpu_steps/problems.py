"""The measured problems: shapes, and the bytes and FLOPs of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Record = dict[str, Any]


class Latent(NamedTuple):
    """Query heads that share a latent, its elements, and those that are the value."""

    q_heads: int
    latent_dim: int
    value_dim: int


class Row(NamedTuple):
    """One sequence of an extend call."""

    new: int
    cached: int


class Kind(NamedTuple):
    """The head_dim, the dtype of the pools, and the query heads of a KV head."""

    head_dim: int
    dtype: str
    group: int


@dataclass(frozen=True)
class ModelSizes:
    """The model of the engine, and its load."""

    config: dict[str, Any]
    """Entries of a config.json of Hugging Face."""
    rows: int
    """Requests that decode together."""
    prompt_tokens: int
    steps: int
    """Decode steps that are timed."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all problems of a run; `TINY` has the same structure as `FULL`."""

    kv_heads: int
    kind: Kind
    """The heads and pools of all problems that name no other."""
    block_sizes: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    """(batch, length)."""
    mixed: dict[str, tuple[int, ...]]
    """Lengths of the rows of one decode call, which peers do not run."""
    kinds: tuple[Kind, ...]
    """Other heads and pools, for the first problem of `decode` and, tuned, of `extend`."""
    latent: Latent
    """For the first problem of `decode`, by `latent_decode`."""
    extend: dict[str, tuple[Row, ...]]
    tuned_extend: tuple[str, ...]
    """Names of problems of `extend` whose launch configuration is tuned."""
    moved_blocks: tuple[int, ...]
    moved_pools: int
    """Number of K and V pools, those of a few layers."""
    written_tokens: int
    pool_tokens: int
    """KV tokens of a pool. Calls read different ones, so that a 60 MB cache cannot hold them."""
    copy_bytes: int
    matrix: int
    calls: int
    """Maximum calls in one compiled program."""
    launches: int
    """Programs started in one timed round."""
    rounds: int
    """Timed rounds, of which the median is used."""
    model: ModelSizes

    @property
    def q_heads(self) -> int:
        """Query heads of `kind`."""
        return self.kv_heads * self.kind.group

    @property
    def head_dim(self) -> int:
        """Elements of a head of `kind`."""
        return self.kind.head_dim

    def kv_bytes(self, tokens: int, kind: Kind | None = None) -> int:
        """Bytes of K and V of `tokens` tokens."""
        kind = kind or self.kind
        itemsize = 2 if kind.dtype == "bfloat16" else 1
        return 2 * self.kv_heads * kind.head_dim * itemsize * tokens

    def attention_flops(self, rows: tuple[Row, ...], kind: Kind | None = None) -> int:
        """FLOPs of both matrix products of causal attention."""
        kind = kind or self.kind
        pairs = sum(new * cached + new * (new + 1) // 2 for new, cached in rows)
        return 4 * self.kv_heads * kind.group * kind.head_dim * pairs


RAGGED = tuple(
    Row(*row)
    for row in (
        *((1, 1000 + 777 * i) for i in range(8)),
        *((2048, 0), (1000, 3000), (512, 8192), (333, 5), (1536, 512), (64, 20_000)),
        *((700, 700), (2000, 100)),
    )
)

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
"""The shapes of Llama 3 8B."""

FULL = Sizes(
    kv_heads=8,
    kind=Kind(128, "bfloat16", 4),
    block_sizes=(64, 16, 128),
    decode=((64, 4096), (256, 1024), (8, 8192), (1, 32768)),
    mixed={
        "1 x 128k + 63 x 1k": (131_072, *[1024] * 63),
        "8 x 32k + 56 x 1k": (*[32_768] * 8, *[1024] * 56),
        "34 x 4096": (4096,) * 34,
        "256 rows, 64k / rank": tuple(max(512, 65_536 // (i + 1)) for i in range(256)),
    },
    kinds=(
        Kind(64, "bfloat16", 8),
        Kind(128, "bfloat16", 8),
        Kind(256, "bfloat16", 4),
        Kind(128, "int8", 4),
        Kind(128, "float8_e4m3fn", 4),
    ),
    latent=Latent(128, 576, 512),  # DeepSeek-V3
    extend={
        "8192 new": (Row(8192, 0),),
        "2048 new, 16k cached": (Row(2048, 16384),),
        "512 new, 32k cached": (Row(512, 32768),),
        "128 new, 32k cached": (Row(128, 32768),),
        "8 new, 32k cached": (Row(8, 32768),),
        "512 new, and 63 x 1 new, 4k cached": (Row(512, 0), *[Row(1, 4095)] * 63),
        "16 ragged rows": RAGGED,
    },
    tuned_extend=("8192 new", "512 new, 32k cached", "128 new, 32k cached"),
    moved_blocks=(64, 256, 1024),
    moved_pools=8,
    written_tokens=8192,
    pool_tokens=512 * 1024,
    copy_bytes=2 << 30,
    matrix=8192,
    calls=16,
    launches=10,
    rounds=5,
    model=ModelSizes(LLAMA_8B, rows=64, prompt_tokens=1024, steps=100),
)

TINY = Sizes(
    kv_heads=2,
    kind=Kind(16, "bfloat16", 2),
    block_sizes=(64, 16),
    decode=((2, 128),),
    mixed={"1 x 200 + 2 x 9": (200, 9, 9)},
    kinds=(Kind(32, "bfloat16", 1), Kind(16, "int8", 2)),
    latent=Latent(4, 24, 16),
    extend={"2 ragged rows": (Row(1, 9), Row(8, 3))},
    tuned_extend=("2 ragged rows",),
    moved_blocks=(2,),
    moved_pools=2,
    written_tokens=8,
    pool_tokens=1024,
    copy_bytes=1 << 12,
    matrix=16,
    calls=2,
    launches=1,
    rounds=1,
    model=ModelSizes(
        LLAMA_8B
        | {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        rows=2,
        prompt_tokens=20,
        steps=4,
    ),
)
TINY_TUNED = replace(TINY, kind=Kind(64, "bfloat16", 2), kinds=(Kind(64, "int8", 2),))
"""`TINY` with heads that the Hopper kernels take: interpret mode runs them on a CPU."""

HEADLINE = 64
"""Block size for the comparison with peers."""


def point(batch: int, length: int) -> str:
    """Name of a decode problem."""
    return f"{batch} x {length}"
