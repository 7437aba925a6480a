"""Choice of the backend by device, and the errors of unsupported requests."""

import importlib.util
import re
import sys
from functools import partial
from itertools import product
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractDevice

from radixkv.kernels import (
    KernelArgumentError,
    attention_backend,
    backends,
    compiler_options,
    paged_decode,
    paged_extend,
)
from radixkv.kernels.backends import choose_backend, target_device
from radixkv.kernels.paged_decode import api as decode_api
from radixkv.kernels.paged_decode import mosaic as decode_mosaic
from radixkv.kernels.paged_extend import api as extend_api
from radixkv.kernels.paged_extend import mosaic as extend_mosaic

from .lowering import H100, on_device, on_h100, shaped

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "gpu_kernels.md"


def documented() -> list[list[str]]:
    """Cells of the rows of the table of devices."""
    table = DOCUMENTATION.read_text().partition("| Device | Queries |")[2].partition("\n\n")[0]
    return [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]


def documented_head_dims() -> list[list[str]]:
    """The head_dims of the last two columns."""
    head = DOCUMENTATION.read_text().partition("| Device | Queries |")[2].partition("\n")[0]
    return [re.findall(r"\d+", column) for column in head.strip("| ").split(" | ")]


class TestTarget:
    def test_default_device(self):
        assert target_device().name == jax.devices()[0].device_kind

    def test_abstract_device_goes_before_it(self):
        with on_h100():
            assert target_device() == (H100.device_kind, "9.0", 132, "gpu")

    def test_chosen_default_device(self):
        cpu = jax.devices("cpu")[0]
        for device in (cpu, "cpu"):
            with jax.default_device(device):
                assert target_device() == (cpu.device_kind, None, 1, "cpu")

    @pytest.mark.parametrize(
        ("platform", "is_gpu"),
        [("cpu", False), ("gpu", True), ("cuda", True), ("rocm", True), ("tpu", False)],
    )
    def test_gpus_are_those_of_any_maker(self, platform, is_gpu):
        device = AbstractDevice(device_kind="one", num_cores=None, platform=platform)
        with on_device(device):
            assert target_device() == ("one", None, 1, platform)
            assert backends.is_gpu() == is_gpu

    @pytest.mark.parametrize("kind", ["GH200 480GB", "H20", "H100 PCIe", "H200", "H800", "H20-3e"])
    @pytest.mark.parametrize("platform", ["gpu", "cuda"])
    def test_hopper_is_known_by_its_names(self, kind, platform):
        for name, capability in ((f"NVIDIA {kind}", "9.0"), (f"NVIDIA R{kind}", None)):
            device = AbstractDevice(device_kind=name, num_cores=7, platform=platform)
            with on_device(device):
                assert target_device() == (name, capability, 7, platform)


def test_compiler_options_are_only_for_cpus():
    with on_h100():
        assert compiler_options() is None


class TestChoose:
    def test_mosaic_on_hopper(self):
        with on_h100():
            assert choose_backend(None, None) == choose_backend("mosaic", None) == "mosaic"
            assert choose_backend("xla", None) == "xla"

    def test_xla_where_mosaic_cannot_serve(self):
        with on_h100():
            assert choose_backend(None, "mosaic needs a head_dim of 64, got 80") == "xla"
        with jax.default_device("cpu"):
            assert choose_backend(None, None) == "xla"

    def test_the_choice_is_made_when_a_function_is_traced_for_a_device(self):
        chosen = []

        @jax.jit
        def traced(x):
            chosen.append(choose_backend(None, None))
            return x

        x = jax.ShapeDtypeStruct((), "float32")
        with jax.default_device("cpu"):
            traced.lower(x)
        with on_h100():
            traced.trace(x)
        assert chosen == ["xla", "mosaic"]

    def test_messages(self):
        with on_h100(), pytest.raises(KernelArgumentError) as refusal:
            choose_backend("mosaic", "mosaic needs a head_dim of 64, got 80")
        assert str(refusal.value) == (
            "backend must be 'xla' or None here: mosaic needs a head_dim of 64, got 80"
        )
        with jax.default_device("cpu"), pytest.raises(KernelArgumentError) as refusal:
            choose_backend("mosaic", None)
        assert str(refusal.value) == (
            "backend must be 'xla' or None here: mosaic needs an NVIDIA GPU of compute capability "
            "9.0, got cpu"
        )
        with pytest.raises(KernelArgumentError) as refusal:
            choose_backend("triton", None)
        assert str(refusal.value) == "backend must be 'mosaic', 'xla' or None, got 'triton'"

    def test_what_mosaic_needs_and_is_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
        path = backends.__file__.replace("backends", "mosaic_compat")
        found = importlib.util.spec_from_file_location("radixkv.kernels.without_absl", path)
        assert found is not None and found.loader is not None
        with pytest.raises(ModuleNotFoundError) as missing:
            found.loader.exec_module(importlib.util.module_from_spec(found))
        assert str(missing.value) == (
            f"Pallas Mosaic GPU in JAX {jax.__version__} needs "
            "jax.experimental.pallas.mosaic_gpu: pip install absl-py"
        )


class TestAttention:
    """What is reported is what `paged_decode` and `paged_extend` choose, and why."""

    @staticmethod
    def backend(dtype="bfloat16", q_heads=8, kv_heads=2, head_dim=64, rows=4):
        pool = shaped((9, kv_heads, 16, head_dim), dtype)
        return attention_backend(shaped((32, q_heads, head_dim), dtype), pool, rows)

    def test_mosaic_on_hopper(self):
        with on_h100():
            assert self.backend() == ("mosaic", f"{H100.device_kind} runs mosaic with bfloat16")

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ({"dtype": "float32"}, "mosaic needs q of bfloat16 or float16, got float32"),
            (
                {"head_dim": 72},
                "mosaic needs a head_dim of 64, 80, 96, 112, 128, 192 or 256, got 72",
            ),
            ({"q_heads": 130}, "mosaic needs at most 64 query heads per KV head, got 65"),
        ],
    )
    def test_the_limit_that_is_not_met_is_the_reason(self, arguments, reason):
        with on_h100():
            assert self.backend(**arguments) == ("xla", reason)
            assert self.backend(q_heads=128).backend == "mosaic"

    @pytest.mark.parametrize("row", documented())
    def test_what_the_documentation_says_is_what_runs(self, row, monkeypatch):
        """Each function is replaced by its name; a table in `docs/gpu_kernels.md` expects one."""
        devices, dtypes, *expected = row
        packages = {"decode": decode_mosaic, "extend": extend_mosaic}
        ran = []

        def named(name):
            def attend(q, *_, **__):
                ran.append(name)
                return q, None

            return attend

        for operation, mosaic in packages.items():
            monkeypatch.setattr(mosaic, operation, named("Mosaic"))
            api = {"decode": decode_api, "extend": extend_api}[operation]
            monkeypatch.setattr(api, f"{operation}_batched", named("XLA, large"))
            monkeypatch.setattr(api, f"{operation}_xla", named("XLA, small"))
        for kind, dtype, (head_dims, name) in product(
            devices.split(", "),
            dtypes.split(", "),
            zip(documented_head_dims(), expected, strict=True),
        ):
            gpu = kind != "cpu"
            device = AbstractDevice(
                device_kind=f"NVIDIA {kind}" if gpu else kind, num_cores=100,
                platform="gpu" if gpu else "cpu",
            )  # fmt: skip
            for head_dim in map(int, head_dims):
                ran.clear()
                blocks, rows = shaped((9, 2, 16, head_dim), dtype), shaped((4,), "int32")
                read = (
                    shaped((4, 8, head_dim), dtype),
                    blocks,
                    blocks,
                    shaped((4, 3), "int32"),
                    rows,
                )
                with on_device(device):
                    jax.eval_shape(partial(paged_decode, sm_scale=1.0), *read)
                    jax.eval_shape(partial(paged_extend, sm_scale=1.0), *read, rows, rows)
                    reported = attention_backend(*read[:2], 4).backend
                assert ran == [name, name], (kind, dtype, head_dim)
                assert reported == {"Mosaic": "mosaic"}.get(name, "xla")

    def test_other_devices(self):
        with jax.default_device("cpu"):
            assert self.backend() == (
                "xla",
                "mosaic needs an NVIDIA GPU of compute capability 9.0, got cpu",
            )
