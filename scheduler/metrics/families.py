"""Metrics as prometheus-client has them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from .definitions import (
    ENGINE_UP,
    ENGINE_UP_TEXT,
    HISTOGRAM_TEXTS,
    METRICS,
    PREFIX,
    SNAPSHOT_AGE,
    SNAPSHOT_AGE_TEXT,
    Metric,
    Source,
)
from .histogram import HistogramState
from .recorder import Snapshot

_MODEL = "model_name"


def families(
    model_name: str, snapshot: Snapshot | None, *, is_up: bool, age_s: float
) -> Iterator[Family]:
    """Return all metrics of an engine; those that the snapshot does not have are without values.

    Args:
        model_name: label of all.
        snapshot: the values, or None if there are none yet.
        is_up: whether the engine serves.
        age_s: age of the snapshot.
    """
    up = GaugeMetricFamily(PREFIX + ENGINE_UP, ENGINE_UP_TEXT, labels=[_MODEL])
    up.add_metric([model_name], is_up)
    yield up
    age = GaugeMetricFamily(PREFIX + SNAPSHOT_AGE, SNAPSHOT_AGE_TEXT, labels=[_MODEL])
    if snapshot is not None:
        age.add_metric([model_name], age_s)
    yield age
    sources = [] if snapshot is None else [((model_name,), snapshot)]
    for each in METRICS:
        yield family_of(each, (_MODEL,), sources)
    for name, text in HISTOGRAM_TEXTS.items():
        histogram = HistogramMetricFamily(PREFIX + name, text, labels=[_MODEL])
        if snapshot is not None and name in snapshot.histograms:
            _add_histogram(histogram, model_name, snapshot.histograms[name])
        yield histogram


def family_of(
    metric: Metric[Source],
    names: Sequence[str],
    sources: Collection[tuple[Sequence[str], Source]],
) -> Family:
    """Return the values of a metric.

    Args:
        metric: a gauge or a counter.
        names: names of the labels of a source.
        sources: labels of each source, and the source.
    """
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    family = kind(PREFIX + metric.name, metric.text, labels=[*names, *metric.labels])
    for place, source in sources:
        values = metric.read(source)
        if isinstance(values, Mapping):
            for labels, value in values.items():
                family.add_metric([*place, *labels], value)
        elif values is not None:
            family.add_metric(place, values)
    return family


def _add_histogram(family: HistogramMetricFamily, model_name: str, state: HistogramState) -> None:
    bounds = [*map(floatToGoString, state.bounds), "+Inf"]
    counts = accumulate(map(float, state.counts))
    family.add_metric([model_name], list(zip(bounds, counts, strict=True)), state.total)
