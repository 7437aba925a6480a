"""
Prefill and decode on separate nodes
====================================

A prefill node computes prompts, a decode node generates tokens from them, and both have a cache.
First both run in one process; then in two processes, one of which ends during a request. All
answers must equal those of one engine, token for token.
"""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np

from radixkv.scheduler import DecodeEngine, Disaggregated, Engine, PrefillEngine, Request
from radixkv.scheduler.handoff import Timing
from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.models import load_model, make_tiny_checkpoint
from radixkv.scheduler.nodes.channel import ZmqChannel
from radixkv.scheduler.nodes.processes import NodeProcesses
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport

directory = TemporaryDirectory()
make_tiny_checkpoint(Path(directory.name), family="llama", seed=0)
model = load_model(Path(directory.name))

sizes = {
    "block_size": 8,
    "num_blocks": 128,
    "token_budget": 16,
    "max_running": 2,
    "max_model_len": 128,
}

# %%
# Two nodes and a transport
# -------------------------
#
# Each node has a transport. Through it, the decode node reads the KV that the prefill node offers.
# The loop around both, :class:`~radixkv.scheduler.Disaggregated`, delivers their messages.

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
# Each turn repeats the whole conversation and adds ten tokens. The prefill node has the earlier
# prompts cached, and the decode node the earlier answers too. It receives only the missing blocks.

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
# Computed and sent tokens
# ------------------------

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

# %%
# Two processes
# -------------
#
# ``NodeProcesses`` starts and stops the processes of ``radixkv prefill-node`` and ``radixkv
# decode-node``. They connect to the gateway at a loopback address, and share a secret. JAX
# transfers move the KV. Compiled programs are kept on disk, so that a restart is quick.

prompt = rng.integers(1, model.config.vocab_size, 60, dtype=np.int32)
one_engine.add_request(Request("alone", prompt, max_new_tokens=8))
[alone] = one_engine.run()

os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{directory.name}/programs"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
processes = NodeProcesses()
channel = ZmqChannel(GATEWAY, epoch=1, secret=processes.secret)
nodes = RemoteNodes(channel)
arguments = [directory.name, "--gateway", channel.address]
for option, size in sizes.items():
    name = {"num_blocks": "device_blocks"}.get(option, option)
    arguments += [f"--{name.replace('_', '-')}", size]
processes.start("prefill-0", "prefill-node", arguments)
processes.start("decode-0", "decode-node", arguments)

# %%
# The same prompt twice
# ---------------------
#
# A request waits until nodes are connected. The second request hits on both: seven blocks of its 60
# tokens are full. The prefill node computes the other four tokens and sends one block.

for name in ("first", "second"):
    request = Request(name, prompt, max_new_tokens=8)
    nodes.add_request(request)
    while nodes.has_work:
        nodes.step()
        processes.check()  # raises if a node has ended by itself
    assert request.output_tokens == alone.output_tokens
    print(f"{name}: {request.num_hit_tokens} tokens hit on the prefill node")

# %%
# A node that ends
# ----------------
#
# The decode node ends during the third request. Another node takes its name, with an empty cache
# and a later epoch. From the epoch, the gateway knows that the first one is gone, and retries.

third = Request("third", prompt, max_new_tokens=60)
nodes.add_request(third)
nodes.step()
first_life = processes.end("decode-0")
processes.start("decode-0", "decode-node", arguments)
while nodes.has_work:
    nodes.step()
    processes.check()
assert third.output_tokens[:8] == alone.output_tokens

# %%
# Each node prints statistics at its end. The first decode node received eight blocks for the first
# request and one for the second; it may or may not have received any of the third.

stats = processes.stop() | {"decode-0, before": first_life}
channel.close()
directory.cleanup()
block_bytes = token_bytes * sizes["block_size"]
for name, said in sorted(stats.items()):
    hits = said["engine"]["cache"]["hit_blocks"]
    blocks = said["transport"]["bytes_received"] // block_bytes
    print(f"{name}: {hits} blocks hit, {blocks} received")
