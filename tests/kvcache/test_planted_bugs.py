"""The tests bite: known bugs, planted one at a time into a copy of the package, are each found.

They are found from outside, by the random driver, the oracle and the ghost memory: the manager's
own `check` is not called. A bug is a substitution in the source, which must fit exactly once: a
change of the source that it no longer fits fails loudly, and the bug is to be written anew.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import radixkv.kvcache

from .driver import drive, drive_pool

NUM_SEEDS = 30
NUM_STEPS = 1_600  # per seed


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str
    new: str


BUGS = [
    Bug(
        "a split refreshes the suffix",
        "radix_tree.py",
        "self._link_before(lower.warmer, upper)",
        "self.clock += 1; lower.last_use = upper.last_use = self.clock; self._unlink(lower); "
        "self._link_before(self._idle, lower); self._link_before(self._idle, upper)",
    ),
    Bug(
        "unpin skips every other node",
        "radix_tree.py",
        "place = place.parent",
        "place = place.parent and place.parent.parent",
    ),
    Bug("evict ignores pins", "radix_tree.py", "self._unlink(node)", "pass"),
    Bug(
        "the least recently used comes last",
        "radix_tree.py",
        "self._link_before(self._idle, place)",
        "self._link_before(self._idle.warmer, place)",
    ),
    Bug(
        "a trimmed run keeps its tokens",
        "radix_tree.py",
        "after = position + len(child.device_blocks) // ITEM_BYTES * block_bytes",
        "after = position + len(run)",
    ),
    Bug(
        "a run in use by others grows in place",
        "radix_tree.py",
        "if node.refs == 1 and not node.children and",
        "if not node.children and",
    ),
    Bug("a copy is not recycled", "manager.py", "self._pool.recycle(copies)", "pass"),
    Bug(
        "the table is not repointed",
        "manager.py",
        "ids[first:published] = np",
        "_ = np",
    ),
    Bug(
        "half a block is published",
        "manager.py",
        "lease.num_shared_blocks, len(tokens) // self.block_size",
        "lease.num_shared_blocks, -(-len(tokens) // self.block_size)",
    ),
    Bug(
        "more is published than there is room for",
        "manager.py",
        "if len(tokens) > lease.num_tokens:",
        "if False:",
    ),
    Bug("a stale match is not redone", "manager.py", "match._version != tree.version", "False"),
    Bug(
        "more is evicted than is short",
        "manager.py",
        "ids[-short:] = self._evict(short)",
        "self.evict(1); ids[-short:] = self._evict(short)",
    ),
    Bug(
        "the hit itself counts as evictable",
        "manager.py",
        "if needed > self.available - pinned:",
        "if needed > self.available:",
    ),
    Bug(
        "a row may come twice",
        "manager.py",
        "if len(set(rows.tolist())) != len(rows):",
        "if False:",
    ),
    Bug("namespaces are ignored", "manager.py", "roots.get(namespace)", 'roots.get(b"")'),
    Bug("reset keeps the epoch", "manager.py", "Epoch(self.epoch + 1)", "Epoch(self.epoch)"),
    Bug(
        "recycle does not look what is allocated",
        "block_pool.py",
        "if 1 <= block <= self.num_blocks and not self._place.item(block):",
        "if 1 <= block <= self.num_blocks:",
    ),
]


def plant(bug: Bug | None, folder: Path) -> None:
    """Copy the package to folder, with one bug if one is given."""
    shutil.copytree(
        Path(radixkv.kvcache.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__")
    )
    if bug is None:
        return
    path = folder / bug.file
    source = path.read_text()
    fits = source.count(bug.old)
    assert fits == 1, f"{bug.file} has {bug.old!r} {fits} times: write the bug {bug.name!r} anew"
    path.write_text(source.replace(bug.old, bug.new))


@pytest.fixture
def kvcache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModuleType]:
    """A copy of the package under another name, with the bug that is the parameter."""
    name = "planted_kvcache"
    plant(request.param, tmp_path / name)
    spec = importlib.util.spec_from_file_location(
        name, tmp_path / name / "__init__.py", submodule_search_locations=[str(tmp_path / name)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == name]:
            del sys.modules[loaded]


def hunt(kvcache: ModuleType) -> None:
    """Run seed after seed; raises what the first failing one raises."""
    for seed in range(NUM_SEEDS):
        drive_pool(seed, 100, kvcache)
        drive(seed, NUM_STEPS, kvcache, white_box=False)


@pytest.mark.parametrize("kvcache", BUGS, indirect=True, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(kvcache: ModuleType) -> None:
    # Any exception is a find: a broken cache may as well trip over itself.
    with pytest.raises(Exception):  # noqa: B017
        hunt(kvcache)


@pytest.mark.parametrize("kvcache", [None], indirect=True, ids=["as it is"])
def test_a_copy_without_a_bug_passes(kvcache: ModuleType) -> None:
    assert kvcache is not radixkv.kvcache
    assert kvcache.CacheManager is not radixkv.kvcache.CacheManager
    drive(0, NUM_STEPS, kvcache, white_box=False)
    drive_pool(0, 100, kvcache)


def test_a_bug_that_does_not_fit_is_told(tmp_path: Path) -> None:
    bug = Bug("gone", "manager.py", "no such text", "")
    with pytest.raises(
        AssertionError, match=r"has 'no such text' 0 times: write the bug 'gone' anew"
    ):
        plant(bug, tmp_path / "copy")
