"""The README's example prints what it says, and the files that the docs name exist."""

import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

FILE = re.compile(r"`((?:kernels|kvcache|scheduler|spec|tests|benchmarks)/[\w/]+\.py)`")


def test_the_example_prints_what_the_readme_says() -> None:
    result = doctest.testfile(str(README), module_relative=False, encoding="utf-8")
    assert result.attempted > 5
    assert result.failed == 0


def test_the_files_that_the_docs_name_exist() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/howto").rglob("*.md"),
    ]
    named = {name for page in pages for name in FILE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 30
    roots = (ROOT, ROOT / "tests")  # tests/README.md names files beside it
    missing = [name for name in named if not any((root / name).is_file() for root in roots)]
    assert sorted(missing) == []
