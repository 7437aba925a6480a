"""The state of a scheduler's world: the scheduler under test beside its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from ...adapters.scheduler import SchedulerFactory
from ...adapters.scheduler_target import SchedulerTarget
from ...model.scheduler import Limits, Request, SchedulerModel
from ..engine import Config


class SchedulerState:
    """A scheduler under test, with its requests and model.

    Attributes:
        past: all requests ever submitted.
        just_ended: requests that ended in this operation and must hold nothing.
    """

    def __init__(self, config: Config, factory: SchedulerFactory) -> None:
        self.config = config
        self.target = SchedulerTarget(factory, config)
        limits = Limits(**{limit.name: config[limit.name] for limit in fields(Limits)})
        self.model = SchedulerModel(limits, self.target.promises.names())
        self.situations: Counter[str] = self.model.situations
        self.past: list[Request] = []
        self.just_ended: list[str] = []

    @property
    def live(self) -> dict[str, Request]:
        """Requests that have not ended, by name."""
        return self.model.live

    @property
    def running(self) -> list[Request]:
        """Requests that hold blocks, in order of admission."""
        return self.model.running

    def names(self, requests: Sequence[Request]) -> str:
        """Names of the requests that have not ended."""
        return ", ".join(request.name for request in requests if request.is_live)
