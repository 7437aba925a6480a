"""
A manager that loses a block
============================

The specification can drive any cache manager that has six methods. Here it drives a small one with
a mistake in it, finds the mistake, and reduces what led to it to a few calls.
:doc:`How to write the six methods </howto/adapter>` for your own is another page.
"""

import matplotlib.pyplot as plt
from managers.toy_leak import ToyCache

from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.program import to_program
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.shrink import shrink

# %%
# The manager
# -----------
#
# A dictionary from prefixes to blocks, a list of free blocks, and a block table for each request.
# When a request has computed a block that another has cached already, it takes the cached one in
# its place:
#
# .. literalinclude:: ../examples/managers/toy_leak.py
#    :pyobject: ToyCache.publish
#
# It would pass most tests that one would write for it. Each request reads what it should, and
# no block has two owners.

subject = CacheSubject(ToyCache)

# %%
# The hunt
# --------
#
# Each case is a manager of a new size, with a hundred random operations: requests come, are
# admitted, compute, grow, finish, lose their blocks and come back. Beside it, the specification
# remembers who has which block and what is written there. We take the first case that breaks a
# rule, under each of a few seeds.

runs = [run(subject, seed, num_steps=10_000) for seed in range(40)]
num_steps = [each.num_steps for each in runs]
print("found in", sum(each.finding is not None for each in runs), "of", len(runs), "runs")
print("after", sorted(num_steps)[len(runs) // 2], "steps, in the middle case")

# %%
# What was found
# --------------
#
# The calls that led to it are many, and most have nothing to do with it. ``shrink`` leaves out
# and simplifies what it can, as long as the same rule breaks.

findings = [each.finding for each in runs if each.finding is not None]
shrunk = [shrink(subject, finding) for finding in findings]
shortest = min(shrunk, key=lambda finding: len(finding.trace))
print(to_program(shortest, subject))

# %%
# Two requests compute the same block, the second to publish gives up its own copy, and one block
# less can be had than should be. The line that is missing is
# ``self.free.append(table[index])``. With it, the hunt comes home with nothing:


class Mended(ToyCache):
    """Gives the copy back."""

    def publish(self, name, tokens):
        before = list(self.block_table(name))
        super().publish(name, tokens)
        after = self.block_table(name)
        self.free += [old for old, new in zip(before, after, strict=True) if old != new]


mended = run(CacheSubject(Mended), seed=0, num_steps=10_000)
print("found:", mended.finding, "in", mended.num_steps, "steps")

# %%
# How long the traces were, as found and as shrunk:

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
pairs = zip(findings, shrunk, strict=True)
lengths = sorted((len(found.trace), len(small.trace)) for found, small in pairs)
axes.bar(range(len(lengths)), [length for length, _ in lengths], color="#a6dcc9", label="as found")
axes.bar(range(len(lengths)), [length for _, length in lengths], color="#d95f02", label="shrunk")
axes.set_xlabel("run")
axes.set_ylabel("calls")
axes.legend(frameon=False)
plt.show()
