"""The protocol, story by story; every loss of one message and of two."""

from collections.abc import Callable
from types import ModuleType

import pytest

from radixkv.scheduler import handoff
from radixkv.scheduler.handoff import drive, nodes, simulation

from .scenarios import SCENARIOS, any_two_messages_are_lost
from .stage import ORDERS

assert drive and nodes and simulation  # attributes of the package from here on


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[ModuleType], None]) -> None:
    scenario(handoff)


@pytest.mark.parametrize("order", ORDERS)
def test_every_pair_of_messages_may_be_lost(order: str) -> None:
    any_two_messages_are_lost(handoff, order)
