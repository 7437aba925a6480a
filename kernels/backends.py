"""Choice of the backend of a kernel while tracing, by device, dtype and shape.

::

    mosaic   Pallas Mosaic GPU kernels, for NVIDIA GPUs of compute capability 9.0 (Hopper)
    xla      jnp, everywhere: CPUs, other GPUs, float32 attention, shapes that fit no tile;
             attention in small steps on CPUs, in few large ones (`batched_attention`) on GPUs

There is no Triton backend. Mosaic is faster on Hopper, XLA works elsewhere, and Pallas on Triton is
deprecated since JAX 0.11 ("will be removed in a future version").
"""

import re
from typing import Literal, NamedTuple, get_args

import jax

from .argument_checks import KernelArgumentError

Backend = Literal["mosaic", "xla"]

MOSAIC_CAPABILITY = "9.0"
_COPIES_BFLOAT16 = jax.__version_info__ < (0, 11, 0)
_HOPPER = re.compile(r"\b(GH200|H20|H100|H200|H800)\b")


class TargetDevice(NamedTuple):
    """The device that a function is being traced for."""

    name: str
    capability: str | None
    """CUDA compute capability; None if the device is not an NVIDIA GPU."""
    num_cores: int
    """Number of streaming multiprocessors of a GPU, 1 for other devices."""
    platform: str
    """JAX's name of the kind of device: "cpu", "gpu" or "tpu"."""


def target_device() -> TargetDevice:
    """Return the device that the current trace is for.

    This is the device of the abstract mesh if there is one (lowering without a device, or
    `jax.set_mesh`), otherwise JAX's default device. A trace does not see that an array lies on
    another device: name the backend then, or set `jax.default_device`.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        hopper = abstract.platform in ("gpu", "cuda") and _HOPPER.search(abstract.device_kind)
        capability = MOSAIC_CAPABILITY if hopper else None
        cores = abstract.num_cores or 1
        return TargetDevice(abstract.device_kind, capability, cores, abstract.platform)
    device = getattr(jax.config, "jax_default_device")  # noqa: B009  # JAX's types lack it
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)
    cores = getattr(device, "core_count", None) or 1
    return TargetDevice(device.device_kind, capability, cores, device.platform)


def compiler_options() -> dict[str, str | bool] | None:
    """Return the options with which to compile programs that write pools, for the target device.

    On CPUs, JAX 0.10 has no bfloat16 scatter. A pass of its XLA replaces it by one in float32, so
    every write converts the whole pool, twice. Without this pass, the scatter is done in place.
    """
    if _COPIES_BFLOAT16 and target_device().platform == "cpu":
        return {"xla_disable_hlo_passes": "float-normalization-bf16"}
    return None


def is_gpu() -> bool:
    """Whether the target device is a GPU, of any maker."""
    return target_device().platform in ("gpu", "cuda", "rocm")


def why_not_mosaic(unsupported: str | None) -> str | None:
    """Return why the Mosaic kernel cannot run on the target device, or None.

    Args:
        unsupported: Reason why the kernel does not support the shapes and dtypes, or None.
    """
    device = target_device()
    if device.capability == MOSAIC_CAPABILITY:
        return unsupported
    return (
        f"mosaic needs an NVIDIA GPU of compute capability {MOSAIC_CAPABILITY}, got {device.name}"
    )


def choose_backend(backend: Backend | None, unsupported: str | None) -> Backend:
    """Return the requested backend, or the fastest one that supports the arguments.

    Args:
        backend: The requested backend; None for the fastest.
        unsupported: Reason why the Mosaic kernel does not support the shapes and dtypes ("mosaic
            needs ..., got ..."), or None.

    Raises:
        KernelArgumentError: The requested backend is unknown or does not support the arguments.
    """
    if backend not in (None, *get_args(Backend)):
        raise KernelArgumentError(f"backend must be 'mosaic', 'xla' or None, got {backend!r}")
    if backend == "xla":
        return "xla"
    reason = why_not_mosaic(unsupported)
    if reason is None:
        return "mosaic"
    if backend == "mosaic":
        raise KernelArgumentError(f"backend must be 'xla' or None here: {reason}")
    return "xla"
