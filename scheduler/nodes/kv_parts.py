"""Copies of the KV of a part: from a prefill node's blocks, and into a decode node's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ...kvcache.copies.block_copies import BlockCopies, CopyKind
from ..engine import ModelRunner, make_storage_namespace
from ..handoff import MAX_PART_BLOCKS
from .transport import ArraySpec, Descriptor, PayloadArray
from .transport.descriptors import digest_namespace, is_ready


class KVParts:
    """Copies whole blocks of all layers to and from arrays without padding.

    Programs are compiled for powers of two, so a part is split into pieces of these sizes::

        21 blocks    16 | 4 | 1    of each piece, each layer's K, then each layer's V:
                                   [blocks, kv_heads, block_size, head_dim]

    Attributes:
        weights_revision: name of the weights of the parts.
    """

    def __init__(self, runner: ModelRunner, kind: CopyKind, weights_revision: str) -> None:
        """Compile every copy, the largest first.

        Args:
            runner: runner with the model and the arrays.
            kind: "gather" on a prefill node, "scatter" on a decode node.
            weights_revision: name of the weights; both nodes must agree on it and on the model's
                configuration.
        """
        pools = runner.arrays.keys
        most = min(MAX_PART_BLOCKS, len(pools[0]) - 1)
        self._runner = runner
        with runner.warming_up():
            self._copies = BlockCopies(runner.arrays, 1 << (most.bit_length() - 1), [kind])
        self._num_pools = 2 * len(pools)
        self._block_shape = tuple(pools[0].shape[1:])
        self._dtype = str(pools[0].dtype)
        sharding = runner.arrays.keys[0].sharding
        device_set: Any = sharding.device_set
        devices = sorted(device_set, key=lambda device: device.id)
        # Parts have whole blocks, whatever the devices of the other node.
        self._part_device = devices[0] if len(devices) > 1 else None
        if self._part_device is not None and kind == "scatter":
            with runner.warming_up():  # JAX compiles how to cut an array that lies on one device
                # 2 n - 1 blocks are cut into pieces of each power of two up to n.
                for piece in self._copies.exact_pieces(2 * self._copies.max_blocks - 1):
                    shape = piece.stop - piece.start, *self._block_shape
                    part = np.zeros(shape, pools[0].dtype)
                    jax.device_put(jax.device_put(part, self._part_device), sharding)
        self.set_revision(weights_revision)

    def set_revision(self, weights_revision: str) -> None:
        """Set the name of the weights. Parts of other weights are refused."""
        runner = self._runner
        namespace = make_storage_namespace(
            runner.model, weights_revision, runner.manager.block_size
        )
        self.weights_revision = weights_revision
        self._namespace_digest = digest_namespace(namespace.digest())

    def describe(self, num_blocks: int) -> Descriptor:
        """Describe the arrays of a part of so many blocks."""
        specs = [
            ArraySpec((piece.stop - piece.start, *self._block_shape), self._dtype)
            for piece in self._copies.exact_pieces(num_blocks)
            for _ in range(self._num_pools)
        ]
        return Descriptor(tuple(specs), num_blocks, 0, self._namespace_digest)

    def read(self, blocks: Sequence[int]) -> list[jax.Array]:
        """Gather the current content of blocks, without waiting for it."""
        arrays: list[jax.Array] = []
        with self._runner.counting_compilations():
            for ids in self._pieces(blocks):
                arrays += self._copies.gather(self._runner.arrays, ids, len(ids))
        if self._part_device is not None:
            arrays = jax.device_put(arrays, self._part_device)
        return arrays

    def write(self, blocks: Sequence[int], arrays: Sequence[PayloadArray]) -> None:
        """Scatter the arrays of `read` into blocks, before every step that is dispatched later.

        The arrays must not change until `is_idle`.
        """
        with self._runner.counting_compilations():
            for number, ids in enumerate(self._pieces(blocks)):
                first = number * self._num_pools
                piece = arrays[first : first + self._num_pools]
                self._copies.scatter(self._runner.arrays, piece, ids, len(ids))

    def is_idle(self) -> bool:
        """Whether all dispatched copies and steps have ended."""
        arrays = self._runner.arrays
        return all(map(is_ready, (*arrays.keys, *arrays.values)))

    def _pieces(self, blocks: Sequence[int]) -> Iterator[np.ndarray]:
        ids = np.array(blocks, np.int32)
        for piece in self._copies.exact_pieces(len(ids)):
            yield ids[piece]
