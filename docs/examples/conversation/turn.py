"""One turn of a conversation as a process: reads a prompt; writes the answer and block places.

python turn.py CHECKPOINT STORAGE_DIRECTORY < turn.json > result.json
"""

import json
import sys
from pathlib import Path

import numpy as np

from radixkv.kvcache import HostConfig
from radixkv.kvcache.storage import BackendOptions, StorageWorkers, open_backend
from radixkv.scheduler import Engine, Priority, Request, make_storage_namespace
from radixkv.scheduler.models import load_model

BLOCK_SIZE, NUM_BLOCKS, HOST_BLOCKS = 8, 14, 20


def main(checkpoint: Path, directory: Path) -> None:
    """Answer the prompt of the conversation while other requests compete for memory."""
    turn = json.load(sys.stdin)
    model = load_model(checkpoint)
    namespace = make_storage_namespace(model, "first", BLOCK_SIZE)
    backend = open_backend(directory.as_uri(), BackendOptions(max_bytes=2**20))
    storage = StorageWorkers(backend, max_bytes_in_flight=2**20)
    engine = Engine(
        model,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        token_budget=32,
        max_running=3,
        max_model_len=112,
        reserve_tokens=0,
        policy=Priority(),
        preempt="host",
        host=HostConfig(HOST_BLOCKS),
        storage=storage,
        storage_namespace=namespace,
    )
    conversation = Request("conversation", turn["prompt"], turn["max_new_tokens"], priority=1)
    engine.add_request(conversation)
    places = []
    while engine.has_work:
        if len(conversation.output_tokens) == turn["others_after"] and turn["others"]:
            for number, prompt in enumerate(turn["others"]):
                engine.add_request(Request(f"other {number}", prompt, 40, priority=0))
            turn["others"] = []
        engine.step()
        match = engine.manager.match(conversation.tokens)
        keys = namespace.block_keys(conversation.tokens)
        places.append(
            {
                "status": conversation.status.value,
                "blocks": len(keys),
                "device": match.num_blocks,
                "host": match.num_host_blocks,
                "storage": np.flatnonzero(backend.contains(keys)).tolist(),
            }
        )
    engine.close()
    storage.close()
    stats = engine.stats().scheduler
    json.dump(
        {
            "answer": conversation.output_tokens,
            "places": places,
            "preemptions": conversation.num_preemptions,
            "recomputed_tokens": stats.recomputed_tokens,
            "hits": {
                "device": conversation.num_hit_tokens,
                "host": conversation.num_host_hit_tokens,
                "storage": conversation.num_storage_hit_tokens,
            },
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
