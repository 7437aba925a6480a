"""Whether Ray is installed."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import BadInputError


def check_ray(command: str) -> None:
    """Reject a command that needs Ray where it is not installed.

    Raises:
        BadInputError: With the extra.
    """
    if find_spec("ray") is None:
        raise BadInputError(f"{command} needs the library 'ray': pip install 'radixkv[ray]'")
