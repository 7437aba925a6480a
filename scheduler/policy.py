"""Scheduling policies: the order in which requests are admitted and preempted."""

from __future__ import annotations

from typing import Protocol

from .errors import ConfigError
from .request import Request


class Policy(Protocol):
    """An order of requests; the key of a request must not change while it lives.

    The smallest request is admitted first, and the greatest is preempted when blocks run out.
    Therefore the smallest running request always runs to its end.
    """

    def order(self, request: Request) -> tuple[int, ...]:
        """Return the sort key, which must be unique: end it with ``Request.arrival``."""


class Fcfs:
    """First come, first served; the last to arrive is preempted first."""

    def order(self, request: Request) -> tuple[int, ...]:
        """Order by arrival."""
        return (request.arrival,)


class Priority:
    """By ``Request.priority``, lower numbers first, then by arrival."""

    def order(self, request: Request) -> tuple[int, ...]:
        """Order by priority, then arrival."""
        return (request.priority, request.arrival)


def as_policy(policy: Policy | None) -> Policy:
    """Return the policy, or `Fcfs` for None.

    Raises:
        ConfigError: for anything that has no method `order`, such as the name of a policy.
    """
    if policy is None:
        return Fcfs()
    if isinstance(policy, type) or not callable(getattr(policy, "order", None)):
        raise ConfigError(
            "policy must be an object with a method `order`, such as Fcfs() or Priority(), "
            f"got {policy!r}"
        )
    return policy
