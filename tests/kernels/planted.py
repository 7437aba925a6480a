"""Modified copies of a module: other constants, or planted bugs that a test must catch."""

from types import ModuleType


def planted(module: ModuleType, changes: dict[str, str]) -> ModuleType:
    """Return the module with each key of `changes`, which must occur once, replaced."""
    assert module.__file__ is not None
    with open(module.__file__) as file:
        source = file.read()
    for old, new in changes.items():
        found = source.count(old)
        assert found == 1, f"{old!r} occurs {found} times in {module.__name__}"
        source = source.replace(old, new)
    changed = ModuleType(module.__name__)
    changed.__file__, changed.__package__ = module.__file__, module.__package__
    exec(compile(source, module.__file__, "exec"), changed.__dict__)
    return changed
