"""The tiers of an engine: what its manager wants copied goes to a driver, the ends come back."""

from __future__ import annotations

import time
from typing import Final

import jax
import numpy as np

from ...kvcache import (
    BlockArrays,
    HostArrays,
    TierDriver,
    Tiers,
)
from ...kvcache.storage import Storage, StorageNamespace
from ..errors import ConfigError, EngineClosedError
from ..models import Model, Params
from .stats import CopyStats

_MAX_BLOCKS_PER_COPY: Final = 32
_WAIT_S: Final = 1.0
"""For a copy, when no request can go on without one: whatever ends wakes it sooner."""


class EngineTiers:
    """Carries operations to a driver, and their ends to the manager; on the engine's thread."""

    def __init__(self, tiers: Tiers, arrays: BlockArrays, storage: Storage | None) -> None:
        """Allocate the host tier, start the threads and compile every copy."""
        num_blocks = tiers.config.num_blocks
        most = min(_MAX_BLOCKS_PER_COPY, num_blocks, len(arrays.keys[0]) - 1)
        self._tiers = tiers
        self._driver = TierDriver(
            HostArrays.like(arrays, num_blocks),
            storage,
            max_blocks_per_copy=1 << (most - 1).bit_length(),
        )
        self._driver.warm_up(arrays)
        self._is_closed = False

    def check_open(self) -> None:
        """Refuse what needs copies, when there are none any more.

        Raises:
            EngineClosedError: after close, whatever it returned.
        """
        if self._is_closed:
            raise EngineClosedError("the engine is closed")

    def collect(self) -> None:
        """Tell the manager what has ended."""
        for result in self._driver.poll():
            self._tiers.complete(result.op_id, result.ok, fenced=result.fenced)
        for op_id in self._driver.fenced():
            self._tiers.fence(op_id)

    def dispatch(self, arrays: BlockArrays) -> None:
        """Start what was decided, before the next step: its pools are donated and replaced."""
        cancelled = self._tiers.take_cancelled()
        if cancelled:
            self._driver.cancel(cancelled)
        self._driver.touch(self._tiers.take_used())
        operations = self._tiers.take_operations()
        if operations:
            self._driver.dispatch(operations, arrays)

    def wait(self) -> None:
        """Wait until something has ended."""
        self._driver.wait(_WAIT_S)

    def close(self, arrays: BlockArrays, timeout_s: float) -> bool:
        """Let what is under way end, then stop the threads; see `Engine.close`."""
        self._is_closed = True
        end = time.monotonic() + timeout_s
        while True:
            self.collect()
            self.dispatch(arrays)
            left = end - time.monotonic()
            is_done = self._tiers.num_open_operations == 0 and not self._driver.is_touching
            if is_done or left <= 0:
                break
            self._driver.wait(left)
        return self._driver.close(timeout_s=max(end - time.monotonic(), 0.0))

    def stats(self) -> CopyStats:
        """Return what was copied."""
        stats = self._driver.stats()
        return CopyStats(
            copied_bytes={kind.value: count for kind, count in stats.copied_bytes.items()},
            operations={
                f"{kind.value}: {outcome.value}": count
                for (kind, outcome), count in stats.operations.items()
            },
            dropped_blocks=stats.dropped_blocks,
            errors=dict(stats.errors),
        )


def make_storage_namespace(
    model: Model, weights_revision: str, block_size: int, salt: bytes = b""
) -> StorageNamespace:
    """Say whose blocks an engine with this model stores, and how they look.

    Args:
        model: its configuration is a part of the name.
        weights_revision: which weights it has, such as a commit, or `weights_digest`.
        block_size: tokens per block.
        salt: a secret that keeps tenants apart.
    """
    config = model.config
    return StorageNamespace(
        model=config.name,
        weights_revision=weights_revision,
        kv_dtype=str(model.params.embedding.dtype),
        block_size=block_size,
        layers=(0, config.num_layers),
        heads=(0, config.num_kv_heads),
        salt=salt,
    )


def check_namespace(
    model: Model, storage: Storage | None, namespace: StorageNamespace | None
) -> None:
    """Refuse a storage without a name for its blocks, or with that of another model.

    Raises:
        ConfigError: with what differs.
    """
    if (storage is None) != (namespace is None):
        raise ConfigError("storage and storage_namespace go together: one was given alone")
    if namespace is None:
        return
    right = make_storage_namespace(model, namespace.weights_revision, namespace.block_size)
    for name in ("kv_dtype", "layers", "heads"):
        theirs, ours = getattr(namespace, name), getattr(right, name)
        if theirs != ours:
            raise ConfigError(f"storage_namespace has {name} {theirs!r}, the model {ours!r}")


def check_params(old: Params, new: Params) -> None:
    """Refuse weights that the compiled programs cannot take.

    Raises:
        ConfigError: if there are more or fewer, or one has another shape or dtype.
    """
    shapes = [
        [
            (jax.tree_util.keystr(path), np.shape(leaf), str(leaf.dtype))
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        ]
        for params in (old, new)
    ]
    if shapes[0] != shapes[1]:
        raise ConfigError("params are not of the shapes and dtypes that the model has")
