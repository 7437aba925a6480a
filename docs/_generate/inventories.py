"""Where the docs of Python, NumPy, JAX and others describe the objects that our signatures name.

Sphinx links names of other projects by their inventories, which it would fetch. These are written
here from a short list instead, so that a build needs no network. A new name of another project is a
warning until it is in the list.

Source: the addresses follow the projects' own documentation, whose pages are named after objects.
"""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "_generated"

PYTHON: Final = {
    "library/collections.html": "collections.Counter",
    "library/collections.abc.html": "collections.abc.Awaitable collections.abc.Callable "
    "collections.abc.Collection collections.abc.Hashable collections.abc.Iterable "
    "collections.abc.Iterator collections.abc.Mapping collections.abc.MutableMapping "
    "collections.abc.Sequence",
    "library/functions.html": "bool float int object type",
    "library/os.html": "os.PathLike",
    "library/pathlib.html": "pathlib.Path",
    "library/socket.html": "socket.socket",
    "library/stdtypes.html": "bytes dict frozenset list set str tuple",
    "library/typing.html": "typing.Any typing.Literal typing.Protocol",
}
"""Names by page; the anchor is the name."""

NUMPY: Final = {
    "reference/arrays.scalars.html": "numpy.int32 numpy.int64 numpy.uint8",
    "reference/generated/numpy.dtype.html": "numpy.dtype",
    "reference/generated/numpy.ndarray.html": "numpy.ndarray",
}
JAX: Final = ("Array", "ShapeDtypeStruct", "block_until_ready", "device_put", "jit", "shard_map")
JAXTYPING: Final = "Bool Float Int Int32 Shaped UInt8"

Addresses = dict[str, str]
"""Address of each name, relative to the root of a project's documentation."""


def write_inventories() -> dict[str, tuple[str, str]]:
    """Write an inventory per project, and return the value of ``intersphinx_mapping``."""
    jax_pages = {f"jax.{name}": f"_autosummary/jax.{name}.html#jax.{name}" for name in JAX}
    jax_pages |= _on_pages({"jax.sharding.html": "jax.sharding.NamedSharding"})
    projects: dict[str, tuple[str, Addresses]] = {
        "python": (
            "https://docs.python.org/3",
            dict(_on_pages(PYTHON)) | {name: _exception(name) for name in _exceptions()},
        ),
        "numpy": (
            "https://numpy.org/doc/stable",
            dict(_on_pages(NUMPY)) | {"ndarray": "reference/generated/numpy.ndarray.html"},
        ),
        "jax": (
            "https://docs.jax.dev/en/latest",
            jax_pages | dict.fromkeys(("Array", "jax.jaxlib._jax.Array"), jax_pages["jax.Array"]),
        ),
        "jaxtyping": (
            "https://docs.kidger.site/jaxtyping",
            dict.fromkeys(JAXTYPING.split(), "api/array/"),
        ),
        "rich": (
            "https://rich.readthedocs.io/en/stable",
            {
                f"rich.console.{name}": f"reference/console.html#rich.console.{name}"
                for name in ("ConsoleRenderable", "RichCast")
            },
        ),
    }
    FOLDER.mkdir(exist_ok=True)
    for project, (_, addresses) in projects.items():
        _write(project, addresses)
    return {
        project: (root, str(FOLDER / f"{project}.inv")) for project, (root, _) in projects.items()
    }


def _on_pages(pages: dict[str, str]) -> Iterator[tuple[str, str]]:
    for page, names in pages.items():
        for name in names.split():
            yield name, f"{page}#{name}"


def _exceptions() -> list[str]:
    return [name for name in vars(builtins) if name.endswith(("Error", "Exception", "Interrupt"))]


def _exception(name: str) -> str:
    return f"library/exceptions.html#{name}"


def _write(project: str, addresses: Addresses) -> None:
    """Write an inventory of version 2, as ``sphinx.util.inventory`` reads it."""
    kinds = ("class", "exception", "function")  # a link asks for one of them
    lines = [
        f"{name} py:{kind} 1 {address} -\n"
        for name, address in sorted(addresses.items())
        for kind in kinds
    ]
    header = (
        "# Sphinx inventory version 2\n"
        f"# Project: {project}\n"
        "# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    content = header.encode() + zlib.compress("".join(lines).encode())
    path = FOLDER / f"{project}.inv"
    if not path.is_file() or path.read_bytes() != content:
        path.write_bytes(content)
