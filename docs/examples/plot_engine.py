"""
The engine, with a shared prefix
================================

:class:`~radixkv.scheduler.Engine` combines the manager, the scheduler and a model. Here a tiny
random model answers eight requests with a common prefix, once with the prefix cache and once
without. The answers are equal, token for token; the work is not.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np

from radixkv.scheduler import Engine, Request
from radixkv.scheduler.models import load_model, make_tiny_checkpoint

with TemporaryDirectory() as directory:
    checkpoint = Path(directory)
    make_tiny_checkpoint(checkpoint, family="llama", seed=0)
    model = load_model(checkpoint)

print(model.config)

# %%
# Eight questions about one document
# ----------------------------------
#
# The document has 64 tokens, and each question has six more.

rng = np.random.default_rng(0)
document = rng.integers(1, model.config.vocab_size, 64, dtype=np.int32)
prompts = [
    np.concatenate([document, rng.integers(1, model.config.vocab_size, 6, dtype=np.int32)])
    for _ in range(8)
]


def answer(prefix_cache: bool) -> tuple[Engine, list[list[int]]]:
    """Run all requests; return the engine and the answers, in the order of the prompts."""
    engine = Engine(
        model,
        block_size=8,
        num_blocks=128,
        token_budget=64,
        max_running=8,
        max_model_len=96,
        prefix_cache=prefix_cache,
    )
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(f"question-{i}", prompt, max_new_tokens=12))
    finished = {request.request_id: request.output_tokens for request in engine.run()}
    return engine, [finished[f"question-{i}"] for i in range(len(prompts))]


with_cache, answers = answer(prefix_cache=True)
without_cache, answers_without = answer(prefix_cache=False)

assert answers == answers_without
print("same answers with and without the cache, the first:", answers[0])

# %%
# Computed tokens
# ---------------

engines = {"with": with_cache, "without": without_cache}
computed = {name: engine.stats().prefill_tokens_computed for name, engine in engines.items()}
print("prompt tokens:", sum(map(len, prompts)), "computed:", computed)
print("compilations after warm-up:", with_cache.stats().compilations_after_warm_up)

figure, axes = plt.subplots(figsize=(6, 2.2), layout="constrained")
bars = axes.barh(list(computed), list(computed.values()), color=["#1b9e77", "#d95f02"])
axes.bar_label(bars, padding=3)
axes.set_xlabel("prompt tokens computed")
axes.set_ylabel("prefix cache")
axes.margins(x=0.15)
plt.show()
