"""`radixkv serve`: serve a model over HTTP until stopped."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from ipaddress import ip_address
from socket import socket
from typing import TYPE_CHECKING, Final

from ..engine.calls import Group
from ..serving import LLM, AsyncEngine
from ..terminal.interrupts import exit_on_interrupt
from .errors import BadInputError
from .exit_status import say
from .fleet.library import check_ray
from .options.common import check_memory, host_tier, reserve_tokens
from .options.serve import check
from .shared.backend import Backend
from .shared.kv_events import publishing
from .shared.model_loading import mesh_of_options
from .shared.processes import group_of_options, leave_to_process_0
from .shared.startup import report_on_stderr
from .shared.tiers import check_server

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ...kvcache import EventBatch
    from ..server import ServerLimits

API_KEY: Final = "RADIXKV_API_KEY"
_LIBRARIES: Final = ("msgspec", "prometheus_client", "starlette", "uvicorn")


def run(arguments: argparse.Namespace) -> int:
    """Load the model, and serve it until SIGTERM or SIGINT; or follow process 0 of a group."""
    for library in _LIBRARIES:
        if find_spec(library) is None:
            raise BadInputError(
                f"serve needs the library {library!r}: pip install 'radixkv[serve]'"
            )
    if arguments.ray is not None:
        check_ray("serve --ray")
    if arguments.otlp_traces_endpoint is not None:
        try:
            from ..tracing import make_otlp_provider  # noqa: F401  # before the model is loaded
        except ImportError as error:
            raise BadInputError(str(error)) from None
    check(arguments)
    leave_to_process_0(arguments)
    check_memory(arguments)
    with group_of_options(arguments) as group:
        if arguments.process_id:
            _follow(arguments, group)
        else:
            _lead(arguments, group)
    return 0


def _follow(arguments: argparse.Namespace, group: Group | None) -> None:
    """Compute with process 0 until it ends, which is what signals are for."""
    llm = _load(arguments, None, group)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    llm.engine.follow()
    llm.close()


def _lead(arguments: argparse.Namespace, group: Group | None) -> None:
    """Open the port, load the model, and serve it."""
    check_server(arguments)
    api_key = read_api_key(os.environ)
    from ..server import ServerLimits  # here, because they need the extra
    from ..server.descriptors import reserve_descriptors
    from ..server.run import bind

    max_connections = reserve_descriptors(arguments.max_connections)
    with (
        closing(bind(arguments.host, arguments.port)) as listener,  # before the model is loaded
        publishing(arguments) as on_events,
    ):
        if api_key is None and not _is_loopback(listener.getsockname()[0]):
            say(f"warning: {arguments.host} is reached from the network, and {API_KEY} is not set")
        with _backend(arguments, on_events, group) as backend:
            say(
                f"at most {max_connections:,} connections, and {arguments.max_requests:,} choices "
                "at a time"
            )
            limits = ServerLimits(
                max_body_bytes=arguments.max_body_bytes,
                max_bodies_bytes=16 * arguments.max_body_bytes,
                max_requests=arguments.max_requests,
                max_connections=max_connections,
            )
            asyncio.run(_serve(arguments, backend, api_key, listener, limits))


@contextmanager
def _backend(
    arguments: argparse.Namespace,
    on_events: Callable[[EventBatch], object] | None,
    group: Group | None,
) -> Iterator[Backend]:
    """Load the model, or connect its nodes."""
    if arguments.disaggregate:
        from .serve_on_nodes import connect  # here, because it needs an extra

        with connect(arguments, say) as connected:
            yield connected
        return
    llm = _load(arguments, on_events, group)
    say(str(llm.sizes))
    yield Backend(llm.serve, llm.sizes.max_model_len)


def _load(
    arguments: argparse.Namespace,
    on_events: Callable[[EventBatch], object] | None,
    group: Group | None,
) -> LLM:
    with exit_on_interrupt(), report_on_stderr():
        llm = LLM(
            arguments.model,
            revision=arguments.revision,
            dtype=arguments.dtype or "auto",
            block_size=arguments.block_size,
            num_blocks=arguments.device_blocks,
            max_model_len=arguments.max_model_len,
            max_running=arguments.max_running,
            token_budget=arguments.token_budget,
            memory_fraction=arguments.memory_fraction,
            on_events=on_events,
            host=host_tier(arguments),
            storage=arguments.storage,
            storage_max_bytes=arguments.storage_max_bytes,
            preempt=arguments.preempt,
            reserve_tokens=reserve_tokens(arguments),
            depth=arguments.depth or 2,
            mesh=mesh_of_options(arguments, group),
            group=group,
        )
    gc.collect()
    gc.freeze()  # a collection during a step need not visit the model and the programs
    return llm


def read_api_key(environment: Mapping[str, str]) -> str | None:
    """Return the API key of the environment, or None.

    Raises:
        BadInputError: for a key that no header can have; it is not in the message.
    """
    key = environment.get(API_KEY)
    if key is not None and not (key and all("!" <= each <= "~" for each in key)):
        raise BadInputError(f"{API_KEY} must have printable ASCII characters without spaces")
    return key


async def _serve(
    arguments: argparse.Namespace,
    backend: Backend,
    api_key: str | None,
    listener: socket,
    limits: ServerLimits,
) -> None:
    from ..metrics import NodesMetrics  # here, as above
    from ..server import ServedModel, make_app, serve

    engine, nodes = backend.start(), backend.nodes
    name = arguments.served_model_name or arguments.model
    model = ServedModel(name, engine, backend.max_model_len, created=int(time.time()))
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    metrics = None if nodes is None else NodesMetrics(engine, nodes, model_name=name)
    app: ASGIApp = make_app(
        model, api_key=api_key, limits=limits, metrics=metrics, has_engine=nodes is None
    )
    with ExitStack() as stack:
        if arguments.otlp_traces_endpoint is not None:
            app = stack.enter_context(_traced(app, engine, name, arguments.otlp_traces_endpoint))
        await serve(
            app,
            engine,
            listener,
            limits=limits,
            drain_timeout_s=arguments.drain_timeout_s,
            on_ready=lambda: say(f"{name} is served at {url}"),
            outlives_engine=arguments.coordinator is None,
        )


@contextmanager
def _traced(app: ASGIApp, engine: AsyncEngine, name: str, endpoint: str) -> Iterator[ASGIApp]:
    """Send spans of an engine's requests to a collector, those that are left at the end."""
    from ..tracing import EngineTracer, TraceContext, make_otlp_provider  # needs the extra

    provider = make_otlp_provider(endpoint)
    try:
        EngineTracer(engine, model_name=name, tracer_provider=provider)
        yield TraceContext(app)
    finally:
        provider.shutdown()


def _is_loopback(host: str) -> bool:
    return ip_address(host.partition("%")[0]).is_loopback
