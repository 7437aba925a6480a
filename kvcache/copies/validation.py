"""What a driver refuses before it starts anything: operations on blocks that are not there."""

from __future__ import annotations

import numpy as np

from ..tiers.operations import Operation, OpKind
from ..tokens import Int32Array
from .block_copies import BlockCopies
from .host_arrays import HostArrays


def check_blocks(operation: Operation, device: BlockCopies, host: HostArrays) -> None:
    """Refuse what no manager of these pools and this host tier decides.

    Raises:
        IndexError: for a block that they have not: the manager was made for more of them.
        ValueError: if a block is written twice, or read and written.
    """
    sources, destinations = operation.sources, operation.destinations
    match operation.kind:
        case OpKind.DEVICE_TO_HOST:
            device.check_ids(sources)
            host.check_ids(destinations)
        case OpKind.HOST_TO_DEVICE:
            host.check_ids(sources)
            device.check_ids(destinations)
        case OpKind.DEVICE_TO_DEVICE:
            device.check_ids(sources)
            device.check_ids(destinations)
            _check_apart(sources, destinations)
        case OpKind.HOST_TO_STORAGE:
            host.check_ids(sources)
        case OpKind.STORAGE_TO_HOST:
            host.check_ids(destinations)


def _check_apart(sources: Int32Array, destinations: Int32Array) -> None:
    """Refuse copies that differ by the order in which blocks are read and written."""
    shared = np.intersect1d(sources, destinations)
    if len(shared) or len(np.unique(destinations)) < len(destinations):
        raise ValueError("a block is written twice, or read and written, in one operation")
