"""Stands in for packages that another package imports but that its cache manager never calls."""

from __future__ import annotations

import sys
from collections.abc import MutableSequence, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Anything(type):
    """A class whose every public attribute is such a class; calling one makes None."""

    def __getattr__(cls, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *_: object, **__: object) -> None:
        """Make nothing."""


class StubModule(ModuleType):
    """A package that holds whatever is imported from it."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StubFinder(MetaPathFinder, Loader):
    """Finds stubs for some packages and everything under them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Answer for the packages to replace, and for no other."""
        if not any(f"{name}.".startswith(f"{stub}.") for stub in self.names):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty stub."""
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def stub_modules(*names: str) -> None:
    """Replace packages by stubs in what is imported from now on."""
    sys.meta_path.insert(0, StubFinder(names))
