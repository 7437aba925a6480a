"""Storage namespaces: the identity under which an engine stores the blocks of its model."""

from __future__ import annotations

from ...kvcache.storage import Storage, StorageNamespace
from ..errors import ConfigError
from ..models import Model


def make_storage_namespace(
    model: Model, weights_revision: str, block_size: int, salt: bytes = b""
) -> StorageNamespace:
    """Return the storage namespace of an engine with this model.

    Args:
        model: its configuration becomes part of the namespace.
        weights_revision: name of the weights, such as a commit or a `weights_digest`.
        block_size: tokens per block.
        salt: secret that separates tenants.
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
    """Check that a storage comes with a namespace, and that the namespace fits the model.

    Raises:
        ConfigError: with the values that differ.
    """
    if (storage is None) != (namespace is None):
        raise ConfigError("storage and storage_namespace go together: one was given alone")
    if namespace is None:
        return
    expected = make_storage_namespace(model, namespace.weights_revision, namespace.block_size)
    for name in ("kv_dtype", "layers", "heads"):
        given, needed = getattr(namespace, name), getattr(expected, name)
        if given != needed:
            raise ConfigError(f"storage_namespace has {name} {given!r}, the model {needed!r}")
