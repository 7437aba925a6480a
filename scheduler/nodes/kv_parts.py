"""Copies of the KV of a part: from a prefill node's blocks, and into a decode node's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from ...kvcache import BlockArrays
from ...kvcache.copies.block_copies import BlockCopies, CopyKind, exact_pieces
from ..engine import ModelRunner, make_storage_namespace
from ..engine.programs import layers_of
from ..handoff import MAX_PART_BLOCKS, Sent
from .transport import ArraySpec, Descriptor, PayloadArray
from .transport.descriptors import digest_namespace, is_ready


class KVParts:
    """Copies whole blocks of a group of layers to and from arrays without padding.

    Programs are compiled for powers of two, so a part is split into pieces of these sizes::

        21 blocks    16 | 4 | 1    of each piece, each layer's K, then each layer's V:
                                   [blocks, kv_heads, block_size, head_dim]

    The groups have nearly equal numbers of layers, see `layers_of`. A part has blocks of the
    prefill node's size. A decode node with another size cuts and joins them on the host, with
    NumPy, so that nothing is compiled for a size that is met while serving.

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
        self._max_piece = MAX_PART_BLOCKS  # of a sender with more blocks than that
        self._copies: dict[int, BlockCopies] = {}  # by number of layers
        with runner.warming_up():
            for group in range(num_groups):
                self._copies_of(layers_of(len(pools), group, num_groups))
        heads, self._block_size, head_dim = pools[0].shape[1:]
        self._block_shape = heads, self._block_size, head_dim
        self._dtype = str(pools[0].dtype)
        # Parts have whole blocks, on one device, whatever the devices of the other node.
        self._device: jax.Device = runner.arrays.keys[0].addressable_shards[0].device
        sharding = runner.arrays.keys[0].sharding
        if sharding.num_devices > 1 and kind == "scatter":
            with runner.warming_up():  # JAX compiles how to cut an array that lies on one device
                # 2 n - 1 blocks are cut into pieces of each power of two up to n.
                for piece in exact_pieces(2 * self._max_blocks - 1, self._max_blocks):
                    shape = piece.stop - piece.start, *self._block_shape
                    part = np.zeros(shape, pools[0].dtype)
                    jax.device_put(jax.device_put(part, self._device), sharding)
        self.set_revision(weights_revision)

    def set_revision(self, weights_revision: str) -> None:
        """Set the name of the weights. Parts of other weights are refused."""
        runner = self._runner
        self.weights_revision = weights_revision
        # The same for all sizes of blocks: the shapes tell them apart.
        namespace = make_storage_namespace(runner.model, weights_revision, block_size=1)
        self._namespace_digest = digest_namespace(namespace.digest())

    def describe(
        self, num_blocks: int, group: int = 0, num_groups: int = 1, block_size: int | None = None
    ) -> Descriptor:
        """Describe the arrays of a part of so many blocks in one group of layers.

        The blocks have block_size tokens; None: as those of this node.
        """
        layers = self._layers_of(group, num_groups)
        heads, own_size, head_dim = self._block_shape
        specs = [
            ArraySpec(
                (piece.stop - piece.start, heads, block_size or own_size, head_dim), self._dtype
            )
            # The sender's pieces, which do not depend on the number of this node's blocks.
            for piece in exact_pieces(num_blocks, self._max_piece)
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
                whole = copies.gather(pools, ids, len(ids))
                arrays += [each.addressable_data(0) for each in whole]
        return arrays

    def write(
        self,
        blocks: Sequence[int],
        arrays: Sequence[PayloadArray],
        group: int = 0,
        num_groups: int = 1,
        sent: Sent | None = None,
    ) -> None:
        """Scatter the arrays of `read` into blocks, before every step that is dispatched later.

        The arrays must not change until `is_idle`.

        Args:
            blocks: blocks of this node.
            arrays: the arrays of a part.
            group, num_groups: its layers.
            sent: its blocks; None: as many as blocks, of the same size.
        """
        layers = self._layers_of(group, num_groups)
        num_pools = 2 * (layers.stop - layers.start)
        if sent is not None and sent.block_size != self._block_size:
            arrays = self._cut_and_join(arrays, num_pools, len(blocks), sent.num_skipped_tokens)
        with self._runner.counting_compilations():
            copies, pools = self._copies_of(layers), self._pools_of(layers)
            if isinstance(arrays[0], jax.Array) and arrays[0].devices() != {self._device}:
                arrays = jax.device_put(arrays, self._device)  # of a node in this process
            for number, ids in enumerate(self._pieces(blocks)):
                piece = arrays[number * num_pools : (number + 1) * num_pools]
                copies.scatter(pools, piece, ids, len(ids))
        self._replace(layers, pools)

    def _cut_and_join(
        self,
        arrays: Sequence[PayloadArray],
        num_pools: int,
        num_blocks: int,
        num_skipped_tokens: int,
    ) -> list[PayloadArray]:
        """Return the arrays that `read` would return if the sender had blocks of this size."""
        pools = []
        for pool in range(num_pools):
            sent = np.concatenate([np.asarray(each) for each in arrays[pool::num_pools]])
            pools.append(cut_and_join(sent, num_skipped_tokens, num_blocks, self._block_size))
        pieces = exact_pieces(num_blocks, self._max_blocks)
        return [pool[piece] for piece in pieces for pool in pools]

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
            self._copies[num_layers] = BlockCopies(
                pools, self._max_blocks, [self._kind], whole=True
            )
            self._replace(layers, pools)
        return self._copies[num_layers]


def cut_and_join(
    sent: npt.NDArray[Any], num_skipped_tokens: int, num_blocks: int, block_size: int
) -> npt.NDArray[Any]:
    """Cut the tokens of some blocks into blocks of another size.

    Args:
        sent: `[sent_blocks, kv_heads, sent_block_size, head_dim]`.
        num_skipped_tokens: tokens to leave out at the start.
        num_blocks, block_size: of the result. It may have more tokens, which are 0, or fewer.

    Returns:
        `[num_blocks, kv_heads, block_size, head_dim]`.
    """
    _, heads, _, head_dim = sent.shape
    tokens = sent.transpose(1, 0, 2, 3).reshape(heads, -1, head_dim)
    tokens = tokens[:, num_skipped_tokens : num_skipped_tokens + num_blocks * block_size]
    whole = np.zeros((heads, num_blocks * block_size, head_dim), sent.dtype)
    whole[:, : tokens.shape[1]] = tokens
    blocks = whole.reshape(heads, num_blocks, block_size, head_dim)
    return np.ascontiguousarray(blocks.transpose(1, 0, 2, 3))
