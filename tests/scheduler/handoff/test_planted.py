"""Every planted bug of the hand-off is found: by a story, or by random programs."""

from types import ModuleType

import pytest

from .bugs import BUGS, Bug
from .planted import planted
from .scenarios import SCENARIOS

PROGRAMS = 400
NUM_OPS = 300


def found_by_stories(package: ModuleType) -> str | None:
    for scenario in SCENARIOS:
        try:
            scenario(package)
        except Exception:
            return scenario.__name__
    return None


def found_by_hunt(package: ModuleType) -> str | None:
    for seed in range(PROGRAMS):
        try:
            package.drive.run_random(seed, NUM_OPS)
        except package.drive.Failure as failure:
            return str(failure)
    return None


def test_a_copy_without_a_bug_passes() -> None:
    with planted(None) as package:
        assert found_by_stories(package) is None
        for seed in range(20):
            package.drive.run_random(seed, NUM_OPS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug) as package:
        assert found_by_stories(package) or found_by_hunt(package), "nothing finds it"
