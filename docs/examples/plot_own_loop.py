"""
A loop of your own
==================

You have a model and a loop in JAX and want to add a paged cache. Three independent parts of this
library help: :class:`~radixkv.kvcache.CacheManager` decides which blocks hold which tokens,
:class:`~radixkv.kvcache.BlockArrays` are the blocks, and the :doc:`kernels </reference/kernels>`
write and read them. Here they serve a model of one attention layer, and its tokens equal those of
the same layer without a cache. Later the example adds a host tier and files, preempts a request,
and continues in another process.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from radixkv.kernels import kv_write, paged_extend
from radixkv.kvcache import (
    BlockArrays,
    CacheManager,
    HostArrays,
    HostConfig,
    Lease,
    Parked,
    TierDriver,
)
from radixkv.kvcache.storage import BackendOptions, StorageNamespace, StorageWorkers, open_backend

VOCAB, WIDTH, Q_HEADS, KV_HEADS, HEAD_DIM = 50, 32, 4, 2, 16
BLOCK_SIZE, NUM_BLOCKS = 4, 32

keys = iter(jax.random.split(jax.random.key(0), 6))
embedding = jax.random.normal(next(keys), (VOCAB, WIDTH))
place = jax.random.normal(next(keys), (64, WIDTH))
w_q = jax.random.normal(next(keys), (WIDTH, Q_HEADS, HEAD_DIM)) / WIDTH**0.5
w_k, w_v = jax.random.normal(next(keys), (2, WIDTH, KV_HEADS, HEAD_DIM)) / WIDTH**0.5
w_out = jax.random.normal(next(keys), (Q_HEADS, HEAD_DIM, VOCAB))


def project(ids, positions):
    """Return the queries, keys and values of tokens."""
    x = embedding[ids] + place[positions]
    return tuple(jnp.einsum("tw,whd->thd", x, w) for w in (w_q, w_k, w_v))


# %%
# A step
# ------
#
# A step computes tokens of several requests, concatenated: chunks of prompts, and one token of each
# decoding request. It writes their keys and values to *slots* of the pools, and then attends to the
# blocks in each request's block table, the new tokens included. The pools are donated, so they are
# updated in place.


@partial(jax.jit, donate_argnames=("k_pool", "v_pool"))
def step(k_pool, v_pool, ids, positions, slots, tables, kv_lengths, q_lengths, q_starts):
    """Return the pools, and the most likely next token after each token."""
    q, k, v = project(ids, positions)
    k_pool, v_pool = kv_write(k, v, slots, k_pool, v_pool)
    out = paged_extend(
        q, k_pool, v_pool, tables, kv_lengths, q_lengths, q_starts, sm_scale=HEAD_DIM**-0.5
    )
    return k_pool, v_pool, jnp.argmax(jnp.einsum("thd,hdv->tv", out, w_out), axis=-1)


# %%
# From leases to arrays
# ---------------------
#
# Position ``p`` of a request is slot ``table[p // block_size] * block_size + p % block_size``. In a
# shared block the slot is -1, and nothing is written, because other requests read it. Shapes are
# fixed, so that one program suffices; the rest is padding.

MAX_TOKENS, MAX_REQUESTS, TABLE_WIDTH = 32, 4, 16

manager = CacheManager(NUM_BLOCKS, BLOCK_SIZE)
arrays = BlockArrays.zeros(1, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, jnp.float32)


def run(work: list[tuple[Lease, list[int], int]]) -> list[int]:
    """Compute the tokens of each request from a position on; return each next token."""
    ids, positions = np.zeros((2, MAX_TOKENS), np.int32)
    slots = np.full(MAX_TOKENS, -1, np.int32)
    tables = np.zeros((MAX_REQUESTS, TABLE_WIDTH), np.int32)
    kv_lengths, q_lengths, q_starts = np.zeros((3, MAX_REQUESTS), np.int32)
    end = 0
    for row, (lease, tokens, first) in enumerate(work):
        new = np.arange(first, len(tokens))
        part = slice(end, end + len(new))
        table = lease.block_table
        is_shared = new < lease.num_shared_blocks * BLOCK_SIZE
        ids[part], positions[part] = tokens[first:], new
        slot = table[new // BLOCK_SIZE] * BLOCK_SIZE + new % BLOCK_SIZE
        slots[part] = np.where(is_shared, -1, slot)
        tables[row, : len(table)] = table
        kv_lengths[row], q_lengths[row], q_starts[row] = len(tokens), len(new), end
        end += len(new)
    k_pool, v_pool, following = step(
        arrays.keys[0],
        arrays.values[0],
        *map(jnp.asarray, (ids, positions, slots, tables, kv_lengths, q_lengths, q_starts)),
    )
    arrays.keys, arrays.values = (k_pool,), (v_pool,)
    for lease, tokens, _ in work:
        manager.publish(lease, tokens)  # their KV is written: others may share full blocks
    last = (q_starts + q_lengths - 1)[: len(work)]
    return np.asarray(following)[last].tolist()


# %%
# Requests
# --------
#
# Four requests start with the same twelve tokens, and the last prompt equals the first. Each
# request is admitted after the previous one was computed, so that it can share blocks; then all
# decode together. If a whole prompt is cached, its last token is recomputed, for the next token.

rng = np.random.default_rng(0)
prefix = rng.integers(0, VOCAB, 12).tolist()
prompts = [prefix + rng.integers(0, VOCAB, number).tolist() for number in (4, 7, 3)]
prompts.append(prompts[0])

hits, leases, sequences = [], [], []
for prompt in prompts:
    lease = manager.admit(manager.match(prompt))
    hits.append(lease.num_ready_tokens)
    first = min(lease.num_ready_tokens, len(prompt) - 1)
    [token] = run([(lease, prompt, first)])
    leases.append(lease)
    sequences.append([*prompt, token])

for _ in range(5):
    for lease in leases:
        manager.extend(lease, 1)
    work = [
        (lease, tokens, len(tokens) - 1) for lease, tokens in zip(leases, sequences, strict=True)
    ]
    for tokens, token in zip(sequences, run(work), strict=True):
        tokens.append(token)

for lease in leases:
    manager.release(lease)
manager.check()
print("hit tokens:", hits)

# %%
# The same without a cache
# ------------------------


@jax.jit
def likeliest(ids, length):
    """Attend to a whole sequence at once; ids beyond its length are padding."""
    q, k, v = project(ids, jnp.arange(len(ids)))
    k, v = (jnp.repeat(each, Q_HEADS // KV_HEADS, axis=1) for each in (k, v))
    logits = jnp.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    logits = jnp.where(jnp.tri(len(ids), dtype=bool), logits, -jnp.inf)
    out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(logits), v)
    return jnp.argmax(jnp.einsum("hd,hdv->v", out[length - 1], w_out))


for prompt, tokens in zip(prompts, sequences, strict=True):
    for length in range(len(prompt), len(tokens)):
        ids = np.zeros(64, np.int32)
        ids[:length] = tokens[:length]
        assert tokens[length] == likeliest(ids, length)
print("the tokens are equal:", sequences[0][-6:])

# %%
# Shared tokens
# -------------

figure, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
names = [f"request {number}" for number in range(1, 5)]
axes.barh(names, hits, color="#a6dcc9", label="shared")
rest = [len(prompt) - hit for prompt, hit in zip(prompts, hits, strict=True)]
axes.barh(names, rest, left=hits, color="#d95f02", label="computed")
axes.invert_yaxis()
axes.set_xlabel("tokens of the prompt")
axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
plt.show()

# %%
# Adding tiers
# ------------
#
# Blocks that leave the device can stay on the host and in files. The manager decides *operations*,
# and a :class:`~radixkv.kvcache.TierDriver` executes them. A loop connects the two once per step.
# It waits for a copy only when it has nothing else to do, as here.

SIZES = {"block_size": BLOCK_SIZE, "layers": (0, 1), "heads": (0, KV_HEADS)}
directory = TemporaryDirectory()


def open_tiers() -> tuple[CacheManager, BlockArrays, TierDriver, StorageWorkers]:
    """Make the cache of a process; the files keep the blocks of earlier processes."""
    namespace = StorageNamespace("one layer", weights_revision="0", kv_dtype="float32", **SIZES)
    manager = CacheManager(NUM_BLOCKS, BLOCK_SIZE, host=HostConfig(64), storage=namespace)
    arrays = BlockArrays.zeros(1, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, jnp.float32)
    backend = open_backend(Path(directory.name, "kv").as_uri(), BackendOptions(max_bytes=2**20))
    storage = StorageWorkers(backend, max_bytes_in_flight=2**20)
    driver = TierDriver(HostArrays.like(arrays, 64), storage, max_blocks_per_copy=8)
    return manager, driver.warm_up(arrays), driver, storage


def exchange() -> None:
    """Report finished copies to the manager, and pass new ones to the driver; once per step."""
    for result in driver.poll():
        manager.tiers.complete(result.op_id, result.ok, fenced=result.fenced)
    for op_id in driver.fenced():
        manager.tiers.fence(op_id)
    driver.cancel(manager.tiers.take_cancelled())
    driver.touch(manager.tiers.take_used())
    driver.dispatch(manager.tiers.take_operations(), arrays)


def wait_until(condition: Callable[[], bool]) -> None:
    """Call `exchange` until a condition holds."""
    while not condition():
        exchange()
        driver.wait(timeout_s=1.0)


def start(tokens: list[int], parked: Parked | None = None) -> Lease:
    """Admit a sequence, with all of its KV that any tier has."""
    fetched = manager.tiers.prefetch(tokens)  # asks storage for the missing blocks
    if fetched is not None:
        wait_until(lambda: fetched.done)
    lease = manager.admit(manager.match(tokens), parked)
    wait_until(lambda: lease.loading is None)  # a copy from the host
    return lease


def generate(lease: Lease, tokens: list[int], number: int) -> None:
    """Generate a number of tokens; the first step computes the missing ones."""
    first = min(lease.num_ready_tokens, len(tokens) - 1)
    for _ in range(number):
        manager.extend(lease, len(tokens) - lease.num_tokens)
        tokens += run([(lease, tokens, first)])
        first = len(tokens) - 1
        exchange()


# %%
# A rollout is preempted and *parked*, with its last, partial block. Its blocks are free when the
# copy has ended, and other requests may use them. The rollout resumes on other blocks, and computes
# nothing twice. Before the process ends, it waits for the writes to the files.

manager, arrays, driver, storage = open_tiers()
rollout = list(prompts[0])
lease = start(rollout)
generate(lease, rollout, 3)
parked = manager.tiers.park(lease, rollout[:-1])  # the last token has no KV yet
wait_until(lambda: parked.saved)
other = start(list(range(NUM_BLOCKS * BLOCK_SIZE)))  # takes the whole device
manager.release(other)
lease = start(rollout, parked)
print("resumed with", lease.num_ready_tokens, "of", len(rollout), "tokens computed")
generate(lease, rollout, 3)
manager.release(lease)
wait_until(lambda: manager.tiers.num_open_operations == 0)
assert driver.close() and storage.close()

# %%
# Another process finds the blocks in the files. When the weights change, ``reset`` empties the
# device and the host. Storage keeps its blocks, so give it the name of the new weights; otherwise
# it would return KV of the old ones.

manager, arrays, driver, storage = open_tiers()
again = list(prompts[0])
lease = start(again)
print("after a restart,", lease.num_ready_tokens, "of", len(again), "tokens are cached")
generate(lease, again, 6)
assert again == rollout == sequences[0]

manager.reset()  # ends the lease, too
manager.tiers.storage = replace(manager.tiers.storage, weights_revision="1")
lease = start(prompts[0])
print("with new weights,", lease.num_ready_tokens)
assert driver.close() and storage.close()
directory.cleanup()

# %%
# A scheduler does the rest: when to admit, what to do on
# :class:`~radixkv.kvcache.OutOfBlocksError`, how to fill a step.
# :class:`~radixkv.scheduler.Engine` includes one;
# :class:`~radixkv.scheduler.MixedScheduler` is the scheduler alone, without JAX.
