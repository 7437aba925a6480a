"""Complete prompts on several devices: reads prompts; writes tokens and what they took.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python serve.py CHECKPOINT STORAGE NUM_DEVICES
"""

import json
import sys
from pathlib import Path

from radixkv import LLM
from radixkv.scheduler import GenerationParams
from radixkv.scheduler.models import tensor_parallel_mesh


def main(checkpoint: Path, storage: Path, num_devices: int) -> None:
    """Load the model onto the devices, and complete the prompts, with KV from storage if it can."""
    llm = LLM(
        checkpoint,
        mesh=tensor_parallel_mesh(num_devices),
        storage=storage.as_uri(),
        block_size=8,
        num_blocks=32,
        token_budget=32,
        max_running=2,
        max_model_len=64,
    )
    with llm:
        outputs = llm.generate(json.load(sys.stdin), GenerationParams(max_tokens=8))
        counts = llm.engine.stats().scheduler
    tokens = [list(output.token_ids) for output in outputs]
    result = {
        "tokens": tokens,
        "computed": counts.prefill_tokens,
        "from storage": counts.storage_hit_tokens,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
