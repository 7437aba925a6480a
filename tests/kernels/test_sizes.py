"""Every size at which a kernel cuts its work: one less, the size itself, and one more.

The sizes of an operation are the integers of its `config.py`. `test_every_size_has_its_edges` fails
for a size without an entry in `EDGES`, so a new one cannot do without.
"""

import ast
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv import kernels
from radixkv.kernels import batched_attention, mosaic_limits
from radixkv.kernels.block_copy import config as copy_config
from radixkv.kernels.block_copy import mosaic as copy_mosaic
from radixkv.kernels.kv_write import config as write_config
from radixkv.kernels.kv_write import mosaic as write_mosaic
from radixkv.kernels.latent_attention import config as latent_config
from radixkv.kernels.latent_attention import mosaic as latent_mosaic
from radixkv.kernels.online_softmax import AttentionOptions
from radixkv.kernels.paged_decode import batched as decode_batched
from radixkv.kernels.paged_decode import config as decode_config
from radixkv.kernels.paged_decode import merge as decode_merge
from radixkv.kernels.paged_decode import mosaic as decode_mosaic
from radixkv.kernels.paged_decode import work_list as decode_list
from radixkv.kernels.paged_decode import xla as decode_xla
from radixkv.kernels.paged_extend import batched as extend_batched
from radixkv.kernels.paged_extend import config as extend_config
from radixkv.kernels.paged_extend import shares as extend_shares
from radixkv.kernels.paged_extend import work_list
from radixkv.kernels.paged_extend import xla as extend_xla

from . import (
    oracle,
    test_block_copy_mosaic,
    test_kv_write_mosaic,
    test_latent_attention_mosaic,
    test_paged_decode_mosaic,
    test_paged_decode_work_list,
)
from .interpret import PARAMS, SEES_ASYNC_RACES
from .lowering import SHARED_MEMORY_BYTES, shaped
from .planted import planted
from .problems import Cache, Heads, assert_close, int32, make_cache, make_queries
from .test_paged_decode_merge import check_merge
from .test_paged_decode_work_list import check_work_list as check_decode_list
from .test_paged_extend_shares import check_shares as check_extend_shares
from .work_list_checks import BLOCK_KV, MAX_KV, TOKENS, check_rows

WINDOW = 100
SM_SCALE = 0.3


def one_sequence(length: int, block_size: int, heads: Heads) -> Cache:
    """A sequence in shuffled blocks; all rows read it, each as far as it is long."""
    blocks = -(-length // block_size)
    rng = np.random.default_rng(0)
    return make_cache(
        rng, [length], block_size=block_size, width=blocks, num_blocks=blocks + 3, heads=heads
    )


def check_jnp_decode(
    module: ModuleType,
    lengths: Sequence[int],
    block_size: int,
    most: int,
    heads: Heads = Heads(1, 1, 4),  # noqa: B008
) -> None:
    """Rows of these lengths, with a window and without, each compared alone."""
    made = one_sequence(most, block_size, heads)
    tables = jnp.tile(made.block_tables, (len(lengths), 1))
    q = make_queries(np.random.default_rng(1), len(lengths), heads)
    k, v, table = made.for_oracle
    for window in (None, WINDOW):
        options = AttentionOptions(SM_SCALE, None, window)
        found = module.decode(
            q, made.k_blocks, made.v_blocks, tables, int32(lengths), None, options
        )
        for row, length in enumerate(lengths):
            wanted = oracle.decode(
                q[row : row + 1], k, v, table, [length], sm_scale=SM_SCALE, window=window
            )
            for got, expected in zip(found, wanted, strict=True):
                assert_close(got[row : row + 1], expected, "float32")


def decode_chunk(module: ModuleType, distance: int) -> None:
    chunk = decode_config.CHUNK_TOKENS
    starts = [chunk, 2 * chunk, chunk + WINDOW, 2 * chunk + WINDOW, 3 * chunk - 8]
    check_jnp_decode(module, [0, *(start + distance for start in starts), 1], 4, 3 * chunk)


def decode_uneven_chunk(module: ModuleType, distance: int) -> None:
    """Blocks of 3 tokens, of which no number makes a chunk."""
    chunk = decode_config.CHUNK_TOKENS // 3 * 3
    starts = [chunk, 2 * chunk, chunk + WINDOW, 2 * chunk + WINDOW, 3 * chunk - 8]
    check_jnp_decode(module, [0, *(start + distance for start in starts), 1], 3, 3 * chunk)


def decode_width(module: ModuleType, distance: int) -> None:
    """A block table of about one chunk, and rows that fill it or have one token less."""
    tokens = decode_config.CHUNK_TOKENS + 4 * distance
    check_jnp_decode(module, [tokens, tokens - 1, tokens - 4, tokens - 5], 4, tokens)


def decode_step(module: ModuleType, distance: int) -> None:
    """About as many work items as one loop step takes; one of 128 tokens takes 64 KiB.

    And one work item that takes about as many bytes as a step.
    """
    chunk = decode_config.CHUNK_TOKENS
    widest = decode_config.STEP_BYTES // (4 * chunk)
    check_jnp_decode(module, [0, 5, chunk + 3], 128, 2 * chunk, Heads(1, 1, widest + distance))
    heads, block_size = Heads(1, 1, 128), 128
    items = decode_config.STEP_BYTES // (4 * block_size * heads.head_dim)
    assert items == 32
    made = one_sequence(9, block_size, heads)
    lengths = [0] * (items + 1)
    lengths[1 - distance :] = [1 + row % 9 for row in range(items + distance)]
    q = make_queries(np.random.default_rng(1), len(lengths), heads)
    options = AttentionOptions(SM_SCALE, None, None)
    tables = jnp.tile(made.block_tables, (len(lengths), 1))
    pools = made.k_blocks, made.v_blocks
    found = module.decode(q, *pools, tables, int32(lengths), None, options)
    k, v, table = made.for_oracle
    for row, length in enumerate(lengths):
        wanted = oracle.decode(q[row : row + 1], k, v, table, [length], sm_scale=SM_SCALE)
        for got, expected in zip(found, wanted, strict=True):
            assert_close(got[row : row + 1], expected, "float32")


def check_jnp_extend(
    module: ModuleType, rows: Sequence[tuple[int, int]], block_size: int, window: int | None
) -> None:
    """Rows of (KV tokens, queries) in reverse, so that a tile that ends in the next row meets
    outputs that are written already. The first and last tokens of each are compared alone."""
    most, num_tokens, heads = 2 * extend_config.CHUNK_TOKENS + 100, 720, Heads(1, 1, 4)
    made = one_sequence(most, block_size, heads)
    starts = [sum(number for _, number in rows[row + 1 :]) for row in range(len(rows))]
    assert sum(number for _, number in rows) <= num_tokens
    q = make_queries(np.random.default_rng(1), num_tokens, heads)
    kv_lengths, q_lengths = ([*each] for each in zip(*rows, strict=True))
    options = AttentionOptions(SM_SCALE, None, window)
    pools = made.k_blocks, made.v_blocks, jnp.tile(made.block_tables, (len(rows), 1))
    placed = kv_lengths, q_lengths, starts
    found = module.extend(q, *pools, *map(int32, placed), None, options)
    k, v, table = made.for_oracle
    tables = np.tile(table, (len(rows), 1))
    wanted = oracle.extend(q, k, v, tables, *placed, sm_scale=SM_SCALE, window=window)
    for got, expected in zip(found, wanted, strict=True):
        assert_close(got, expected, "float32")
        for start, (_, number) in zip(starts, rows, strict=True):
            for token in (start, start + number - 2, start + number - 1):
                assert_close(got[token], expected[token], "float32")


def extend_chunk(module: ModuleType, distance: int) -> None:
    """A tile's first and last token at the edge of a chunk, and a window that begins there."""
    chunk, tile = extend_config.CHUNK_TOKENS, extend_config.TILE_TOKENS
    edges = [edge + distance for edge in (chunk, 2 * chunk)]
    rows = [(edge + more, queries) for edge in edges for more, queries in ((0, 2), (10, 12))]
    check_jnp_extend(module, rows, 4, None)
    check_jnp_extend(module, [(edge + tile, 2) for edge in edges for _ in "ab"], 4, tile)


def extend_tile(module: ModuleType, distance: int) -> None:
    chunk, tile = extend_config.CHUNK_TOKENS, extend_config.TILE_TOKENS
    lengths = (tile + distance, 2 * tile + distance)
    rows = [(lengths[0], lengths[0]), (lengths[1], lengths[1]), (chunk + 1, lengths[0]), (9, 3)]
    check_jnp_extend(module, rows, 4, None)
    check_jnp_extend(module, rows, 4, tile)


def extend_uneven_chunk(module: ModuleType, distance: int) -> None:
    """Blocks of 3 tokens, of which no number makes a chunk."""
    chunk = extend_config.CHUNK_TOKENS // 3 * 3
    edges = [edge + distance for edge in (chunk, 2 * chunk)]
    check_jnp_extend(module, [(edge, 2) for edge in edges for _ in "ab"], 3, None)


@cache
def batched(module: ModuleType, operation: ModuleType) -> ModuleType:
    """A copy of an operation on GPUs that uses `module`, one of `batched_attention`."""
    copy = planted(operation, {})
    vars(copy)["attend_tiles"] = module.attend_tiles
    return copy


@cache
def batched_in_steps(module: ModuleType, small: int, whole: int) -> ModuleType:
    """The same of decode, with chunks of 4 tokens and steps of so many of them."""
    copy = planted(decode_batched, {})
    chunk_bytes = 4 * (2 * 4 * 4 + 4 + 4 + 4)  # of one head of 4 numbers, and one query
    sizes = batched_attention.BatchSizes(4, small * chunk_bytes, whole * chunk_bytes)
    vars(copy).update(attend_tiles=module.attend_tiles, decode=partial(copy.decode, sizes=sizes))
    return copy


def batched_decode_chunk(module: ModuleType, distance: int) -> None:
    chunk = decode_config.BATCHED_CHUNK_TOKENS
    starts = [chunk, 2 * chunk, chunk + WINDOW, 2 * chunk + WINDOW, 3 * chunk - 8]
    lengths = [0, *(start + distance for start in starts), 1]
    check_jnp_decode(batched(module, decode_batched), lengths, 4, 3 * chunk)


def batched_decode_step(module: ModuleType, distance: int) -> None:
    """About as many chunks as a small step has, a whole one, and two of these."""
    small, whole = 6, 12
    decode = batched_in_steps(module, small, whole)
    for chunks in (small, whole, 2 * whole):
        lengths = [5, 0, 4 * (chunks + distance - 4) - 1, 1, 4]
        check_jnp_decode(decode, lengths, 4, 4 * 2 * whole)


def batched_extend_chunk(module: ModuleType, distance: int) -> None:
    """A tile's first and last token at the edge of a chunk, and a window that begins there."""
    chunk = extend_config.BATCHED_CHUNK_TOKENS + distance
    extend = batched(module, extend_batched)
    check_jnp_extend(extend, [(chunk, 2), (chunk + 10, 12), (chunk - 3, 5), (9, 9)], 4, None)
    check_jnp_extend(extend, [(chunk + WINDOW // 2, 2), (chunk, 60), (chunk, 1)], 4, WINDOW // 2)


def batched_extend_tile(module: ModuleType, distance: int) -> None:
    tile = extend_config.BATCHED_TILE_ROWS + distance
    check_jnp_extend(module, [(tile, tile), (tile + 200, tile), (9, 3), (70, 1)], 4, None)


def largest_group_of_decode(module: ModuleType, distance: int) -> None:
    """The query heads of a KV head are the rows of a matrix."""
    q_heads = decode_config.WGMMA_ROWS + distance
    q, pool = shaped((3, q_heads, 64), "bfloat16"), shaped((9, 1, 16, 64), "bfloat16")
    assert (module.unsupported(q, pool) is None) == (distance <= 0)


def largest_group_of_extend(module: ModuleType, distance: int) -> None:
    """A tile has 8 tokens at least, so it has 16 heads at most; single tokens have 64."""
    most = extend_config.TILE_ROWS // extend_config.ALIGNMENT
    for group in (most + distance, 2 * most + distance, decode_config.WGMMA_ROWS + distance):
        heads = module.tile_heads_of(group)
        assert heads == max(n for n in range(1, most + 1) if group % n == 0)
        assert module.tile_tokens_of(heads) >= extend_config.ALIGNMENT
        q, pool = shaped((3, group, 64), "bfloat16"), shaped((9, 1, 16, 64), "bfloat16")
        assert (module.unsupported(q, pool, 1) is None) == (group <= decode_config.WGMMA_ROWS)


def tile_of_a_group(module: ModuleType, distance: int) -> None:
    """A tile takes as many tokens as fit, and not one more multiple of 8."""
    rows, alignment = extend_config.TILE_ROWS, extend_config.ALIGNMENT
    for tokens in range(alignment, rows, alignment):
        group = max(1, rows // tokens + distance)
        found = module.tile_tokens_of(group)
        assert found % alignment == 0 and found * group <= rows < (found + alignment) * group


def head_dim_of_columns(module: ModuleType, distance: int) -> None:
    """Threads move 64 columns at a time, or those of a swizzle tile: there are no others."""
    for head_dim in (64, 80, 96, 112, 128, 192, 256):
        q = shaped((3, 4, head_dim + distance), "bfloat16")
        pool = shaped((9, 1, 16, head_dim + distance), "bfloat16")
        found = module.unsupported_attention(q, pool)
        assert (found is None) == (distance == 0)


def thread_blocks_of_decode(module: ModuleType, distance: int) -> None:
    """They fill the GPU, but few pairs of a row and a KV head cannot use so many."""
    for cores in (8, 132):
        pairs = max(1, 2 * cores // decode_config.MAX_PARTS + distance)
        found = module.choose_config(pairs, 1, 128, 2, cores).programs
        assert found == min(2 * cores, decode_config.MAX_PARTS * pairs)
        assert found == module.choose_config(1, pairs, 64, 2, cores).programs
        assert module.choose_config(64, 8, 256, 2, cores).programs == cores


def shares_of_decode(module: ModuleType, distance: int) -> None:
    """Two tiles for each thread block, or one tile fewer or more in all."""
    for programs in (1, 5):
        tiles = max(1, programs * decode_config.SMALLEST_SHARE + distance)
        for length in (64 * tiles, 64 * tiles - 63):
            check_decode_list([length], 1, programs, module=module)
        check_decode_list([64] * tiles, 1, programs, module=module)


def merged_parts(module: ModuleType, distance: int) -> None:
    """As many parts as the merge reads at a time, or one fewer or more; and one part."""
    size = decode_config.MERGE_PARTS
    check_merge([size + distance, 1, 2 * size + distance], 1, 128, module)


def merged_vectors(module: ModuleType, distance: int) -> None:
    """As many query heads as a thread block of the merge has arrays."""
    check_merge([2], decode_config.MERGE_VECTORS + distance, 128, module)


def merged_heads(module: ModuleType, distance: int) -> None:
    """Heads of half an array, of one, and of two."""
    head_dim = decode_config.MERGE_VECTOR
    check_merge([3], 2, {-1: head_dim // 2, 0: head_dim, 1: 2 * head_dim}[distance], module)


def work_tiles(module: ModuleType, distance: int) -> None:
    """Rows that begin and end around multiples of 8, of tiles and of KV steps."""
    for tile_tokens, window in ((16, None), (16, BLOCK_KV)):
        for start in (0, 8, 16):
            for length in (tile_tokens, 2 * tile_tokens):
                first, number = max(start + distance, 0), length + distance
                placed = [
                    (MAX_KV + distance, 2, first),
                    (number, number, first + 2),
                    (4 * BLOCK_KV + distance, 3, first + 2 + number),
                    (BLOCK_KV + distance, 1, TOKENS - 1),
                ]
                check_rows(placed, tile_tokens, window, module)


def shares_of_extend(module: ModuleType, distance: int) -> None:
    """Tiles of about one, two and more smallest shares for each thread block."""
    size = extend_config.SMALLEST_SHARE
    for programs in (1, 5):
        for steps in (size, 2 * size, programs * size, 3 * programs * size):
            check_extend_shares([1] * 7 + [steps + distance], programs, module)
            *full, _ = filter(None, check_extend_shares([steps + distance], programs, module))
            assert not full or min(full) >= size


def tolerance_of_extend(module: ModuleType, distance: int) -> None:
    """The last wave lacks about a 16th of the steps of a fair share, or a tile has as many more."""
    size, programs = 4 * extend_config.TOLERANCE + distance, 4
    for missing in (0, 1, 2):
        check_extend_shares([size] * (3 * programs - missing), programs, module)
    for longer in (3, 4, 5):
        check_extend_shares([size + longer, *[size] * (programs - 1)], programs, module)


def launch_of_decode(module: ModuleType, distance: int) -> None:
    """The Mosaic kernel, simulated: tiles, stages of its pipeline, and shares."""
    tile, stages = 64, 3
    lengths = [tile * tiles + distance for tiles in (1, stages - 1, stages, stages + 1)]
    mosaic = test_paged_decode_mosaic
    for programs in (1, 2):
        config = decode_config.DecodeConfig(tile, stages, programs)
        mosaic.TestSimulated().check(
            lengths, heads=Heads(1, 1, 64), block_size=16, dtype="bfloat16", lse_dtype="float32",
            window=tile * 3 // 2,
            attend=partial(mosaic.attend, module=module, config=config),
        )  # fmt: skip


def lanes(module: ModuleType, distance: int) -> None:
    for rows in (1, 2):
        pool = shaped((3, 1, 1, rows * copy_config.LANES + distance), "int8")
        found = module.unsupported((pool,), shaped((4,), "int32"))
        assert (found is None) == (distance == 0)


def chunk_of_a_block(module: ModuleType, distance: int) -> None:
    """A block is cut into the largest equal chunks that fit."""
    for dtype in ("int8", "bfloat16", "float32"):
        row_bytes = copy_config.LANES * jnp.dtype(dtype).itemsize
        for edge in (copy_config.CHUNK_BYTES // row_bytes, copy_config.MAX_ROWS):
            for rows in (edge + distance, 2 * (edge + distance)):
                found = module.Chunks.of(shaped((3, 1, rows, copy_config.LANES), dtype))
                most = min(copy_config.CHUNK_BYTES // row_bytes, copy_config.MAX_ROWS)
                size = max(size for size in range(1, most + 1) if rows % size == 0)
                assert found == (rows // size, size)


def stages_of_copies(module: ModuleType, distance: int) -> None:
    """A block is one chunk here, and each program moves this number of them."""
    for run in test_block_copy_mosaic.RUNS.values():
        run(module, PARAMS, copy_config.STAGES + distance)


def programs_of_copies(module: ModuleType, distance: int) -> None:
    """Programs are divided among the pools, each of which has one at least."""
    for cores in (1, 8, 132):
        programs = copy_config.PROGRAMS_PER_CORE * cores
        for pools in (1, 2, programs // 2 + distance, programs + distance):
            if pools > 0:
                workers = module._workers(pools, cores)
                assert workers >= 1 and (workers == 1 or workers * pools <= programs)
                assert (workers + 1) * pools > programs


def pools_of_a_launch(module: ModuleType, distance: int) -> None:
    most = copy_config.POOLS_PER_LAUNCH
    for number in (most + distance, 2 * most + distance):
        pools = tuple(range(number))
        groups = module.in_launches(lambda group: [group], pools)
        assert sum(groups, ()) == pools and len(groups) == -(-number // most)
        assert max(map(len, groups)) <= most


def tokens_of_a_group(module: ModuleType, distance: int) -> None:
    """As many tokens as divide the step, fit a stage, and leave no program idle."""
    programs = 264
    for size in (8, 4, 2, 1):
        tokens = [programs * size + distance, (programs + distance) * size, 8192 + distance]
        for num_tokens in tokens:
            for token_bytes in (write_config.STAGE_BYTES // size + distance, 16):
                found = module.group_tokens(num_tokens, token_bytes, programs)
                fits = [
                    group
                    for group in (8, 4, 2)
                    if num_tokens % group == 0
                    and num_tokens >= programs * group
                    and group * token_bytes <= write_config.STAGE_BYTES
                ]
                assert found == max([1, *fits])
    assert write_config.MAX_GROUP == 8


def stages_of_writes(module: ModuleType, distance: int) -> None:
    """Two programs, one of which takes half of the tokens, or one more."""
    tokens = write_config.PROGRAMS_PER_CORE * write_config.STAGES + distance
    test_kv_write_mosaic.run_write(module, PARAMS, num_tokens=tokens)


def latents_of_one_shape(module: ModuleType, distance: int) -> None:
    """Other latents or values have no tiling."""
    latent_dim, value_dim = latent_config.LATENT_DIM, 2 * latent_config.HALF
    assert value_dim == latent_config.VALUE_DIM and value_dim % latent_config.COLUMNS == 0
    for dims in ((latent_dim + distance, value_dim), (latent_dim, value_dim + distance)):
        q = shaped((3, 4, dims[0]), "bfloat16")
        found = module.unsupported(q, shaped((9, 1, 16, dims[0]), "bfloat16"), dims[1], 3)
        assert (found is None) == (distance == 0)


def tiles_of_latent_heads(module: ModuleType, distance: int) -> None:
    """Query heads make tiles of 64, and shares fill what those leave of the multiprocessors."""
    for tiles in (1, 2):
        heads, blocks = tiles * latent_config.ROWS + distance, tiles + (distance > 0)
        most = decode_config.MAX_PARTS
        for tokens, shares in ((1, 1), (1, most), (1, most + 1), (2, most + 1), (2, 2 * most + 1)):
            cores = shares * blocks + distance
            found = module.choose_config(tokens, heads, cores).shares
            assert found == max(1, min(cores // blocks, tokens * most))


def tiles_of_latents(module: ModuleType, distance: int) -> None:
    """The work list of `paged_decode` with one KV head; `launch_of_latents` simulates the rest."""
    tokens = latent_config.TILE_TOKENS
    assert tokens == test_paged_decode_work_list.TILE
    for programs in (1, 2, 5):
        lengths = [0, tokens + distance, 2 * tokens + distance, 9 * tokens + distance]
        check_decode_list(lengths, 1, programs, module=module)


def stages_of_latents(module: ModuleType, distance: int) -> None:
    """As many as fit into shared memory beside queries, weights and 1 KiB of the rest."""
    tile = 2 * module.TILE_TOKENS * module.LATENT_DIM
    queries, weights = 2 * module.ROWS * module.LATENT_DIM, 2 * module.ROWS * module.TILE_TOKENS
    taken = queries + weights + 1024 + (module.STAGES + distance) * tile
    assert (taken <= SHARED_MEMORY_BYTES) == (distance <= 0)


def launch_of_latents(module: ModuleType, distance: int) -> None:
    """Rows of about one tile, and of one more than there are stages."""
    tokens = latent_config.TILE_TOKENS
    lengths = [tiles * tokens + distance for tiles in (1, latent_config.STAGES + 1)]
    config = latent_config.LatentConfig(shares=2)
    test_latent_attention_mosaic.check_decode(module, lengths, config=config)


class Edge(NamedTuple):
    """The module that is cut by a size, and the check at a distance of -1, 0 or 1."""

    module: ModuleType
    check: Callable[[ModuleType, int], None]


EDGES = {
    "block_copy.CHUNK_BYTES": Edge(copy_mosaic, chunk_of_a_block),
    "block_copy.LANES": Edge(copy_config, lanes),
    "block_copy.MAX_ROWS": Edge(copy_mosaic, chunk_of_a_block),
    "block_copy.POOLS_PER_LAUNCH": Edge(copy_mosaic, pools_of_a_launch),
    "block_copy.PROGRAMS_PER_CORE": Edge(copy_mosaic, programs_of_copies),
    "block_copy.STAGES": Edge(copy_mosaic, stages_of_copies),
    "kv_write.MAX_GROUP": Edge(write_mosaic, tokens_of_a_group),
    "kv_write.PROGRAMS_PER_CORE": Edge(write_mosaic, stages_of_writes),
    "kv_write.STAGES": Edge(write_mosaic, stages_of_writes),
    "kv_write.STAGE_BYTES": Edge(write_mosaic, tokens_of_a_group),
    "latent_attention.COLUMNS": Edge(latent_config, latents_of_one_shape),
    "latent_attention.HALF": Edge(latent_config, latents_of_one_shape),
    "latent_attention.LATENT_DIM": Edge(latent_config, latents_of_one_shape),
    "latent_attention.ROWS": Edge(latent_config, tiles_of_latent_heads),
    "latent_attention.STAGES": Edge(latent_config, stages_of_latents),
    "latent_attention.TILE_TOKENS": Edge(decode_list, tiles_of_latents),
    "latent_attention.VALUE_DIM": Edge(latent_config, latents_of_one_shape),
    "paged_decode.BATCHED_CHUNK_TOKENS": Edge(batched_attention, batched_decode_chunk),
    "paged_decode.BATCHED_SMALL_STEP_BYTES": Edge(batched_attention, batched_decode_step),
    "paged_decode.BATCHED_STEP_BYTES": Edge(batched_attention, batched_decode_step),
    "paged_decode.CHUNK_TOKENS": Edge(decode_xla, decode_chunk),
    "paged_decode.COLUMNS": Edge(mosaic_limits, head_dim_of_columns),
    "paged_decode.MAX_PARTS": Edge(decode_config, thread_blocks_of_decode),
    "paged_decode.MERGE_PARTS": Edge(decode_merge, merged_parts),
    "paged_decode.MERGE_VECTOR": Edge(decode_merge, merged_heads),
    "paged_decode.MERGE_VECTORS": Edge(decode_merge, merged_vectors),
    "paged_decode.SMALLEST_SHARE": Edge(decode_list, shares_of_decode),
    "paged_decode.STEP_BYTES": Edge(decode_xla, decode_step),
    "paged_decode.WGMMA_ROWS": Edge(decode_config, largest_group_of_decode),
    "paged_extend.ALIGNMENT": Edge(work_list, work_tiles),
    "paged_extend.BATCHED_CHUNK_TOKENS": Edge(batched_attention, batched_extend_chunk),
    "paged_extend.BATCHED_TILE_ROWS": Edge(extend_batched, batched_extend_tile),
    "paged_extend.CHUNK_TOKENS": Edge(extend_xla, extend_chunk),
    "paged_extend.COLUMNS": Edge(mosaic_limits, head_dim_of_columns),
    "paged_extend.ROWS": Edge(extend_config, tile_of_a_group),
    "paged_extend.SMALLEST_SHARE": Edge(extend_shares, shares_of_extend),
    "paged_extend.TILE_ROWS": Edge(extend_config, largest_group_of_extend),
    "paged_extend.TILE_TOKENS": Edge(extend_xla, extend_tile),
    "paged_extend.TOLERANCE": Edge(extend_shares, tolerance_of_extend),
    "paged_extend.WARPGROUPS": Edge(extend_config, tile_of_a_group),
}
"""By operation and name in its `config.py`."""

SHAPES = {
    "blocks that do not divide a chunk of decode": Edge(decode_xla, decode_uneven_chunk),
    "blocks that do not divide a chunk of extend": Edge(extend_xla, extend_uneven_chunk),
    "a table as wide as a chunk of decode": Edge(decode_xla, decode_width),
    "the launch of the Mosaic decode": Edge(decode_mosaic, launch_of_decode),
}
"""Edges that shapes make, whose programs take longer to compile or to simulate."""


if SEES_ASYNC_RACES:  # 0.10 simulates several warpgroups 15 times slower
    SHAPES["the launch of the latent attention"] = Edge(latent_mosaic, launch_of_latents)


def test_every_size_has_its_edges() -> None:
    """And is declared in the `config.py` of its operation."""
    root = Path(kernels.__file__).parent
    found = set()
    for path in root.glob("**/*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id.isupper():
                value = getattr(import_module(f"{kernels.__name__}.{name}"), target.id)
                if isinstance(value, int) and not isinstance(value, bool):
                    operation, _, module = name.rpartition(".")
                    assert module == "config", f"{target.id} of {name} belongs into config.py"
                    found.add(f"{operation}.{target.id}")
    assert found == EDGES.keys()


@pytest.mark.parametrize("distance", [-1, 0, 1])
@pytest.mark.parametrize("size", EDGES)
def test_at_the_edge(size: str, distance: int) -> None:
    EDGES[size].check(EDGES[size].module, distance)


@pytest.mark.slow
@pytest.mark.parametrize("distance", [-1, 0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_at_the_edge_of_a_shape(shape: str, distance: int) -> None:
    SHAPES[shape].check(SHAPES[shape].module, distance)


CHEAP_BUGS = {
    "a group of 65": ("paged_decode.WGMMA_ROWS", "> WGMMA_ROWS", "> WGMMA_ROWS + 1"),
    "less than a smallest share": (
        "paged_extend.SMALLEST_SHARE", "// programs), SMALLEST_SHARE)", "// programs), 0)"
    ),
    "a thread block has an 8th too many": (
        "paged_extend.TOLERANCE", "fair + fair // TOLERANCE", "fair + fair // (TOLERANCE // 2)"
    ),
    "a tile of 17 heads": ("paged_extend.TILE_ROWS", "range(1, most + 1)", "range(1, most + 2)"),
    "a group of 63": ("paged_decode.WGMMA_ROWS", "> WGMMA_ROWS:", ">= WGMMA_ROWS:"),
    "a tile of too many tokens": (
        "paged_extend.ROWS", "TILE_ROWS // heads //", "-(-TILE_ROWS // heads) //"
    ),
    "a tile of too few tokens": (
        "paged_extend.WARPGROUPS", "TILE_ROWS // heads //", "(TILE_ROWS - 1) // heads //"
    ),
    "a share of one tile": (
        "paged_decode.SMALLEST_SHARE", "total // SMALLEST_SHARE", "total // (SMALLEST_SHARE - 1)"
    ),
    "a thread block too few": (
        "paged_decode.SMALLEST_SHARE", "total // SMALLEST_SHARE", "(total - 1) // SMALLEST_SHARE"
    ),
    "a thread block too many": (
        "paged_decode.MAX_PARTS", "MAX_PARTS * batch * kv_heads", "MAX_PARTS * batch * kv_heads + 1"
    ),
    "the last tile is in no share": (
        "paged_decode.SMALLEST_SHARE", "length + (tile_tokens - 1)", "length + (tile_tokens - 2)"
    ),
    "parts of another thread block": (
        "paged_decode.SMALLEST_SHARE", "larger + (place - of_larger)", "larger + (place - larger)"
    ),
    "the last part is lost": (
        "paged_decode.MERGE_PARTS", "+ (MERGE_PARTS - 1), jnp", "+ (MERGE_PARTS - 2), jnp"
    ),
    "the last part counts twice": (
        "paged_decode.MERGE_PARTS", "jnp.where(wanted < end", "jnp.where(wanted <= end"
    ),
    "two heads have one weight": (
        "paged_decode.MERGE_VECTOR", "element >= i * head_dim", "element >= 2 * i * head_dim"
    ),
    "latents: a tile of heads too few": (
        "latent_attention.ROWS", "// -(-q_heads // ROWS)", "// max(1, q_heads // ROWS)"
    ),
    "latents: parts of two rows in one place": (
        "latent_attention.TILE_TOKENS", "[2 * first, number]", "[first, number]"
    ),
    "latents: a split row by every thread block": (
        "latent_attention.TILE_TOKENS", "& (program == first + 1)", ""
    ),
    "latents: a share too many": (
        "latent_attention.ROWS", "MAX_PARTS * num_rows", "MAX_PARTS * num_rows + 1"
    ),
    "no head_dim of 64": ("paged_decode.COLUMNS", "HEAD_DIMS = (64, ", "HEAD_DIMS = (65, "),
    "any number of elements": ("block_copy.LANES", "if elements % LANES:", "if elements < LANES:"),
    "a chunk of one row less": (
        "block_copy.MAX_ROWS", "range(min(most, rows), 0", "range(min(most, rows) - 1, 0"
    ),
    "a chunk of one row more": (
        "block_copy.CHUNK_BYTES", "range(min(most, rows), 0", "range(min(most + 1, rows), 0"
    ),
    "a pool is skipped": (
        "block_copy.POOLS_PER_LAUNCH", "range(0, len(pools[0]),", "range(0, len(pools[0]) - 1,"
    ),
    "a launch of 17": (
        "block_copy.POOLS_PER_LAUNCH", "start + POOLS_PER_LAUNCH]", "start + POOLS_PER_LAUNCH + 1]"
    ),
    "no program for a pool": ("block_copy.PROGRAMS_PER_CORE", "max(1, PROGRAMS", "max(0, PROGRAMS"),
    "a program too many": (
        "block_copy.PROGRAMS_PER_CORE", "num_cores // num_pools)", "num_cores // num_pools + 1)"
    ),
    "a stage overflows": (
        "kv_write.STAGE_BYTES", "token_bytes <= STAGE_BYTES", "token_bytes <= STAGE_BYTES + 8"
    ),
    "a stage is not filled": (
        "kv_write.STAGE_BYTES", "token_bytes <= STAGE_BYTES", "token_bytes < STAGE_BYTES"
    ),
    "a program is idle": (
        "kv_write.MAX_GROUP", "// size >= num_programs", "// size >= num_programs - 1"
    ),
    "a group of 4 at most": (
        "kv_write.MAX_GROUP", "// size >= num_programs", "// size > num_programs"
    ),
}  # fmt: skip
"""A size, and what is replaced in its module."""

BUGS = {
    "the last step of a copy is lost": (
        "block_copy.STAGES", "worker + (workers - 1)", "worker + (workers - 2)"
    ),
    "the last write is lost": (
        "kv_write.STAGES", "(num_programs - 1), jnp", "(num_programs - 2), jnp"
    ),
    "decode: the last chunk is lost": (
        "paged_decode.CHUNK_TOKENS", "(lengths + chunk_tokens - 1) //",
        "(lengths + chunk_tokens - 2) //",
    ),
    "decode: the last token is lost": (
        "paged_decode.CHUNK_TOKENS", "(position < lengths[", "(position < -1 + lengths["
    ),
    "decode: a token too many": (
        "paged_decode.CHUNK_TOKENS", "(position < lengths[", "(position <= lengths["
    ),
    "decode: the window is too wide": (
        "paged_decode.CHUNK_TOKENS", "(lengths - options.window, 0)",
        "(lengths - options.window - 1, 0)",
    ),
    "decode: the first chunk is lost": (
        "paged_decode.CHUNK_TOKENS", "first_visible // chunk_tokens",
        "(first_visible + 1) // chunk_tokens",
    ),
    "decode: the last step is lost": (
        "paged_decode.STEP_BYTES", "(ends[-1] + num_items - 1)", "(ends[-1] + num_items - 2)"
    ),
    "decode: a step takes an item twice": (
        "paged_decode.STEP_BYTES", "item = i * num_items +", "item = i * (num_items - 1) +"
    ),
    "extend: the last chunk is lost": (
        "paged_extend.CHUNK_TOKENS", "(last + chunk_tokens) // chunk_tokens",
        "(last + chunk_tokens - 1) // chunk_tokens",
    ),
    "extend: the first chunk is lost": (
        "paged_extend.CHUNK_TOKENS", "first // chunk_tokens, num",
        "(first + 1) // chunk_tokens, num",
    ),
    "extend: the last token is not read": (
        "paged_extend.CHUNK_TOKENS", "(key <= last)", "(key < last)"
    ),
    "extend: every tile is the first": (
        "paged_extend.TILE_TOKENS", "row])) * tile_tokens", "row])) // tile_tokens"
    ),
    "extend: the last tile is lost": (
        "paged_extend.TILE_TOKENS", "(q_lengths + tile_tokens - 1) //",
        "(q_lengths + tile_tokens - 2) //",
    ),
    "extend: a tile writes to the next row": (
        "paged_extend.TILE_TOKENS", "valid[:, None, None]", "jnp.full((tile_tokens, 1, 1), 1)"
    ),
    "extend: a window of one more": (
        "paged_extend.TILE_TOKENS", "options.window + 1, 0)", "options.window, 0)"
    ),
    "tiles: the last is lost": (
        "paged_extend.ALIGNMENT", "base + tile_tokens - 1) //", "base + tile_tokens - 2) //"
    ),
    "tiles: the last KV step is lost": (
        "paged_extend.ALIGNMENT", "(last + block_kv, 0)", "(last + block_kv - 1, 0)"
    ),
    "tiles: a step is seen in part": (
        "paged_extend.ALIGNMENT", "seen_by_all = position + valid_begin + 1",
        "seen_by_all = position + valid_begin + 2",
    ),
    "tiles: the window is cut": (
        "paged_extend.ALIGNMENT", "(seen_by_all, 0) - window", "(seen_by_all, 0) + 1 - window"
    ),
    "tiles: a row of the whole table does not fit": (
        "paged_extend.ALIGNMENT", "kv_length <= max_kv_length", "kv_length < max_kv_length"
    ),
    "on GPUs: the last chunk is lost": (
        "paged_decode.BATCHED_CHUNK_TOKENS", "(last + tokens) // tokens",
        "(last + tokens - 1) // tokens",
    ),
    "on GPUs: the window is too wide": (
        "paged_decode.BATCHED_CHUNK_TOKENS", "options.window + 1, 0)", "options.window, 0)"
    ),
    "on GPUs: the last step is lost": (
        "paged_decode.BATCHED_STEP_BYTES", "(total + num_items - 1)", "(total + num_items - 2)"
    ),
    "on GPUs: rows are mixed": (
        "paged_decode.BATCHED_STEP_BYTES", "same &= tile[item] ==", "same |= tile[item] =="
    ),
    "on GPUs: the last token is not read by extend": (
        "paged_extend.BATCHED_CHUNK_TOKENS", "(key <= last)", "(key < last)"
    ),
    "on GPUs: the last tile is lost": (
        "paged_extend.BATCHED_TILE_ROWS", "(q_lengths + tile_tokens - 1) //",
        "(q_lengths + tile_tokens - 2) //",
    ),
    "decode: an uneven chunk": (
        "blocks that do not divide a chunk of decode",
        "chunk_tokens = blocks_per_chunk * block_size",
        "chunk_tokens = CHUNK_TOKENS",
    ),
    "decode: a row that fills its table": (
        "a table as wide as a chunk of decode", "fits = lengths <= width", "fits = lengths < width"
    ),
    "extend: an uneven chunk": (
        "blocks that do not divide a chunk of extend",
        "chunk_tokens = blocks_per_chunk * block_size",
        "chunk_tokens = CHUNK_TOKENS",
    ),
    "launch: the last work tile is lost": (
        "the launch of the Mosaic decode", "position.left > 0", "position.left > 2"
    ),
    "launch: a token too many": (
        "the launch of the Mosaic decode", "visible = position < work.length",
        "visible = position <= work.length",
    ),
}  # fmt: skip

if SEES_ASYNC_RACES:
    for name, old, new in (
        ("the last work tile is lost", "position.left > 0", "position.left > 1"),
        ("parts are final", "parts_of_pairs[pair, 1] == 1", "parts_of_pairs[pair, 1] >= 1"),
        ("a token too many", "token < visible, logits", "token <= visible, logits"),
    ):
        BUGS[f"latents: {name}"] = ("the launch of the latent attention", old, new)


def assert_dies(bug: tuple[str, str, str]) -> None:
    """Some distance from the size, the result differs or the kernel does not run."""
    size, old, new = bug
    edge = (EDGES | SHAPES)[size]
    changed = planted(edge.module, {old: new})
    with pytest.raises((AssertionError, ValueError, TypeError, jax.errors.JaxRuntimeError)):
        for distance in (-1, 0, 1):
            edge.check(changed, distance)


@pytest.mark.parametrize("bug", CHEAP_BUGS)
def test_a_planted_bug_of_a_rule_is_caught(bug: str) -> None:
    assert_dies(CHEAP_BUGS[bug])


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert_dies(BUGS[bug])
