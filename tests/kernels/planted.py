"""Copies of a module with one line changed: bugs that a test must catch."""

from types import ModuleType


def planted(module: ModuleType, old: str, new: str = "") -> ModuleType:
    """The module with `old`, which must occur exactly once in its source, replaced."""
    assert module.__file__ is not None
    with open(module.__file__) as file:
        source = file.read()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__name__}"
    changed = ModuleType(module.__name__)
    changed.__file__, changed.__package__ = module.__file__, module.__package__
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed.__dict__)
    return changed
