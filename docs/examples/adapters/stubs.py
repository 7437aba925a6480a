"""Stubs for packages that a tested package imports but its cache manager never calls."""

from __future__ import annotations

import sys
from collections.abc import MutableSequence, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Anything(type):
    """A class whose public attributes are classes of the same kind. A call returns None."""

    def __getattr__(cls, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *_: object, **__: object) -> None:
        """Return None."""


class StubModule(ModuleType):
    """A package from which any name can be imported."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - makes the module a package

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StubFinder(MetaPathFinder, Loader):
    """Import finder that returns stubs for some packages and their submodules."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return a spec for the packages to replace, and None for others."""
        if not any(f"{name}.".startswith(f"{stub}.") for stub in self.names):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty stub."""
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stub has no code."""


def stub_modules(*names: str) -> None:
    """Replace packages by stubs in all later imports."""
    sys.meta_path.insert(0, StubFinder(names))
