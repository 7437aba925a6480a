"""Write `models.json`: what transformers computes with our tiny checkpoints.

The tests compare with the committed file and need neither torch nor transformers. To make it anew,
in an environment with `torch`, `transformers` and radixkv (its models need jax and safetensors)::

    python tests/goldens/make_goldens.py

For each case: the checkpoint's arguments and the SHA-256 of its tensors, and per prompt the 64
greedy tokens and the logits of a few positions, at every 32nd token of the vocabulary. A prompt is
taken only if the best logit leads the second by at least MIN_GAP at every one of the 64 steps, so
that rounding cannot turn a choice: our float32 logits differ from these by 3e-5 at most.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from radixkv.scheduler.models import make_tiny_checkpoint

MIN_GAP = 0.005
NUM_TOKENS = 64
LOGIT_STRIDE = 32
PROMPT_LENGTHS = (1, 16, 37, 300)

# The third case goes through every option that the first two leave alone, in the spelling that
# config.json had before transformers 5.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "seed": 0, "overrides": {}},
    "qwen3": {"family": "qwen3", "seed": 0, "overrides": {}},
    "llama_biases_linear_rope": {
        "family": "llama",
        "seed": 1,
        "overrides": {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": None,
            "rope_parameters": None,
            "rope_theta": 50_000.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    },
}


def main() -> None:
    """Compute every case and write the file beside this script."""
    torch.set_num_threads(1)
    goldens: dict[str, Any] = {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "settings": "CPU, float32, eager attention, one thread",
        "min_gap": MIN_GAP,
        "logit_stride": LOGIT_STRIDE,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in CASES.items():
            goldens["cases"][name] = make_case(Path(folder) / name, arguments)
    path = Path(__file__).with_name("models.json")
    path.write_text(json.dumps(goldens, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


def make_case(directory: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Make one checkpoint and compute its prompts."""
    make_tiny_checkpoint(
        directory,
        arguments["family"],
        arguments["seed"],
        overrides=arguments["overrides"],
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(directory / "model.safetensors").items()):
        digest.update(name.encode() + tensor.tobytes())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    prompts = [find_prompt(model, length) for length in PROMPT_LENGTHS]
    for prompt in prompts:
        print(
            f"{directory.name}: {num_parameters} parameters, prompt of {len(prompt['prompt'])}, "
            f"seed {prompt['prompt_seed']}, gap {prompt['gap']}, "
            f"{len(set(prompt['tokens']))} distinct tokens"
        )
    return {**arguments, "sha256": digest.hexdigest(), "prompts": prompts}


def find_prompt(model: Any, length: int) -> dict[str, Any]:
    """Take the first random prompt of a length whose continuation has no close call."""
    for prompt_seed in range(100):
        prompt = np.random.RandomState(prompt_seed).randint(2, 1024, size=length).tolist()
        tokens, gap = decode_greedily(model, prompt)
        if gap >= MIN_GAP and len(set(tokens)) >= NUM_TOKENS // 2:
            break
    else:
        raise AssertionError(f"no prompt of {length} tokens with a gap of {MIN_GAP}")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0]
    # The whole sequence at once must agree with the cached decode: else the gap means nothing.
    assert logits[length - 1 :].argmax(-1).tolist() == tokens
    positions = sorted({0, length // 2, length - 1, length + NUM_TOKENS // 2, len(logits) - 1})
    return {
        "prompt_seed": prompt_seed,
        "prompt": prompt,
        "tokens": tokens,
        "gap": round(gap, 6),
        "logits": {
            position: [round(value, 6) for value in logits[position, ::LOGIT_STRIDE].tolist()]
            for position in positions
        },
    }


def decode_greedily(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Return the greedy continuation and the least lead of a best logit over the second."""
    tokens: list[int] = []
    gap = float("inf")
    inputs, cache = torch.tensor([prompt]), None
    with torch.no_grad():
        while len(tokens) < NUM_TOKENS:
            output = model(inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            best, second = output.logits[0, -1].topk(2).values.tolist()
            gap = min(gap, best - second)
            tokens.append(int(output.logits[0, -1].argmax()))
            inputs = torch.tensor([[tokens[-1]]])
    return tokens, gap


if __name__ == "__main__":
    main()
