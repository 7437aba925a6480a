"""
A model on several devices
==========================

The heads of a model, and the KV of each, are cut over the devices of a mesh. Here four devices of a
CPU share a tiny model: they give the tokens that one device gives, and find the KV that one device
has stored, because a block in storage does not depend on the number of devices.

JAX fixes the number of devices when a process starts, so each engine is a process of this program:

.. literalinclude:: ../examples/devices/serve.py
   :language: python
   :lines: 6-
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from radixkv.scheduler.models import TensorParallelError, load_config, make_tiny_checkpoint
from radixkv.scheduler.models.tensor_parallel import split_devices

HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
PROGRAM = HERE / "devices" / "serve.py"
PROMPTS = [[5 + i for i in range(24)], [7, 8, 9]]

temporary = TemporaryDirectory()
checkpoint, storage = Path(temporary.name, "model"), Path(temporary.name, "storage")
make_tiny_checkpoint(checkpoint, family="qwen3", seed=0)


def serve(num_devices: int) -> Any:
    """Run a process with so many devices."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(checkpoint), str(storage), str(num_devices)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# %%
# One device, then four
# ---------------------
#
# The second process computes only the prompt tokens that are not in whole stored blocks.

one, four = serve(1), serve(4)
assert four["tokens"] == one["tokens"]
assert one["from storage"] == 0 < four["from storage"]
for number, result in ((1, one), (4, four)):
    print(number, "devices:", result)

# %%
# How a model can be cut
# ----------------------
#
# With more devices than KV heads, several devices hold the same KV head, as in vLLM. A model whose
# heads cannot be cut into equal parts is refused, with the numbers.

config = load_config(checkpoint)
print("query heads:", config.num_heads, "KV heads:", config.num_kv_heads)
for number in (1, 2, 3, 4, 8):
    try:
        heads, copies = split_devices(config, number)
    except TensorParallelError as error:
        print(f"{number}: refused: {error}")
    else:
        print(f"{number}: {config.num_kv_heads // heads} KV heads each, {copies} of each")
temporary.cleanup()
