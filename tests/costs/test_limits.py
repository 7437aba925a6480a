"""A test that never ends prints where it is, and fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_hang_ends_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    stuck = tmp_path / "test_stuck.py"
    stuck.write_text(
        "import threading, time\n\n"
        "waits = threading.Event()\n\n"
        "def wait_for_ever():\n    waits.set()\n    threading.Event().wait()\n\n"
        "threading.Thread(target=wait_for_ever, daemon=True).start()\n"
        "waits.wait()\n\n"
        "def test_stuck():\n"
        "    time.sleep(1000)\n"  # Python may crash where it prints frames that change
    )
    config = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-o", "faulthandler_timeout=5")
    options = ("-n0", "-p", "no:cacheprovider", "-q", "--confcutdir", tmp_path)
    command = [sys.executable, "-m", "pytest", *config, *options, stuck]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode not in (0, 5), done.stdout
    assert "Timeout (0:00:05)!" in done.stderr
    assert "in test_stuck" in done.stderr and "in wait_for_ever" in done.stderr
