"""The namespace of an engine's storage: what it names, and what must fit the model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv.scheduler.engine.storage_namespace import check_namespace, make_storage_namespace
from radixkv.scheduler.errors import ConfigError

MODEL: Any = SimpleNamespace(
    config=SimpleNamespace(name="tiny", num_layers=3, num_kv_heads=5),
    params=SimpleNamespace(embedding=np.zeros(1, np.float16)),
)
STORAGE: Any = object()


def test_a_namespace_names_all_layers_and_heads_of_the_model() -> None:
    made = make_storage_namespace(MODEL, "revision", 16, b"salt")
    assert (made.model, made.weights_revision, made.salt) == ("tiny", "revision", b"salt")
    assert (made.kv_dtype, made.block_size) == ("float16", 16)
    assert (made.layers, made.heads) == ((0, 3), (0, 5))
    check_namespace(MODEL, STORAGE, made)
    check_namespace(MODEL, None, None)
    # The model's name, the weights and the tenant are the caller's.
    check_namespace(MODEL, STORAGE, replace(made, model="b", weights_revision="c", salt=b"d"))


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("kv_dtype", "float32", "float16"),
        ("layers", (0, 2), (0, 3)),
        ("layers", (1, 3), (0, 3)),
        ("heads", (0, 4), (0, 5)),
        ("heads", (1, 5), (0, 5)),
    ],
)
def test_a_namespace_of_another_model_is_refused(name: str, value: Any, needed: Any) -> None:
    given: Any = replace(make_storage_namespace(MODEL, "revision", 16), **{name: value})
    with pytest.raises(ConfigError) as refused:
        check_namespace(MODEL, STORAGE, given)
    assert str(refused.value) == f"storage_namespace has {name} {value!r}, the model {needed!r}"


def test_storage_and_namespace_go_together() -> None:
    for storage, namespace in (
        (STORAGE, None),
        (None, make_storage_namespace(MODEL, "revision", 16)),
    ):
        with pytest.raises(ConfigError, match=r"^storage and storage_namespace go together: "):
            check_namespace(MODEL, storage, namespace)
