"""`make_otlp_provider`: spans to an OpenTelemetry collector."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def make_otlp_provider(endpoint: str) -> TracerProvider:
    """Return a provider that sends spans to a collector, by OTLP over HTTP, on a thread of its own.

    Sampling, headers, limits and the name of the service (default: radixkv) are those of
    OpenTelemetry's environment variables, such as ``OTEL_TRACES_SAMPLER``. Call ``shutdown`` of the
    provider at the end: it sends what is left.

    Args:
        endpoint: address of the collector, such as ``http://127.0.0.1:4318/v1/traces``.
    """
    named = Resource({SERVICE_NAME: "radixkv"}).merge(OTELResourceDetector().detect())
    resource = Resource.create(named.attributes)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider
