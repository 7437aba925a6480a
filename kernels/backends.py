"""Which implementation of a kernel runs, decided while tracing: by device, dtype and shape.

    mosaic   Pallas Mosaic GPU kernels, for NVIDIA GPUs of compute capability 9.0 (Hopper)
    xla      jnp, everywhere: CPUs, other GPUs, float32 attention, shapes that no tile fits

There is no Triton backend: on Hopper Mosaic is the faster, elsewhere XLA serves, and Pallas on
Triton is deprecated since JAX 0.11 ("will be removed in a future version").
"""

import re
from typing import Literal, NamedTuple, get_args

import jax

from .argument_checks import KernelArgumentError

Backend = Literal["mosaic", "xla"]

MOSAIC_CAPABILITY = "9.0"
_HOPPER = re.compile(r"\b(GH200|H20|H100|H200|H800)\b")


class Target(NamedTuple):
    """The device that a function is being traced for."""

    name: str
    capability: str | None
    """CUDA compute capability; None on everything but an NVIDIA GPU."""
    num_cores: int
    """Streaming multiprocessors of a GPU, 1 on anything else."""


def target() -> Target:
    """The device that the function being traced is for.

    That is the abstract mesh's device (when it is lowered without one, or under `jax.set_mesh`),
    else JAX's default device. An array that was placed on another device is not seen by a trace:
    name the backend, or set `jax.default_device`.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        hopper = abstract.platform in ("gpu", "cuda") and _HOPPER.search(abstract.device_kind)
        capability = MOSAIC_CAPABILITY if hopper else None
        return Target(abstract.device_kind, capability, abstract.num_cores or 1)
    device = getattr(jax.config, "jax_default_device")  # noqa: B009  # JAX's types lack it
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)
    return Target(device.device_kind, capability, getattr(device, "core_count", None) or 1)


def choose(backend: Backend | None, obstacle: str | None) -> Backend:
    """The backend to use: the one that was asked for, or the fastest that can serve.

    Args:
        backend: What the caller asked for; None leaves the choice to this function.
        obstacle: Why the Mosaic kernel cannot serve these shapes and dtypes ("mosaic needs ...,
            got ..."); None if it can.

    Raises:
        KernelArgumentError: The backend that was asked for is unknown or cannot serve.
    """
    if backend not in (None, *get_args(Backend)):
        raise KernelArgumentError(f"backend must be 'mosaic', 'xla' or None, got {backend!r}")
    if backend == "xla":
        return "xla"
    device = target()
    if device.capability != MOSAIC_CAPABILITY:
        obstacle = (
            f"mosaic needs an NVIDIA GPU of compute capability {MOSAIC_CAPABILITY}, "
            f"got {device.name}"
        )
    if obstacle is None:
        return "mosaic"
    if backend == "mosaic":
        raise KernelArgumentError(f"backend must be 'xla' or None here: {obstacle}")
    return "xla"
