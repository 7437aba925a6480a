"""Errors of loading a checkpoint; each names the file and carries the values.

::

    RadixKVError
    └── CheckpointError
        ├── CheckpointFileError
        ├── UnsupportedModelError
        ├── TensorMissingError
        ├── TensorShapeError
        ├── TensorDtypeError
        ├── TensorUnexpectedError
        └── MissingExtraError
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...kvcache.errors import RadixKVError


class CheckpointError(RadixKVError):
    """Base of these errors; raised itself for an invalid entry of config.json."""


class CheckpointFileError(CheckpointError):
    """A file of the checkpoint is missing or cannot be read."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class UnsupportedModelError(CheckpointError):
    """The configuration needs a feature that the model code does not have."""

    def __init__(self, path: Path, key: str, value: object, supported: str) -> None:
        super().__init__(f"{path}: {key} is {value!r}, but only {supported} is supported")
        self.path = path
        self.key = key
        self.value = value


class TensorMissingError(CheckpointError):
    """A tensor that the configuration requires is in none of the files."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(f"{path}: no tensor {name!r}")
        self.path = path
        self.name = name


class TensorShapeError(CheckpointError):
    """A tensor does not have the shape that the configuration requires."""

    def __init__(
        self, path: Path, name: str, shape: Sequence[int], expected: Sequence[int]
    ) -> None:
        super().__init__(
            f"{path}: tensor {name!r} has shape {list(shape)}, "
            f"but config.json calls for {list(expected)}"
        )
        self.path = path
        self.name = name
        self.shape = tuple(shape)
        self.expected = tuple(expected)


class TensorDtypeError(CheckpointError):
    """A tensor is not float32, float16 or bfloat16, such as quantised weights."""

    def __init__(self, path: Path, name: str, dtype: str) -> None:
        super().__init__(
            f"{path}: tensor {name!r} has dtype {dtype}, but only F32, F16 and BF16 are supported"
        )
        self.path = path
        self.name = name
        self.dtype = dtype


class TensorUnexpectedError(CheckpointError):
    """The files hold tensors that the configuration does not explain, such as biases."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(
            f"{path}: {len(names)} tensors that config.json does not account for, "
            f"the first is {names[0]!r}"
        )
        self.path = path
        self.names = tuple(names)


class MissingExtraError(CheckpointError):
    """A file needs an optional library that is not installed."""

    def __init__(self, path: Path, library: str, extra: str) -> None:
        super().__init__(
            f"{path}: reading it needs the library {library!r}: pip install 'radixkv[{extra}]'"
        )
        self.path = path
        self.library = library
        self.extra = extra
