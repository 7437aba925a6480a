"""
Prefill and decode apart
========================

A prefill node computes prompts, a decode node generates from them, and both keep what they have.
Here both are in one process, so that all of it can be seen; the nodes are those that processes on
several machines run. Their answers must be those of one engine, token for token.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np

from radixkv.scheduler import DecodeEngine, Disaggregated, Engine, PrefillEngine, Request
from radixkv.scheduler.handoff import Timing
from radixkv.scheduler.models import load_model, make_tiny_checkpoint
from radixkv.scheduler.transport import InProcessExchange, InProcessTransport

with TemporaryDirectory() as directory:
    make_tiny_checkpoint(Path(directory), family="llama", seed=0)
    model = load_model(Path(directory))

sizes = {
    "block_size": 8,
    "num_blocks": 128,
    "token_budget": 32,
    "max_running": 4,
    "max_model_len": 128,
}

# %%
# Two nodes and what is between them
# ----------------------------------
#
# Each node has a transport, by which the decode node reads what the prefill node offers. The loop
# around both, :class:`~radixkv.scheduler.Disaggregated`, delivers their messages.

exchange = InProcessExchange()
nodes = {"epoch": 1, "now": time.monotonic(), "timing": Timing(), **sizes}
disaggregated = Disaggregated(
    prefill=[PrefillEngine(model, InProcessTransport(exchange), **nodes)],
    decode=[DecodeEngine(model, InProcessTransport(exchange), **nodes)],
)
one_engine = Engine(model, **sizes)

# %%
# A conversation
# --------------
#
# Each turn repeats all of the conversation and adds ten tokens. The prefill node has the earlier
# prompts, the decode node the earlier answers, too: it is sent only what it lacks.

rng = np.random.default_rng(0)
conversation = rng.integers(1, model.config.vocab_size, 40, dtype=np.int32)
turns = []
for turn in range(5):
    answers = []
    for engine in (one_engine, disaggregated):
        before = disaggregated.stats()
        engine.add_request(Request(f"turn-{turn}", conversation, max_new_tokens=8))
        [request] = engine.run()
        answers.append(request.output_tokens)
    assert answers[0] == answers[1]
    after = disaggregated.stats()
    turns.append(
        (
            len(conversation),
            after["prefill-0"].engine.prefill_tokens_computed
            - before["prefill-0"].engine.prefill_tokens_computed,
            after["decode-0"].transport.bytes_received
            - before["decode-0"].transport.bytes_received,
        )
    )
    question = rng.integers(1, model.config.vocab_size, 10, dtype=np.int32)
    conversation = np.concatenate([conversation, np.array(answers[0], np.int32), question])

token_bytes = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim * 4
for length, computed, num_bytes in turns:
    print(f"prompt {length:3}: computed {computed:3} tokens, sent {num_bytes // token_bytes:3}")

# %%
# What was computed, and what was sent
# ------------------------------------

lengths, computed, num_bytes = zip(*turns, strict=True)
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(lengths, lengths, color="#777777", label="prompt")
axes.plot(lengths, computed, "o-", color="#1b9e77", label="computed by the prefill node")
axes.plot(
    lengths,
    [each / token_bytes for each in num_bytes],
    "s-",
    color="#d95f02",
    label="sent to the decode node",
)
axes.set_xlabel("tokens of the prompt")
axes.set_ylabel("tokens")
axes.legend()
plt.show()
