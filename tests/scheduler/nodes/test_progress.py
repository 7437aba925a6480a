"""RemoteNodes that stream: tokens arrive as decode nodes generate them."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.scheduler.handoff.gateway_messages import FollowAttempt, Progress
from radixkv.scheduler.request import Request

from .fake_channel import Deployment, tokens_of


def lengths(deployment: Deployment) -> list[int]:
    """Run a request to its end; return how many tokens it had at each turn, without repetition."""
    deployment.decode.is_slow = True
    request = Request("a", [1, 2, 3], 2)
    deployment.nodes.add_request(request)
    found = [0]
    while deployment.nodes.has_work:
        deployment.turn()
        number = len(request.output_tokens)
        assert (request in deployment.nodes.advanced) <= (number > found[-1])
        found += [number] * (number != found[-1])
    assert tuple(request.output_tokens) == tokens_of("a")
    assert request.finish_reason == "length" and not deployment.nodes.failures
    return found


def test_tokens_come_one_by_one() -> None:
    assert lengths(Deployment(stream=True)) == [0, 1, 2]


def test_tokens_come_together_without_stream() -> None:
    sent: list[Any] = []

    def note(sender: str, to: str, message: Any) -> bool:
        sent.append(message)
        return False

    deployment = Deployment(note)
    assert lengths(deployment) == [0, 2]
    assert not any(isinstance(message, FollowAttempt | Progress) for message in sent)


@pytest.mark.parametrize("kind", [FollowAttempt, Progress])
def test_tokens_come_together_if_all_reports_are_lost(kind: type) -> None:
    deployment = Deployment(lambda sender, to, message: isinstance(message, kind), stream=True)
    assert lengths(deployment) == [0, 2]


def test_a_lost_report_is_made_up_for() -> None:
    lost: list[Any] = []

    def is_lost(sender: str, to: str, message: Any) -> bool:
        if isinstance(message, Progress) and not lost:
            lost.append(message)
            return True
        return False

    assert lengths(Deployment(is_lost, stream=True)) in ([0, 2], [0, 1, 2])
    assert lost
