"""Names and meanings are those of the docs and of the dashboard; histograms count as Prometheus."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from radixkv.kvcache.stats import CacheStats, TierStats
from radixkv.scheduler import metrics as package
from radixkv.scheduler.engine.stats import CopyStats, EngineStats
from radixkv.scheduler.metrics.definitions import METRICS, table
from radixkv.scheduler.metrics.families import families
from radixkv.scheduler.metrics.histogram import Histogram
from radixkv.scheduler.metrics.recorder import HISTOGRAMS, Snapshot
from radixkv.scheduler.step_plan import SchedulerStats

T = TypeVar("T")

HOWTO = Path(__file__).parents[3] / "docs" / "howto"

TABLE = list(table())


def test_the_tables_of_the_docs_are_those_of_the_metrics():
    text = (HOWTO / "metrics.md").read_text().split("\n## Namespaces\n")[0]
    documented = []
    for in_vllm, part in zip((True, False), text.split("\n### ")[1:], strict=True):
        for row in re.findall(r"^\| (`radixkv:.*)\|$", part, re.M):
            name, kind, text = (cell.strip() for cell in row.split("|"))
            text, _, labels = text.partition(" Labels: ")
            words = tuple(re.findall(r"`(\w+)`", labels))
            documented.append((name.strip("`"), kind, words, text, in_vllm))
    assert documented == sorted(TABLE, key=lambda row: not row[-1])


def test_names_have_the_form_of_prometheus():
    names = [name for name, *_ in TABLE]
    assert len(set(names)) == len(names)
    for name, kind, *_ in TABLE:
        assert re.fullmatch(r"radixkv:[a-z0-9_]+", name)
        assert not name.endswith(("_total", "_bucket", "_sum", "_count")), kind


def test_prometheus_is_given_every_metric_and_no_other():
    given_to = [
        (each.name, each.type, each.documentation)
        for each in families("m", None, is_up=True, age_s=0.0)
    ]
    assert given_to == [(name, kind, text) for name, kind, _, text, _ in TABLE]


def sample_names() -> dict[str, set[str]]:
    """Labels of each sample by its name."""
    names = {}
    for name, kind, labels, *_ in TABLE:
        suffixes = {
            "gauge": [""],
            "counter": ["_total"],
            "histogram": ["_bucket", "_sum", "_count"],
        }
        for suffix in suffixes[kind]:
            le = {"le"} if suffix == "_bucket" else set()
            names[name + suffix] = {*labels, *le, "model_name"}
    return names


def expressions() -> Iterator[str]:
    dashboard = json.loads((HOWTO / "grafana_dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert (
                    label == "instance"
                    or f"by ({label})" in target["expr"]
                    or (re.search(rf"by \([^)]*\b{label}\b[^)]*\)", target["expr"]))
                ), (label, target["expr"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def test_the_dashboard_names_only_metrics_and_labels_that_exist():
    known, used = sample_names(), set()
    for expression in expressions():
        names = re.findall(r"radixkv:\w+", expression)
        assert names, expression
        used.update(names)
        assert set(names) <= known.keys(), expression
        labels = {label for name in names for label in known[name]}
        selected = re.findall(r"(\w+)(?:=~|!=|=)\"", expression)
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        asked = {*selected, *(label.strip() for each in grouped for label in each.split(","))}
        assert asked <= labels, expression
    assert len(used) > 20


def test_expressions_of_the_docs_name_metrics_that_exist():
    text = (HOWTO / "metrics.md").read_text().split("## What to look at")[1]
    bases = {name for name, *_ in TABLE}
    names = re.findall(r"radixkv:\w+", text)
    assert names
    assert set(names) <= {*sample_names(), *bases}


@given(
    values=st.lists(
        st.tuples(
            st.one_of(
                st.floats(0, 1e4),
                st.sampled_from([b for each in HISTOGRAMS.values() for b in each]),
            ),
            st.integers(1, 3),
        )
    ),
    name=st.sampled_from(sorted(HISTOGRAMS)),
)
def test_a_histogram_counts_as_that_of_prometheus_client(values, name):
    bounds = HISTOGRAMS[name]
    assert list(bounds) == sorted(set(bounds))
    ours, registry = Histogram(bounds), CollectorRegistry()
    theirs = TheirHistogram("h", "h", buckets=bounds, registry=registry)
    for value, times in values:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    state = ours.state()
    counts: Any = theirs._buckets
    assert list(state.counts) == [each.get() for each in counts]
    assert state.total == pytest.approx(registry.get_sample_value("h_sum"))
    ours.observe(1.0)
    assert sum(state.counts) == sum(times for _, times in values)  # it is a copy


def test_without_prometheus_client_the_extra_is_named(monkeypatch):
    for name in ("engine_metrics", "families"):
        monkeypatch.delitem(sys.modules, f"radixkv.scheduler.metrics.{name}", raising=False)
    for name in [each for each in sys.modules if each.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    text = (
        r"^radixkv\.scheduler\.metrics needs prometheus-client: pip install 'radixkv\[metrics\]'$"
    )
    with pytest.raises(ImportError, match=text):
        package.EngineMetrics  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        package.nothing  # noqa: B018


def numbered(kind: type[T], first: int, **given: object) -> T:
    """Counts that all differ: from `first` on, in the order of the fields."""
    names = [each.name for each in fields(kind) if each.name not in given]  # type: ignore[arg-type]
    return kind(**dict(zip(names, range(first, first + len(names)), strict=True)), **given)


def test_each_metric_has_its_own_count():
    """Against the counts that its meaning names; `histograms` are counted elsewhere."""
    tiers = numbered(TierStats, 100, host_blocks=1000)
    cache = numbered(CacheStats, 200, num_blocks=900, tiers=tiers)
    counts = numbered(SchedulerStats, 300)
    copies = CopyStats({"host to device": 1}, {"host to device: done": 2}, 3, {"OSError": 4})
    stats = numbered(EngineStats, 500, dtype="bfloat16", attention_backend="xla",
                     attention_reason="", scheduler=counts, cache=cache, copies=copies)  # fmt: skip
    snapshot = Snapshot(0.0, stats, 16, 11, 12, 13, {"stop": 14}, {}, {})
    by_tier = {"device": counts.hit_tokens, "host": counts.host_hit_tokens,
               "storage": counts.storage_hit_tokens}  # fmt: skip
    host = {"free": tiers.host_free_blocks, "cached": tiers.host_cached_blocks}
    device = {"free": cache.free_blocks, "idle": cache.idle_blocks,
              "shared": cache.cached_blocks - cache.idle_blocks,
              "private": cache.private_blocks}  # fmt: skip
    expected: dict[str, Any] = {
        "num_requests_running": 11,
        "num_requests_waiting": 12,
        "kv_cache_usage_perc": (900 - cache.free_blocks - cache.idle_blocks) / 900,
        "cache_config_info": {("16", "900", "1000", "bfloat16", "xla"): 1},
        "prefix_cache_queries": counts.prompt_tokens,
        "prefix_cache_hits": counts.hit_tokens,
        "external_prefix_cache_queries": counts.prompt_tokens - counts.hit_tokens,
        "external_prefix_cache_hits": counts.host_hit_tokens + counts.storage_hit_tokens,
        "prompt_tokens": counts.prompt_tokens,
        "prompt_tokens_cached_by_source": {(tier,): value for tier, value in by_tier.items()},
        "generation_tokens": 13,
        "num_preemptions": counts.preemptions,
        "request_success": {("stop",): 14},
        "kv_blocks": {
            **{("device", state): value for state, value in device.items()},
            **{("host", state): value for state, value in host.items()},
            ("host", "reserved"): 1000 - sum(host.values()),
        },
        "kv_hit_blocks": {
            ("device",): cache.hit_blocks,
            ("host",): tiers.promoted_blocks,
            ("storage",): tiers.fetched_blocks,
        },
        "kv_evicted_blocks": {("device",): cache.evicted_blocks, ("host",): tiers.dropped_blocks},
        "kv_demoted_blocks": tiers.demoted_blocks,
        "kv_stored_blocks": tiers.stored_blocks,
        "kv_open_operations": tiers.open_operations,
        "kv_quarantined_operations": tiers.quarantined_operations,
        "parked_requests": tiers.parked,
        "kv_copied_bytes": {("host to device",): 1},
        "kv_operations": {("host to device", "done"): 2},
        "kv_skipped_blocks": 3,
        "kv_copy_errors": {("OSError",): 4},
        "recomputed_tokens": counts.recomputed_tokens,
        "engine_steps": stats.steps,
        "padding_tokens": stats.padding_tokens,
        "compilations_after_warm_up": stats.compilations_after_warm_up,
    }
    read = {each.name: each.read(snapshot) for each in METRICS if "namespace" not in each.name}
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert read[name] == pytest.approx(value), name


@pytest.mark.parametrize(
    ("namespace", "name"),
    [("requests", "requests"), ("prompt", "prompt_tokens"), ("generation", "generation_tokens")],
)
def test_each_metric_of_namespaces_has_its_own_count(namespace: str, name: str):
    kinds = ("requests", "prompt", "device", "host", "storage", "generation")
    counts = {("a", kind): number for number, kind in enumerate(kinds)}
    snapshot = Snapshot(0.0, cast(Any, None), 16, 0, 0, 0, {}, {}, counts)
    by_name = {each.name: each for each in METRICS}
    assert by_name[f"namespace_{name}"].read(snapshot) == {("a",): counts["a", namespace]}
    hits = by_name["namespace_prompt_tokens_cached_by_source"].read(snapshot)
    assert hits == {("a", "device"): 2, ("a", "host"): 3, ("a", "storage"): 4}
