"""
A model, with text in and text out
==================================

:class:`~radixkv.LLM` takes a checkpoint and completes texts. Here the model is
tiny and random, so its text means nothing; with a real one, the first line of code is
``radixkv.LLM("Qwen/Qwen3-0.6B")``.
"""

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import radixkv
from radixkv.scheduler import GenerationParams
from radixkv.scheduler.models import make_tiny_checkpoint

# %%
# A checkpoint
# ------------
#
# The tokenizer has a token for each letter, and the chat template writes one line per message.

letters = "abcdefghijklmnopqrstuvwxyz ,.?:\n"
tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer.decoder = decoders.Fuse()
template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

with TemporaryDirectory() as name:
    directory = Path(name)
    make_tiny_checkpoint(directory, "qwen3", overrides={"vocab_size": 32, "eos_token_id": None})
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    llm = radixkv.LLM(directory, num_blocks=128, max_running=4, token_budget=64)

print(llm.sizes)

# %%
# Texts and chats
# ---------------
#
# A list of prompts is one batch. The second prompt begins as the first one, so its first blocks are
# not computed again.

document = "a prefix that several prompts share is computed once, and then read by all of them. "
prompts = [document + question for question in ("what is shared?", "who reads it?")]
params = GenerationParams(max_tokens=24)
for output in llm.generate(prompts, params):
    print(repr(output.text), output.finish_reason, output.hits)

[output] = llm.chat([{"role": "user", "content": "hello"}], params)
print(repr(output.text))

# %%
# Streams
# -------
#
# ``serve`` gives the engine a thread of its own. The text comes as the tokens are computed, and the
# stop string ends it.

stop = output.text[10:12]
stopping = GenerationParams(max_tokens=24, stop=stop)


async def read() -> tuple[list[str], str | None]:
    """Return the pieces of the text, and why it ended."""
    pieces, reason = [], None
    async with llm.serve() as engine:
        assert engine.tokenizer is not None
        chat = engine.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
        async for streamed in engine.generate(chat, stopping):
            pieces.append(streamed.new_text)
            reason = streamed.finish_reason
    return pieces, reason


pieces, reason = asyncio.run(read())
assert "".join(pieces) == output.text[: output.text.index(stop)]
print(repr("".join(pieces)), "before", repr(stop), reason)

# %%
# What the cache saved
# --------------------

stats = llm.engine.stats().scheduler
figure, axes = plt.subplots(figsize=(6, 1.4), layout="constrained")
axes.barh(["prompt tokens"], [stats.prefill_tokens], color="#d95f02", label="computed")
axes.barh(
    ["prompt tokens"],
    [stats.hit_tokens],
    left=[stats.prefill_tokens],
    color="#1b9e77",
    label="from the cache",
)
figure.legend(loc="outside upper center", ncols=2, frameon=False)
plt.show()
