"""
The manager alone
=================

:class:`~radixkv.kvcache.CacheManager` decides which block of KV memory holds which tokens. It
needs no model and no JAX: it hands out block ids, and you decide what to keep in the blocks.
This example runs three requests through a cache of ten blocks and plots the owners of the blocks
after each call.
"""

import matplotlib.pyplot as plt
import numpy as np

from radixkv.kvcache import CacheManager, OutOfBlocksError

manager = CacheManager(num_blocks=10, block_size=4)
history: list[tuple[str, dict[str, int]]] = []


def note(call: str) -> None:
    """Record the owners of the blocks after a call, and check every invariant of the cache."""
    manager.check()
    stats = manager.stats()
    holders = {
        "private": stats.private_blocks,
        "published, in use": stats.cached_blocks - stats.idle_blocks,
        "published, idle": stats.idle_blocks,
        "free": stats.free_blocks,
    }
    history.append((call, holders))
    print(f"{call:<12}", holders)


# %%
# A first request
# ---------------
#
# A system prompt of eight tokens and a question of five. Nothing is cached yet, so the match is
# empty. ``admit`` reserves a block for every four tokens. The lease is the request's only hold on
# the cache.

system_prompt = np.arange(100, 108, dtype=np.int32)
first = np.concatenate([system_prompt, np.arange(1, 6, dtype=np.int32)])

match = manager.match(first)
print("hit:", match.num_tokens, "tokens")
lease = manager.admit(match)
print("block table:", lease.block_table)
note("admit A")

# %%
# The model now computes the prompt's KV into those blocks. Only then may other requests share
# it: ``publish`` names the tokens *whose KV is written*. Full blocks enter the tree. The
# thirteenth token, alone in its block, stays private.

manager.publish(lease, first)
note("publish A")

# %%
# The request ends. Its private block is free again. Its published blocks are idle: they stay
# cached, and can be evicted when blocks run short.

manager.release(lease)
note("release A")

# %%
# A second request shares the prefix
# ----------------------------------
#
# The same system prompt, another question. The request hits the two blocks of the system prompt,
# so the model computes four tokens instead of twelve.

second = np.concatenate([system_prompt, np.arange(50, 54, dtype=np.int32)])

match = manager.match(second)
print("hit:", match.num_tokens, "of", len(second), "tokens")
lease = manager.admit(match)
print("block table:", lease.block_table, "of which shared:", lease.num_shared_blocks)
note("admit B")
manager.publish(lease, second)
note("publish B")

# %%
# When blocks run short
# ---------------------
#
# A third request has nothing in common with the others and needs seven blocks. Six are free. The
# block of A's question is idle, so it is evicted; the blocks that B uses cannot be.

third = np.arange(200, 228, dtype=np.int32)
other = manager.admit(manager.match(third))
note("admit C")
print("evicted:", manager.stats().evicted_blocks, "block")
print("A would now hit", manager.match(first).num_tokens, "tokens")

# %%
# One more token would need a block that does not exist. The refusal carries the numbers and
# changes nothing, so that a scheduler can wait, or preempt.

try:
    manager.extend(other, 1)
except OutOfBlocksError as error:
    print("refused:", error)
note("extend C")

manager.release(other)
manager.release(lease)
note("release B, C")

# %%
# The owners of the blocks
# ------------------------
#
# C never published, so all of its blocks are free at the end. The blocks of B stay cached for the
# next request with the same prefix.

colors = {
    "private": "#d95f02",
    "published, in use": "#1b9e77",
    "published, idle": "#a6dcc9",
    "free": "#eeeeee",
}
labels = [call for call, _ in history]
bottom = np.zeros(len(history))
figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
for holder, color in colors.items():
    counts = np.array([holders[holder] for _, holders in history])
    axes.bar(labels, counts, bottom=bottom, label=holder, color=color, edgecolor="white")
    bottom += counts
axes.set_ylabel("blocks")
axes.tick_params(axis="x", rotation=30)
axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
plt.show()
