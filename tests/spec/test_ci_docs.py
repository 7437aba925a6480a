"""The workflow in the docs: it is valid, and names files and options that exist."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "howto" / "ci"


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    yaml: Any = importlib.import_module("yaml")
    parsed: dict[Any, Any] = yaml.safe_load((FOLDER / "kvspec.yml").read_text())
    return parsed


def test_the_workflow_is_a_workflow(workflow: dict[Any, Any]) -> None:
    triggers = workflow[True]  # YAML 1.1 reads the key `on` so
    assert set(triggers) == {"pull_request", "schedule", "workflow_dispatch"}
    [job] = workflow["jobs"].values()
    assert job["timeout-minutes"] <= 60
    assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    used = [step.get("uses", "").partition("@")[0] for step in job["steps"]]
    order = ["actions/checkout", "actions/cache/restore", "actions/cache/save"]
    places = [used.index(name) for name in [*order, "actions/upload-artifact"]]
    assert places == sorted(places)
    restored, saved = (job["steps"][place]["with"] for place in places[1:3])
    assert restored["path"] == saved["path"] and saved["key"].startswith(restored["restore-keys"])
    conditions = [job["steps"][place].get("if") for place in places]
    assert conditions == [None, None, "always()", "failure()"]


def test_its_options_exist(workflow: dict[Any, Any], pytestconfig: pytest.Config) -> None:
    [job] = workflow["jobs"].values()
    options = re.findall(r"--(kv-\w+)", json.dumps(job["steps"]))
    assert len(options) >= 2
    for option in options:
        pytestconfig.getoption(option.replace("-", "_"))


@pytest.mark.parametrize("event", ["pull_request", "schedule", "workflow_dispatch"])
def test_it_chooses_a_seed(workflow: dict[Any, Any], tmp_path: Path, event: str) -> None:
    [job] = workflow["jobs"].values()
    [script] = [step["run"] for step in job["steps"] if "seed" in step.get("name", "")]
    chosen = tmp_path / "chosen"
    run = {"GITHUB_EVENT_NAME": event, "GITHUB_SHA": "20ee2c2f" * 5, "GITHUB_RUN_ID": "99"}
    given = {"GIVEN": "7" if event == "workflow_dispatch" else "", "GITHUB_ENV": str(chosen)}
    subprocess.run(["bash", "-euc", script], env={**os.environ, **run, **given}, check=True)
    told = dict(line.split("=") for line in chosen.read_text().split())
    assert told["SEED"] == {"pull_request": "34529986", "schedule": "99"}.get(event, "7")
    assert profile(told["HYPOTHESIS_PROFILE"]) == (100 if event == "pull_request" else 2_000)


def profile(name: str) -> int:
    """Return the number of examples of a profile, and check what differs from Hypothesis' own."""
    code = (
        f"import runpy; runpy.run_path({str(FOLDER / 'conftest.py')!r})\n"
        "from hypothesis import settings\n"
        "chosen = settings()\n"
        "assert not chosen.derandomize and chosen.database is not None\n"
        "print(chosen.max_examples)"
    )
    environment = {**os.environ, "CI": "true", "HYPOTHESIS_PROFILE": name}
    told = subprocess.run([sys.executable, "-c", code], env=environment, check=True,
                          capture_output=True, text=True)  # fmt: skip
    return int(told.stdout)
