"""`EngineMetrics`: the metrics of an engine, for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ..engine import Engine
from ..errors import ConfigError, EngineClosedError, EngineFailedError
from ..serving import AsyncEngine
from .families import families
from .recorder import Recorder, Snapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of a scrape, whatever was asked for: in OpenMetrics, prometheus-client may write the colon of the
names as an underscore."""

MAX_NAMESPACES: Final = 100
"""Most namespaces with a name: each has six series."""


class EngineMetrics(Collector):
    """The metrics of one engine, named as in vLLM with the prefix ``radixkv:``.

    A scrape of an `AsyncEngine` reads the counts on the engine's thread between two steps. If the
    engine is busy for longer than ``timeout_s``, the scrape shows the values before, and their age.
    After the engine was closed or has failed, it shows the last ones.

    An `Engine` that you step yourself is read when you call `update`. Then there are no times of
    requests.

    It is a collector of prometheus-client: ``REGISTRY.register(metrics)`` adds the metrics to
    others of the process.
    """

    def __init__(
        self,
        engine: AsyncEngine | Engine,
        *,
        model_name: str = "",
        namespaces: Mapping[bytes, str] | None = None,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Observe an engine from now on.

        Args:
            engine: the engine. The times are those of requests that are submitted from now on.
            model_name: label ``model_name`` of all metrics.
            namespaces: labels of namespaces that are counted apart, by namespace, at most 100. The
                others count together as "other". Default: no counts by namespace.
            timeout_s: how long a scrape waits for the engine; less than Prometheus waits, by
                default 10 s.
            clock: for tests.

        Raises:
            ConfigError: for too many namespaces, or any with an `Engine`, or a timeout that is
                not positive.
            EngineClosedError, EngineFailedError: if an `AsyncEngine` is closed or has failed.
        """
        namespaces = dict(namespaces or {})
        if len(namespaces) > MAX_NAMESPACES:
            raise ConfigError(
                f"namespaces must be at most {MAX_NAMESPACES}, got {len(namespaces)}: each adds "
                "time series"
            )
        if namespaces and not isinstance(engine, AsyncEngine):
            raise ConfigError("counts by namespace need an AsyncEngine")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {timeout_s}")
        self._recorder = Recorder(clock, namespaces, is_told=isinstance(engine, AsyncEngine))
        self._model_name = model_name
        self._timeout_s = timeout_s
        self._clock = clock
        self._engine = engine
        if isinstance(engine, AsyncEngine):
            engine.observe(self._recorder)
        else:
            self._recorder.read(engine)

    def update(self) -> None:
        """Read an `Engine`, on the thread that steps it; later scrapes show these counts.

        Raises:
            ConfigError: for an `AsyncEngine`, which each scrape reads.
        """
        if isinstance(self._engine, AsyncEngine):
            raise ConfigError("an AsyncEngine is read by each scrape: update is for an Engine")
        self._recorder.read(self._engine)

    async def scrape(self) -> bytes:
        """Return the metrics as text, for a server to send with `CONTENT_TYPE`."""
        asked = self._ask()
        if asked is not None:
            await asyncio.wait([asyncio.wrap_future(asked)], timeout=self._timeout_s)
        return self._encode()

    def exposition(self) -> bytes:
        """Do what `scrape` does, but block this thread: not for event loops."""
        self._wait()
        return self._encode()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics, as prometheus-client calls it; it blocks like `exposition`."""
        self._wait()
        return self._families()

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without values, as prometheus-client calls it."""
        return families(self._model_name, None, is_up=True, age_s=0.0)

    # How the engine is read

    def _ask(self) -> Future[Snapshot | None] | None:
        """Ask the engine's thread for a snapshot; None if there is none to wait for."""
        if not isinstance(self._engine, AsyncEngine):
            return None
        asked = self._recorder.ask()
        with suppress(EngineClosedError, EngineFailedError):  # the next step answers, or the end
            self._engine.submit_call(self._recorder.answer)
        return asked

    def _wait(self) -> None:
        asked = self._ask()
        if asked is not None:
            with suppress(TimeoutError):
                asked.result(self._timeout_s)

    def _encode(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(CollectedMetrics(self._families))
        return generate_latest(registry)

    def _families(self) -> Iterator[Metric]:
        """Return the metrics with the values of the last snapshot."""
        is_up, last = not self._recorder.has_ended, self._recorder.last  # in this order
        age_s = 0.0 if last is None else self._clock() - last.read_s
        return families(self._model_name, last, is_up=is_up, age_s=max(age_s, 0.0))


class CollectedMetrics(Collector):
    """A collector that waits for nothing, for an encoder."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        return self._collect()
