import pytest

from .crashes import Trial, hunt
from .planted import BUGS, REAL, Bug, load

SHARES = 4
CRASHES = 20_000  # over all shares; run `python -m tests.kvcache.storage.crashes` for more


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_no_crash_breaks_a_promise(share: int, pytestconfig: pytest.Config) -> None:
    first = 1_000_000 * (pytestconfig.getoption("kv_seed") or 0) + share
    seeds = iter(range(first, first + 10**9, SHARES))
    trials, crashes, broken = hunt(REAL, seeds, CRASHES // SHARES)
    assert not broken
    assert crashes >= CRASHES // SHARES
    assert trials <= crashes * 2  # most trials do crash


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    _, _, broken = hunt(load(bug), iter(range(10**9)), 20_000)
    assert broken, bug.name


def test_a_trial_can_be_replayed() -> None:
    first, second = Trial(7), Trial(7)
    assert (first.run(), first.disk.moments) == (second.run(), second.disk.moments)
    assert first.promises == second.promises


def test_a_bug_that_no_longer_fits_fails_loudly() -> None:
    with pytest.raises(
        AssertionError, match=r"value_format\.py has 'not there' 0 times: write 'x' anew"
    ):
        load(Bug("x", "value_format.py", "not there", ""))
