"""`radixkv hits`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.scheduler.cli import hits
from radixkv.scheduler.replay.hits.counts import count_hits


def test_json_counts_blocks(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("hits", trace, "--device-blocks", 100, "--json", "-")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert json.loads(outcome.stdout) == {
        "requests": 5,
        "blocks": 11,
        "hit_blocks": 3,
        "evicted_blocks": 0,
        "hit_rate": 3 / 11,
        "refused": 0,
    }


def test_a_small_cache_evicts(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("hits", trace, "--device-blocks", 3, "--json", "-")
    assert json.loads(outcome.stdout)["evicted_blocks"] > 0


def test_text_of_the_first_requests(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("hits", trace, "--device-blocks", 100, "--requests", 2)
    assert outcome.stdout == ("2 requests, 5 blocks of 512 tokens: 1 hit (20.00%), 0 evicted\n")


def test_requests_larger_than_the_device_are_told(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("hits", trace, "--device-blocks", 1)
    sizes = [len(json.loads(line)["hash_ids"]) for line in trace.read_text().splitlines()]
    num_refused = sum(size > 1 for size in sizes)
    assert num_refused > 0
    assert outcome.stdout.splitlines()[1] == (
        f"{num_refused} requests have more blocks than the device and were refused"
    )


def test_text_of_a_trace_that_is_not_sorted(radixkv: Any, trace: Path) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    trace.write_text("".join(lines[::-1]))
    outcome = radixkv("hits", trace, "--device-blocks", 100)
    assert outcome.stdout.splitlines()[1:] == [
        "4 requests have an earlier timestamp than the line above; hits are counted in the order "
        "of the lines"
    ]


def test_a_missing_trace_is_refused(radixkv: Any, tmp_path: Path) -> None:
    outcome = radixkv("hits", tmp_path / "none.jsonl", "--device-blocks", 100)
    assert outcome.status == 2
    assert outcome.stderr == (
        f"radixkv: {tmp_path / 'none.jsonl'}: cannot be read: No such file or directory\n"
    )


def test_a_malformed_trace_is_refused(radixkv: Any, trace: Path) -> None:
    trace.write_text('{"timestamp": 0}\n')
    outcome = radixkv("hits", trace, "--device-blocks", 100)
    assert (outcome.status, outcome.stderr) == (
        2,
        f"radixkv: {trace}, line 1: has no input_length\n",
    )


def test_malformed_lines_may_be_skipped(radixkv: Any, trace: Path) -> None:
    trace.write_text('{"timestamp": 0}\n' + trace.read_text() + "{\n")
    command = ("hits", trace, "--device-blocks", 100, "--skip-malformed")
    assert radixkv(*command).stdout == (
        "5 requests, 11 blocks of 512 tokens: 3 hit (27.27%), 0 evicted\n"
        "2 malformed lines were skipped; the first: line 1 has no input_length\n"
    )
    assert json.loads(radixkv(*command, "--json", "-").stdout)["skipped_lines"] == 2


def test_json_counts_skipped_lines_also_if_there_are_none(radixkv: Any, trace: Path) -> None:
    command = ("hits", trace, "--device-blocks", 100, "--json", "-")
    assert json.loads(radixkv(*command, "--skip-malformed").stdout)["skipped_lines"] == 0
    assert "skipped_lines" not in json.loads(radixkv(*command).stdout)


@pytest.mark.parametrize("num_blocks", [7, 8, 2**31 - 1])
def test_no_tier_is_made_larger_than_the_trace(
    radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """The trace has 8 different blocks; 2,147,483,647 would not fit in memory."""
    count, tiers = count_hits, list[tuple[int | None, HostConfig | None]]()

    def recorded(trace: Any, num_blocks: int | None, host: HostConfig | None = None) -> Any:
        tiers.append((num_blocks, host))
        return count(trace, 8, None)

    monkeypatch.setattr(hits, "count_hits", recorded)
    for more in ((), ("--host-blocks", num_blocks, "--host-write", "through")):
        assert radixkv("hits", trace, "--device-blocks", num_blocks, *more).status == 0
    made = min(num_blocks, 8)
    assert tiers == [(made, None), (made, HostConfig(made, "through"))]


def test_the_cache_needs_a_size(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("hits", trace)
    assert outcome.status == 2
    assert "the following arguments are required: --device-blocks" in outcome.stderr


def test_json_counts_both_tiers(radixkv: Any, trace: Path) -> None:
    outcome = radixkv(
        "hits", trace, "--device-blocks", 3, "--host-blocks", 100, "--json", "-", "--requests", 4
    )
    # [0, 1], [0, 2, 3], [4], [5, 6]: evicted are 1, then 3, 2 and (for 6) 0.
    assert json.loads(outcome.stdout) == {
        "requests": 4,
        "blocks": 8,
        "hit_blocks": 1,
        "evicted_blocks": 4,
        "hit_rate": 1 / 8,
        "refused": 0,
        "host_hit_blocks": 0,
        "demoted_blocks": 4,
        "dropped_blocks": 0,
    }


def test_text_of_both_tiers(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("hits", trace, "--device-blocks", 3, "--host-blocks", 100)
    assert outcome.stdout == (
        "5 requests, 11 blocks of 512 tokens: 1 hit (9.09%), 7 evicted\n"
        "host: 2 hit (18.18%), 7 demoted, 0 dropped\n"
    )


def test_the_write_policy_is_chosen(radixkv: Any, trace: Path) -> None:
    outcome = radixkv(
        *("hits", trace, "--device-blocks", 3, "--host-blocks", 100),
        *("--host-write", "through", "--json", "-"),
    )
    # Copied when they are computed: nothing is left to copy when they are evicted.
    assert (json.loads(outcome.stdout)["demoted_blocks"], outcome.stderr) == (0, "")


def test_a_write_policy_without_a_host_tier_is_refused(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("hits", trace, "--device-blocks", 3, "--host-write", "back")
    assert (outcome.status, outcome.stderr) == (2, "radixkv: --host-write needs --host-blocks\n")


def test_an_unknown_write_policy_is_refused(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("hits", trace, "--device-blocks", 3, "--host-write", "never")
    assert outcome.status == 2
    assert "argument --host-write: invalid choice: 'never'" in outcome.stderr
