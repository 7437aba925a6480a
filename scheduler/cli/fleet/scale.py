"""`radixkv fleet scale`: change the number of nodes of a `radixkv serve --ray`."""

from __future__ import annotations

import argparse

from ..errors import BadInputError
from .library import check_ray
from .registry import REGISTRY


def run(arguments: argparse.Namespace) -> int:
    """Tell the server, and return before it has done it."""
    if arguments.prefill is None and arguments.decode is None:
        raise BadInputError("fleet scale needs --prefill or --decode")
    check_ray("fleet")
    import ray

    from .fleet import connect_to_ray

    connect_to_ray(
        arguments.ray_namespace, address="auto", log_to_driver=False, logging_level="warning"
    )
    try:
        registry = ray.get_actor(REGISTRY)
    except ValueError:
        raise BadInputError(
            f"there is no fleet in the namespace {arguments.ray_namespace!r} of the Ray cluster"
        ) from None
    else:
        size = ray.get(registry.scale.remote(arguments.prefill, arguments.decode))
    finally:
        ray.shutdown()
    print(f"the fleet shall have {size.prefill} prefill and {size.decode} decode nodes")
    return 0
