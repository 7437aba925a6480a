"""The state of a scheduler's world: the scheduler under test beside its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from ...adapters.scheduler import SchedulerFactory
from ...adapters.scheduler_target import SchedulerTarget
from ...model.ghost import Tag
from ...model.scheduler import Limits, Request, SchedulerModel, root_tag
from ..engine import Config
from .configuration import NAMESPACES
from .copies import Copies
from .counts import Counts


class SchedulerState:
    """A scheduler under test, with its requests and model.

    Attributes:
        past: all requests ever submitted.
        is_decode_node: whether prefill nodes compute the prompts.
        copies: copies between tiers; None if the configuration has no tiers.
        roots: tag of the empty prefix in each namespace, under its current weights.
        namespace: index of the namespace of each request.
        just_ended: requests that ended in this operation and must hold nothing.
    """

    def __init__(self, config: Config, factory: SchedulerFactory) -> None:
        self.config = config
        self.target = SchedulerTarget(factory, config)
        self.is_decode_node = self.target.is_decode_node
        promises, most = self.target.promises, self.target.promises.max_overtaken
        given = {**config, "is_decode_node": self.is_decode_node, "max_overtaken": most,
                 "promised": promises.names()}  # fmt: skip
        names = [each.name for each in fields(Limits) if each.name in given]
        limits = Limits(**{name: given[name] for name in names})
        self.model = SchedulerModel(limits)
        # A decode node does not ask storage for a prompt: a prefill node has done that.
        asks_storage = bool(config.get("storage")) and not self.is_decode_node
        self.copies = Copies(self.target, self.model, asks_storage) if limits.host_blocks else None
        self.roots: list[Tag] = [root_tag(number) for number in range(len(NAMESPACES))]
        self.namespace: dict[str, int] = {}
        self.num_resets = 0
        self.situations: Counter[str] = self.model.situations
        self.counts = Counts(self.situations)
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
