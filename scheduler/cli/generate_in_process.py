"""`radixkv generate --disaggregate --transport inprocess`: all nodes are in this process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...kvcache.storage import Storage
from ..engine import make_storage_namespace
from ..handoff import Timing
from ..models import load_model
from ..models.weights_digest import weights_digest
from ..nodes import (
    DecodeEngine,
    Disaggregated,
    PrefillEngine,
)
from ..nodes.transport import InProcessExchange, InProcessTransport
from ..request import Request
from .disaggregate_options import Sizes
from .disaggregate_run import describe, run_requests
from .options import host_tier
from .tier_setup import open_storage


def complete_in_process(
    arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:
    """Run all requests to their ends; return what each node says that it has done.

    Raises:
        HandoffFailedError: if one comes to nothing.
    """
    model_dir = Path(arguments.model_dir)
    model, exchange = load_model(model_dir), InProcessExchange()
    revision = weights_digest(model_dir)
    namespace = make_storage_namespace(model, revision, arguments.block_size)
    options: dict[str, Any] = {
        "epoch": 1,
        "now": time.monotonic(),
        "timing": Timing(),
        "block_size": arguments.block_size,
        "num_blocks": sizes.num_blocks,
        "token_budget": sizes.token_budget,
        "max_running": sizes.max_running,
        "max_model_len": sizes.max_model_len,
        "weights_revision": revision,
        "host": host_tier(arguments),
    }
    generates = {"preempt": arguments.preempt, "reserve_tokens": arguments.reserve_tokens}
    with ExitStack() as stack:
        storages: dict[str, Storage | None] = {}

        def storage(node: str) -> dict[str, Any]:
            """Open that of a node: nobody else may poll it."""
            each = stack.enter_context(open_storage(arguments, namespace, node=node))
            storages[node] = each
            return {"storage": each, "storage_namespace": namespace if each else None}

        nodes = Disaggregated(
            [
                PrefillEngine(
                    model, InProcessTransport(exchange), **options, **storage(f"prefill-{place}")
                )
                for place in range(arguments.prefill or 1)
            ],
            [
                DecodeEngine(
                    model,
                    InProcessTransport(exchange),
                    **generates,
                    **options,
                    **storage(f"decode-{place}"),
                )
                for place in range(arguments.decode or 1)
            ],
        )
        try:
            run_requests(nodes, requests)
        finally:
            nodes.close()  # what storage is to keep is there then
        return {peer: describe(stats, storages[peer]) for peer, stats in nodes.stats().items()}
