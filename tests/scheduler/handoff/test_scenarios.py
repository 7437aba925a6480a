"""All scenarios of the protocol, and the loss of any two messages."""

from collections.abc import Callable
from types import ModuleType

import pytest

from radixkv.scheduler import handoff
from radixkv.scheduler.gateway import network_gateway as network_gateway
from radixkv.scheduler.gateway import node_reporter as node_reporter
from radixkv.scheduler.handoff import gateway_messages as gateway_messages

from .gateway_scenarios import GATEWAY_SCENARIOS
from .harness import ORDERS
from .scenarios import SCENARIOS, any_two_messages_are_lost

ALL_SCENARIOS = [*SCENARIOS, *GATEWAY_SCENARIOS]
assert gateway_messages and network_gateway and node_reporter  # attributes from here on


@pytest.mark.parametrize("scenario", ALL_SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[ModuleType], None]) -> None:
    scenario(handoff)


@pytest.mark.parametrize("order", ORDERS)
def test_every_pair_of_messages_may_be_lost(order: str) -> None:
    any_two_messages_are_lost(handoff, order)
