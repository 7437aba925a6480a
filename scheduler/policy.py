"""Who goes first, and so who is preempted first: small objects, as minds change on it."""

from __future__ import annotations

from typing import Protocol

from .errors import ConfigError
from .request import Request


class Policy(Protocol):
    """An order of requests that does not change while they live.

    The least is admitted first; the greatest is the victim when blocks run out. So the least of
    the running requests is never preempted for another, and always gets to its end.
    """

    def order(self, request: Request) -> tuple[int, ...]:
        """Return the sort key; unique, as it ends with the request's arrival."""


class Fcfs:
    """First come, first served; the last to come is the first to be preempted."""

    def order(self, request: Request) -> tuple[int, ...]:
        """Order by arrival."""
        return (request.arrival,)


class Priority:
    """By `Request.priority`, a lower number first; equals by arrival."""

    def order(self, request: Request) -> tuple[int, ...]:
        """Order by priority, then arrival."""
        return (request.priority, request.arrival)


def as_policy(policy: Policy | None) -> Policy:
    """Return a policy as it is, and `Fcfs` for None.

    Raises:
        ConfigError: for what has no order of requests, such as a policy's name or its class.
    """
    if policy is None:
        return Fcfs()
    if isinstance(policy, type) or not callable(getattr(policy, "order", None)):
        raise ConfigError(
            "policy must be an object with a method `order`, such as Fcfs() or Priority(), "
            f"got {policy!r}"
        )
    return policy
