"""
A manager that loses a block
============================

The specification can test any cache manager that has six methods. Here it tests a small one that
contains a mistake, finds the mistake, and shrinks the failing program to a few calls.
:doc:`Test your own cache manager </howto/adapter>` shows how to write the six methods.
"""

import matplotlib.pyplot as plt
from managers.toy_leak import ToyCache

from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.findings.program import to_program
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.random_engine import run

# %%
# The manager
# -----------
#
# A dictionary from prefixes to blocks, a list of free blocks, and a block table for each request.
# When a request has computed a block that is already cached, it uses the cached block instead:
#
# .. literalinclude:: ../examples/managers/toy_leak.py
#    :pyobject: ToyCache.publish
#
# It would pass most tests. Each request reads the right KV, and no block has two owners.

subject = CacheSubject(ToyCache)

# %%
# The search
# ----------
#
# Each case makes a manager of a new size and runs a hundred random operations: requests arrive, are
# admitted, compute, grow, finish, are preempted and return. The specification tracks the owner and
# the content of each block. For each of several seeds, the run ends at the first broken rule.

runs = [run(subject, seed, num_steps=10_000) for seed in range(40)]
num_steps = [each.num_steps for each in runs]
print("found in", sum(each.finding is not None for each in runs), "of", len(runs), "runs")
print("after", sorted(num_steps)[len(runs) // 2], "steps in the median")

# %%
# The finding
# -----------
#
# Most calls of a failing case are irrelevant. ``shrink`` removes and simplifies calls, as long as
# the same rule breaks.

findings = [each.finding for each in runs if each.finding is not None]
shrunk = [shrink(subject, finding) for finding in findings]
shortest = min(shrunk, key=lambda finding: len(finding.trace))
print(to_program(shortest, subject))

# %%
# Two requests compute the same block. The second to publish drops its own copy, and one block is
# missing from the free list. The manager lacks the line ``self.free.append(table[index])``. With
# it, the search finds nothing:


class Mended(ToyCache):
    """Frees the duplicate."""

    def publish(self, name, tokens):
        before = list(self.block_table(name))
        super().publish(name, tokens)
        after = self.block_table(name)
        self.free += [old for old, new in zip(before, after, strict=True) if old != new]


mended = run(CacheSubject(Mended), seed=0, num_steps=10_000)
print("found:", mended.finding, "in", mended.num_steps, "steps")

# %%
# The lengths of the traces, before and after shrinking:

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
pairs = zip(findings, shrunk, strict=True)
lengths = sorted((len(found.trace), len(small.trace)) for found, small in pairs)
axes.bar(range(len(lengths)), [length for length, _ in lengths], color="#a6dcc9", label="as found")
axes.bar(range(len(lengths)), [length for _, length in lengths], color="#d95f02", label="shrunk")
axes.set_xlabel("run")
axes.set_ylabel("calls")
axes.legend(frameon=False)
plt.show()
