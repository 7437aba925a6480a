"""Modified copies of a module: other constants, or planted bugs that a test must catch."""

from types import ModuleType


def planted(module: ModuleType, changes: dict[str, str], **constants: int) -> ModuleType:
    """Return the module with each key of `changes`, which must occur once, replaced.

    `constants` replace constants that the module has or imports.
    """
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
    assert constants.keys() <= vars(changed).keys()
    vars(changed).update(constants)
    return changed


def planted_below(
    module: ModuleType, *below: ModuleType, changes: dict[str, str], **constants: int
) -> ModuleType:
    """Return a copy of the module that uses the one of `below` which has the text, changed.

    Modules of `below` that use each other come in that order, the lowest first.
    """
    copies: list[tuple[ModuleType, ModuleType]] = []
    for each in (*below, module):
        assert each.__file__ is not None
        with open(each.__file__) as file:
            source = file.read()
        here = {old: new for old, new in changes.items() if old in source}
        changes = {old: new for old, new in changes.items() if old not in here}
        copy = planted(each, here)
        for original, lower in copies:
            # What the module imports from it; both may define another thing of the same name.
            names = vars(each).keys() & vars(original).keys() & vars(lower).keys()
            imported = {n for n in names if vars(each)[n] is vars(original)[n] and n[:2] != "__"}
            vars(copy).update({name: vars(lower)[name] for name in imported})
            if (short := lower.__name__.rpartition(".")[2]) in vars(copy):
                vars(copy)[short] = lower
        copies.append((each, copy))
    assert not changes, f"not in any of the modules: {changes}"
    made = copies[-1][1]
    vars(made).update(constants)
    return made
