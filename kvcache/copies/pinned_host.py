"""Memory of the host that a device copies to by itself, where JAX has it."""

from __future__ import annotations

from typing import Final

import jax
import numpy as np

_HOSTS: Final = frozenset({"cpu"})
"""Platforms whose own memory is the host's: another copy of it would cost, and gain nothing."""


def pinned_host(device: jax.Device) -> jax.sharding.Sharding | None:
    """Return where a device's arrays go on their way to the host; None: nowhere in particular.

    Tried once, with a few bytes: not all platforms and versions of JAX have it.
    """
    if device.platform in _HOSTS:
        return None
    sent = np.arange(1024, dtype=np.int32)
    try:
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        came = np.asarray(jax.device_put(jax.device_put(sent, device), pinned))
    except Exception:  # JAX's own types, which differ by version
        return None
    return pinned if np.array_equal(sent, came) else None
