"""
Rollouts whose weights change
=============================

A loop of reinforcement learning generates groups of samples, updates the weights, and generates
again. KV that old weights computed is wrong for new ones: a cache that keeps it changes the
policy silently. :meth:`Engine.reset_cache <radixkv.scheduler.Engine.reset_cache>` takes the new
weights and drops the KV in one call, also in the middle of rollouts.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import matplotlib.pyplot as plt
import numpy as np

import radixkv
from radixkv.scheduler import GenerationParams, Request, SamplingParams
from radixkv.scheduler.models import load_model, make_tiny_checkpoint

with TemporaryDirectory() as name:
    make_tiny_checkpoint(name, "llama", overrides={"eos_token_id": None})
    sizes = {"block_size": 8, "num_blocks": 256, "max_running": 8, "token_budget": 64}
    llm = radixkv.LLM(Path(name), max_model_len=128, **sizes)
    fresh = radixkv.LLM(Path(name), max_model_len=128, **sizes)  # to compare with
    params = load_model(name).params

rng = np.random.default_rng(0)
prompts = [rng.integers(2, 1_000, 60, dtype=np.int32) for _ in range(4)]


def updated(params, step):
    """Stand for an optimizer: move each weight a little."""
    keys = iter(jax.random.split(jax.random.key(step), len(jax.tree.leaves(params))))
    return jax.tree.map(
        lambda leaf: leaf + 0.01 * jax.random.normal(next(keys), leaf.shape, leaf.dtype), params
    )


# %%
# Groups of samples
# -----------------
#
# Each prompt has four samples, which share its blocks: the prompt is computed once. The seed
# changes with the step, so that no step repeats the draws of another.


def sample(llm, step):
    """Return the tokens of all samples."""
    sampling = SamplingParams(temperature=1.0, seed=1_000 * step)
    outputs = llm.generate(prompts, GenerationParams(max_tokens=16, n=4, sampling=sampling))
    return [[each.token_ids for each in output.samples] for output in outputs]


def computed(llm):
    """Return the number of prompt tokens that were computed so far."""
    return llm.engine.stats().prefill_tokens_computed


computed_by_step = []
for step in range(3):
    before = computed(llm)
    rollouts = sample(llm, step)
    computed_by_step.append(computed(llm) - before)
    params = updated(params, step)
    llm.engine.reset_cache(params=params)

of_prompts = 4 * sum(map(len, prompts))
print(f"each step computed {computed_by_step} of {of_prompts} prompt tokens")

# %%
# The samples of a step are those of an engine that never had other weights:

fresh.engine.reset_cache(params=params)
assert sample(llm, 3) == sample(fresh, 3)
print("equal to an engine that began with these weights")

# %%
# New weights in the middle of rollouts
# -------------------------------------
#
# An asynchronous trainer does not wait for the longest rollout. Requests that are active during
# the reset keep their tokens. Their KV is computed again, and their next tokens come from the new
# weights: exactly as if the tokens so far were the prompt of a new engine.

requests = [Request(f"rollout-{i}", prompt, 24) for i, prompt in enumerate(prompts)]
for request in requests:
    llm.engine.add_request(request)
for _ in range(12):
    llm.engine.step()

params = updated(params, 3)
llm.engine.reset_cache(params=params)
so_far = [list(request.output_tokens) for request in requests]
llm.engine.run()

fresh.engine.reset_cache(params=params)
for request, prompt, tokens in zip(requests, prompts, so_far, strict=True):
    rest = GenerationParams(max_tokens=24 - len(tokens))
    [output] = fresh.generate([np.concatenate([prompt, tokens])], rest)
    assert request.output_tokens == [*tokens, *output.token_ids]
print("tokens before the change:", [len(tokens) for tokens in so_far], "of 24")

# %%
# What the cache saved
# --------------------
#
# In each step, three of four samples found their prompt. Nothing of an earlier step was found,
# because its weights are gone.

figure, axes = plt.subplots(figsize=(6, 2), layout="constrained")
steps = [f"step {step}" for step in range(3)]
axes.barh(steps, [of_prompts] * 3, color="#d9d9d9", label="without a prefix cache")
axes.barh(steps, computed_by_step, color="#1b9e77", label="computed")
axes.invert_yaxis()
axes.set_xlabel("prompt tokens")
axes.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.3), frameon=False)
plt.show()
