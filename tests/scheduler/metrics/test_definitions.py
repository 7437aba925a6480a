"""Names and meanings are those of the docs and of the dashboard; histograms count as Prometheus."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from radixkv.scheduler import metrics as package
from radixkv.scheduler.metrics.definitions import table
from radixkv.scheduler.metrics.families import families
from radixkv.scheduler.metrics.histogram import Histogram
from radixkv.scheduler.metrics.recorder import HISTOGRAMS

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
