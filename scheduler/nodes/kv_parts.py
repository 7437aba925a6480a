"""Copies of the KV of a part: from a prefill node's blocks, and into a decode node's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ...kvcache import BlockArrays
from ...kvcache.copies.block_copies import BlockCopies, CopyKind, exact_pieces
from ..engine import ModelRunner, make_storage_namespace
from ..engine.programs import layers_of
from ..handoff import MAX_PART_BLOCKS
from .transport import ArraySpec, Descriptor, PayloadArray
from .transport.descriptors import digest_namespace, is_ready


class KVParts:
    """Copies whole blocks of a group of layers to and from arrays without padding.

    Programs are compiled for powers of two, so a part is split into pieces of these sizes::

        21 blocks    16 | 4 | 1    of each piece, each layer's K, then each layer's V:
                                   [blocks, kv_heads, block_size, head_dim]

    The groups have nearly equal numbers of layers, see `layers_of`.

    Attributes:
        weights_revision: name of the weights of the parts.
    """

    def __init__(
        self, runner: ModelRunner, kind: CopyKind, weights_revision: str, num_groups: int = 1
    ) -> None:
        """Compile every copy, the largest first.

        Args:
            runner: runner with the model and the arrays.
            kind: "gather" on a prefill node, "scatter" on a decode node.
            weights_revision: name of the weights; both nodes must agree on it and on the model's
                configuration.
            num_groups: groups of layers to compile for. Copies for other numbers are compiled when
                a part first needs them.
        """
        pools = runner.arrays.keys
        most = min(MAX_PART_BLOCKS, len(pools[0]) - 1)
        self._runner, self._kind = runner, kind
        self._max_blocks = 1 << (most.bit_length() - 1)
        self._copies: dict[int, BlockCopies] = {}  # by number of layers
        with runner.warming_up():
            for group in range(num_groups):
                self._copies_of(layers_of(len(pools), group, num_groups))
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
                for piece in exact_pieces(2 * self._max_blocks - 1, self._max_blocks):
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

    def describe(self, num_blocks: int, group: int = 0, num_groups: int = 1) -> Descriptor:
        """Describe the arrays of a part of so many blocks in one group of layers."""
        layers = self._layers_of(group, num_groups)
        specs = [
            ArraySpec((piece.stop - piece.start, *self._block_shape), self._dtype)
            for piece in exact_pieces(num_blocks, self._max_blocks)
            for _ in range(2 * (layers.stop - layers.start))
        ]
        return Descriptor(tuple(specs), num_blocks, 0, self._namespace_digest)

    def read(self, blocks: Sequence[int], group: int = 0, num_groups: int = 1) -> list[jax.Array]:
        """Gather the current content of blocks, without waiting for it."""
        arrays: list[jax.Array] = []
        layers = self._layers_of(group, num_groups)
        with self._runner.counting_compilations():
            copies, pools = self._copies_of(layers), self._pools_of(layers)
            for ids in self._pieces(blocks):
                arrays += copies.gather(pools, ids, len(ids))
        if self._part_device is not None:
            arrays = jax.device_put(arrays, self._part_device)
        return arrays

    def write(
        self,
        blocks: Sequence[int],
        arrays: Sequence[PayloadArray],
        group: int = 0,
        num_groups: int = 1,
    ) -> None:
        """Scatter the arrays of `read` into blocks, before every step that is dispatched later.

        The arrays must not change until `is_idle`.
        """
        layers = self._layers_of(group, num_groups)
        num_pools = 2 * (layers.stop - layers.start)
        with self._runner.counting_compilations():
            copies, pools = self._copies_of(layers), self._pools_of(layers)
            for number, ids in enumerate(self._pieces(blocks)):
                piece = arrays[number * num_pools : (number + 1) * num_pools]
                copies.scatter(pools, piece, ids, len(ids))
        self._replace(layers, pools)

    def is_idle(self) -> bool:
        """Whether all dispatched copies and steps have ended."""
        arrays = self._runner.arrays
        return all(map(is_ready, (*arrays.keys, *arrays.values)))

    def _pieces(self, blocks: Sequence[int]) -> Iterator[np.ndarray]:
        ids = np.array(blocks, np.int32)
        for piece in exact_pieces(len(ids), self._max_blocks):
            yield ids[piece]

    def _layers_of(self, group: int, num_groups: int) -> slice:
        return layers_of(len(self._runner.arrays.keys), group, num_groups)

    def _pools_of(self, layers: slice) -> BlockArrays:
        arrays = self._runner.arrays
        return BlockArrays(arrays.keys[layers], arrays.values[layers])

    def _replace(self, layers: slice, pools: BlockArrays) -> None:
        """Put the pools of some layers in place of donated ones."""
        arrays = self._runner.arrays
        keys, values = list(arrays.keys), list(arrays.values)
        keys[layers], values[layers] = pools.keys, pools.values
        arrays.keys, arrays.values = tuple(keys), tuple(values)

    def _copies_of(self, layers: slice) -> BlockCopies:
        num_layers = layers.stop - layers.start
        if num_layers not in self._copies:
            pools = self._pools_of(layers)
            self._copies[num_layers] = BlockCopies(pools, self._max_blocks, [self._kind])
            self._replace(layers, pools)
        return self._copies[num_layers]
