"""The README's example runs and prints what it says."""

import doctest
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_what_the_readme_says() -> None:
    result = doctest.testfile(str(README), module_relative=False, encoding="utf-8")
    assert result.attempted > 5
    assert result.failed == 0
