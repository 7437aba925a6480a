"""`NodeReporter` and a naive model of it, on random walks."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import RequestTooLargeError
from radixkv.scheduler import RequestError
from radixkv.scheduler.gateway.node_reporter import NodeReporter
from radixkv.scheduler.handoff import (
    AttemptKey,
    DecodeFailed,
    Finished,
    Hits,
    Preempted,
    Started,
    Timing,
)
from radixkv.scheduler.handoff import gateway_messages as sent
from radixkv.scheduler.handoff.gateway_messages import (
    GATEWAY,
    MAX_PROGRESS_ATTEMPTS,
    DeliveryAck,
    FollowAttempt,
    NewTokens,
    PrefillFailed,
    Progress,
    RunPrefill,
)
from radixkv.scheduler.request import Request, RequestStatus

TIMING: Final = Timing(retry_s=2.0, silence_s=3.0, transfer_s=5.0, remember_s=7.0)
EPOCH: Final = 5


def run_of(name: str, epoch: int = EPOCH) -> RunPrefill:
    request = Request(name, [1, 2, 3], 2)
    return RunPrefill.of(AttemptKey(name, 1), epoch, request, "d0", "127.0.0.1:5")


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), max_size=25))
def test_an_attempt_begins_anew_only_when_it_was_not_heard_of_for_long(
    steps: list[tuple[str, int]],
) -> None:
    reporter, heard_at, now = NodeReporter(EPOCH, TIMING), dict[str, float](), 0.0
    begun: list[Any] = []
    for name, passed in steps:
        now += passed
        reporter.tick(now)
        heard_at = {each: at for each, at in heard_at.items() if now - at < TIMING.remember_s}
        assert list(reporter._begun.items()) == [
            (AttemptKey(each, 1), at) for each, at in heard_at.items()
        ]
        run = run_of(name)
        assert reporter.is_new(run) is (name not in heard_at)
        reporter.begin(run, lambda request, *to: begun.append((request.request_id, *to)), now)
        assert begun == [(name, "d0", 1)] * (name not in heard_at)
        assert reporter.take_messages() == [DeliveryAck.of(run)]
        heard_at.pop(name, None)
        heard_at[name] = now
        begun.clear()


@pytest.mark.parametrize(
    "error", [RequestError("it is open"), RequestTooLargeError(9, 5, 4)], ids=["open", "too large"]
)
def test_an_attempt_that_cannot_begin_fails_for_good(error: Exception) -> None:
    def refuse(*_: object) -> None:
        raise error

    reporter, run = NodeReporter(EPOCH, TIMING), run_of("a")
    for now in (0.0, 1.0):
        reporter.begin(run, refuse, now)
    failed = PrefillFailed(run.key, str(error), is_final=True)
    assert reporter.take_messages() == [DeliveryAck.of(run), failed, DeliveryAck.of(run)]
    assert not reporter.is_new(run)


def test_a_report_is_repeated_until_it_is_old() -> None:
    reporter, key = NodeReporter(EPOCH, TIMING), AttemptKey("a", 1)
    reporter.report(DecodeFailed(key, "why"), 0.0)
    times = []
    for now in range(12):
        reporter.tick(float(now))
        times += [now] * len(reporter.take_messages())
    assert (times, reporter.num_unacked) == ([0, 2, 4], 0)
    reporter.report(DecodeFailed(key, "why"), 20.0)
    assert reporter.num_unacked == 1
    reporter.acknowledge(GATEWAY, DeliveryAck(key, "DecodeFailed"))
    assert reporter.num_unacked == 0


def decoding(reporter: NodeReporter, name: str, num_tokens: int = 0) -> Request:
    request = Request(name, [1, 2, 3], 200)
    request.output_tokens += range(num_tokens)
    reporter.report(Started(AttemptKey(name, 1), request, 0), 0.0)
    assert reporter.take_messages() == [sent.Started(AttemptKey(name, 1))]
    return request


def test_a_preempted_attempt_is_reported_at_once_and_every_retry_s_with_all_its_state() -> None:
    reporter, key = NodeReporter(EPOCH, TIMING), AttemptKey("a", 1)
    request = decoding(reporter, "a", 3)
    request.status, request.num_preemptions = RequestStatus.PREEMPTED, 2
    request.num_hit_tokens, request.num_host_hit_tokens = 4, 5
    request.num_storage_hit_tokens = 6
    reporter.report(Preempted(key, request), 1.0)
    state = (0, 1, 2), Hits(4, 5, 6), 2, b""
    times: list[int] = []
    for now in range(1, 8):
        reporter.tick(float(now))
        said = reporter.take_messages()
        assert set(said) <= {sent.Preempted(key, *state), sent.Started(key)}
        times += [now] * said.count(sent.Preempted(key, *state))
    assert times == [1, 3, 5, 7]
    reporter.report(Finished(key, request), 7.0)
    assert reporter.take_messages() == [sent.Finished(key, *state)]
    reporter.tick(8.0)
    assert (reporter.take_messages(), reporter._preempted) == ([], {})


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_message_tells_of_a_limited_number_of_attempts(more: int) -> None:
    """Those that did not fit are first in the next one, and one that tells nothing is not sent."""
    reporter, number = NodeReporter(EPOCH, TIMING, progress_s=1.0), MAX_PROGRESS_ATTEMPTS + more
    names = [str(place) for place in range(number)]
    requests = {name: decoding(reporter, name, 1) for name in names}
    for name in names:
        reporter.follow(FollowAttempt(AttemptKey(name, 1), 0))
    told: list[str] = []
    for now in range(3):
        reporter.report_progress(float(now))
        for message in reporter.take_messages():
            assert isinstance(message, Progress)
            assert 0 < len(message.attempts) <= MAX_PROGRESS_ATTEMPTS
            told += [each.key.request_id for each in message.attempts]
    assert told == names
    requests["0"].append(9)
    reporter.report_progress(3.5)  # nothing was sent for longer than progress_s
    assert reporter.take_messages() == [Progress((NewTokens(AttemptKey("0", 1), 1, (9,)),))]


def test_an_attempt_without_new_tokens_does_not_delay_those_that_come() -> None:
    reporter = NodeReporter(EPOCH, TIMING, progress_s=1.0)
    request = decoding(reporter, "a")
    reporter.follow(FollowAttempt(AttemptKey("a", 1), 0))
    reporter.report_progress(0.0)
    assert reporter.take_messages() == []
    request.append(9)
    reporter.report_progress(0.5)
    assert reporter.take_messages() == [Progress((NewTokens(AttemptKey("a", 1), 0, (9,)),))]
    request.append(8)
    reporter.report_progress(1.499)
    assert reporter.take_messages() == []
    reporter.report_progress(1.5)
    assert reporter.take_messages() == [Progress((NewTokens(AttemptKey("a", 1), 1, (8,)),))]
