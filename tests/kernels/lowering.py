"""Lower and compile kernels for an H100 on a machine without a GPU.

::

    lowered_for_h100   StableHLO with the kernels in it: needs no more than JAX
    compile_for_h100   machine code, by XLA, Mosaic and ptxas: needs the wheels in `WHEELS`

`.ci/run` installs the wheels and sets RADIXKV_MUST_COMPILE. Elsewhere a test that needs them is
skipped, and the reason names the missing wheel.
"""

import contextlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from _pytest.mark import ParameterSet
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
A100 = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu")
OTHER_GPUS = {"8.0": A100.device_kind, "8.9": "NVIDIA L40S", "10.0": "NVIDIA B200"}
"""GPUs on which no Mosaic kernel runs, by compute capability."""
SHARED_MEMORY_BYTES = 227 * 1024  # of one thread block

WHEELS = {
    "jax_cuda13_plugin": "jax-cuda13-plugin",
    "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
    "nvidia.cu13.bin": "nvidia-cuda-nvcc",
    "nvidia.cu13.nvvm": "nvidia-nvvm",
}


def at_night(case: object) -> ParameterSet:
    """Return a case of a parametrised test that runs at night only."""
    return pytest.param(case, marks=pytest.mark.nightly, id=str(case))


marked = False
"""Whether the current test has the marker sm_90a."""


class Compiled(NamedTuple):
    """Compiler statistics of a function; the maximum over its kernels if it has several."""

    registers: int
    """Registers per thread."""
    spill_bytes: int
    """Bytes of spill stores and loads."""
    shared_bytes: int
    """Static and dynamic shared memory per thread block."""
    alias_bytes: int
    """Bytes of outputs that reuse donated arguments."""
    temp_bytes: int
    """Device memory besides arguments and results."""
    instructions: Counter[str]
    """Count of each PTX instruction (with modifiers) in the Mosaic kernels."""

    def count(self, prefix: str) -> int:
        """Number of instructions that start with `prefix`, such as `wgmma.mma_async`."""
        return sum(n for name, n in self.instructions.items() if name.startswith(prefix))

    def products(self) -> set[str]:
        """Types of the WGMMA products: accumulator, left and right operand."""
        found = (
            re.search(r"wgmma\.mma_async\..*\.m\d+n\d+k\d+\.(.*)", n) for n in self.instructions
        )
        return {match[1] for match in found if match}

    def narrow(self) -> set[str]:
        """Instructions that compute with numbers of 16 bits, products aside."""
        pattern = re.compile(r"(?!cvt|mov|ld|st|wgmma|prmt|shfl)\w.*\.(bf16|f16)(x2)?\b")
        return {name for name in self.instructions if pattern.match(name)}


def shaped(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def on_h100():
    """Context manager: functions are traced for an H100."""
    return on_device(H100)


def on_device(device: AbstractDevice):
    """Context manager: functions are traced for a device, and run where their arguments are."""
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lowered_for_h100(function, *args, donate_argnums=()) -> str:
    """The StableHLO of `function`; a Mosaic kernel is a custom call to `mosaic_gpu_v2` in it."""
    with on_h100():
        traced = jax.jit(function, donate_argnums=donate_argnums).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def missing_wheel() -> str | None:
    """Name of the first missing package that compilation needs, or None."""
    for module, wheel in WHEELS.items():
        try:
            found = find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return wheel
    return None


def compile_for_h100(function, *args, donate_argnums=()) -> Compiled:
    """Compile `function` to sm_90a; skip the test if a compiler is missing."""
    with tempfile.TemporaryDirectory() as dump, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_TO", dump)
        executable = _compile(_config(), function, args, donate_argnums)
        return _report(Path(dump), executable.memory_analysis())


def compile_for_other_gpu(capability: str, function, *args):
    """Compile `function` for one of `OTHER_GPUS`; skip the test if a compiler is missing.

    XLA takes the numbers of cores and of bytes of an H100, on which its choices hardly depend.
    """
    major, minor = capability.split(".")
    hopper = "major: 9 feature_extension: ACCELERATED_FEATURES"
    config = _config().replace(hopper, f"major: {major} minor: {minor}")
    return _compile(config.replace(H100.device_kind, OTHER_GPUS[capability]), function, args)


def _config() -> str:
    return Path(__file__).with_name("h100.txtpb").read_text()


def _compile(config: str, function, args, donate_argnums=()):
    """Compile for the GPU of the config."""
    assert marked, "a test that compiles needs the marker sm_90a"
    if wheel := missing_wheel():
        reason = f"not compiled: {wheel} is not installed"
        if "RADIXKV_MUST_COMPILE" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    jitted = jax.jit(function, donate_argnums=donate_argnums)
    with _no_cache_of_programs(), use_abstract_mesh(mesh.abstract_mesh):
        return jitted.lower(*args).compile()


@contextlib.contextmanager
def _no_cache_of_programs() -> Iterator[None]:
    """Disable the compilation cache, because a cached program dumps nothing."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


def _report(dump: Path, memory) -> Compiled:
    ptxas = "\n".join(path.read_text() for path in dump.glob("*.ptxas"))
    passes = "\n".join(path.read_text() for path in dump.glob("*.mlir-passes.log"))
    ptx = "\n".join(path.read_text() for path in dump.glob("*.ptx"))
    assert ptx, "no Mosaic kernel was compiled; one that this process compiled before is cached"

    def largest(pattern: str, text: str) -> int:
        return max((int(number) for number in re.findall(pattern, text)), default=0)

    return Compiled(
        registers=largest(r"Used (\d+) registers", ptxas),
        spill_bytes=largest(r"(\d+) bytes spill", ptxas),
        shared_bytes=largest(r"(\d+) bytes smem", ptxas)
        + largest(r"dynamic_shared_memory_size %c(\d+)_i32", passes),
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        instructions=Counter(
            re.findall(r"(?:^|;)\s+(?:@!?%?\w+\s+)?([a-z][\w.:]*)[ ;\t]", ptx, re.M)
        ),
    )
