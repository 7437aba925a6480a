"""
A conversation that survives its GPU
====================================

Two turns of a conversation, on a device with room for little more than one of them. During the
first answer, other requests take the memory; between the turns, the process ends. The KV moves to
the host and to files, and comes back. Nothing is computed twice, and every token is the same as
without interruption.

Each turn is a separate process, which runs this program:

.. literalinclude:: ../examples/conversation/turn.py
   :language: python
   :lines: 7-
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from radixkv.scheduler import Engine, Request
from radixkv.scheduler.models import load_model, make_tiny_checkpoint

HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
PROGRAM = HERE / "conversation" / "turn.py"
BLOCK_SIZE = 8

temporary = TemporaryDirectory()
checkpoint, storage = Path(temporary.name, "model"), Path(temporary.name, "storage")
checkpoint.mkdir()
make_tiny_checkpoint(checkpoint, family="llama", seed=0)
model = load_model(checkpoint)
rng = np.random.default_rng(0)


def say(num_tokens: int) -> list[int]:
    """Make up some tokens."""
    words: list[int] = rng.integers(1, model.config.vocab_size, num_tokens).tolist()
    return words


def run_turn(prompt: list[int], others: list[list[int]]) -> Any:
    """Run a process for one turn; others arrive after four tokens of the answer."""
    turn = {"prompt": prompt, "max_new_tokens": 24, "others": others, "others_after": 4}
    command = [sys.executable, str(PROGRAM), str(checkpoint), str(storage)]
    done = subprocess.run(command, input=json.dumps(turn), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# %%
# Two turns
# ---------
#
# Two requests of higher priority arrive during the first answer. The conversation is preempted and
# *parked* on the host, with its last, partial block, and continues when the others have ended.

question = say(30)
first = run_turn(question, others=[say(12), say(12)])
assert first["preemptions"] > 0 and first["recomputed_tokens"] == 0
print("turn 1: preempted", first["preemptions"], "time(s), tokens computed twice: 0")

so_far = question + first["answer"] + say(10)
second = run_turn(so_far, others=[])
print("turn 2:", len(so_far), "prompt tokens, hits:", second["hits"])
assert second["hits"]["storage"] > 0

# %%
# The same tokens as without a cache
# ----------------------------------

plain = Engine(
    model,
    block_size=BLOCK_SIZE,
    num_blocks=64,
    token_budget=32,
    max_running=1,
    max_model_len=112,
    prefix_cache=False,
)
plain.add_request(Request("1", question, max_new_tokens=24))
plain.add_request(Request("2", so_far, max_new_tokens=24))
answers = {request.request_id: request.output_tokens for request in plain.run()}
assert [answers["1"], answers["2"]] == [first["answer"], second["answer"]]
print("both answers equal those of an engine without a cache")

# %%
# The tier of each block
# ----------------------
#
# A row is a block of the conversation, a column a step of the engine. The colour shows the fastest
# tier in which the block is published; white means not published, or not computed yet. While the
# conversation is parked, its blocks leave the device only when other requests need them.

NOWHERE, STORAGE, HOST, DEVICE = range(4)
colours = ["#ffffff", "#e0a94a", "#8d6cab", "#3f7fb5"]


def picture(places: list[Any]) -> np.ndarray:
    """Return the tier of each block at each step."""
    tiers = np.zeros((max(place["blocks"] for place in places), len(places)), int)
    for step, place in enumerate(places):
        tiers[place["storage"], step] = STORAGE
        on_device, with_host = place["device"], place["device"] + place["host"]
        tiers[:with_host, step] = HOST
        tiers[:on_device, step] = DEVICE
    return tiers


turns = [first, second]
steps = [len(turn["places"]) for turn in turns]
figure, axes = plt.subplots(
    1, 2, figsize=(9, 3), sharey=True, width_ratios=steps, layout="constrained"
)
for axis, turn, title in zip(axes, turns, ["turn 1", "turn 2, another process"], strict=True):
    tiers = picture(turn["places"])
    axis.imshow(
        tiers, cmap=ListedColormap(colours), vmin=0, vmax=3, aspect="auto", interpolation="none"
    )
    parked = [step for step, place in enumerate(turn["places"]) if place["status"] == "preempted"]
    if parked:
        axis.axvspan(parked[0] - 0.5, parked[-1] + 0.5, fill=False, linestyle="--")
        axis.text(np.mean(parked), -0.7, "parked", ha="center", va="bottom", fontsize="small")
    axis.set_title(title, pad=18)
    axis.set_xlabel("step")
axes[0].set_ylabel("block of the conversation")
names = ["device", "host", "storage"]
figure.legend(
    [Patch(facecolor=colours[tier], edgecolor="#5b6b7b") for tier in (DEVICE, HOST, STORAGE)],
    names,
    loc="outside right upper",
)
plt.show()
temporary.cleanup()
