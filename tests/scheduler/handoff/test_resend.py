"""`ResendQueue` and a naive model of it, on random walks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.scheduler.gateway.resend import ResendQueue
from radixkv.scheduler.handoff import AttemptKey
from radixkv.scheduler.handoff.gateway_messages import (
    AttemptMessage,
    DecodeFailed,
    DeliveryAck,
    Started,
)

RETRY_S, PATIENCE_S = 2.0, 5.0
PEERS = st.sampled_from(["p0", "p1"])
KEYS = st.sampled_from([AttemptKey(name, attempt) for name in "ab" for attempt in (1, 2)])


def messages(key: AttemptKey) -> list[AttemptMessage]:
    return [Started(key), DecodeFailed(key, "why")]


STEPS = st.one_of(
    st.tuples(st.just("add"), PEERS, KEYS, st.integers(0, 1)),
    st.tuples(st.just("acknowledge"), PEERS, KEYS, st.integers(0, 1)),
    st.tuples(st.just("forget peer"), PEERS, KEYS, st.just(0)),
    st.tuples(st.just("forget"), PEERS, KEYS, st.just(0)),
    st.tuples(st.just("take due"), PEERS, KEYS, st.integers(0, 3)),
    st.tuples(st.just("take due"), PEERS, KEYS, st.integers(0, 3)),
)


@dataclass
class Waiting:
    peer: str
    message: AttemptMessage
    first_at: float
    last_at: float


@settings(max_examples=200)
@given(st.lists(STEPS, max_size=30))
def test_the_queue_holds_what_nobody_has_acknowledged(
    steps: list[tuple[str, str, AttemptKey, int]],
) -> None:
    """Each message is sent again every retry_s, those longest unsent first, until it expires."""
    queue, model, now = ResendQueue(retry_s=RETRY_S, patience_s=PATIENCE_S), list[Waiting](), 0.0
    for what, peer, key, number in steps:
        match what:
            case "add":
                message = messages(key)[number]
                queue.add(peer, message, now)
                model = [each for each in model if (each.peer, each.message.key) != (peer, key)]
                model.append(Waiting(peer, message, now, now))
            case "acknowledge":
                message = messages(key)[number]
                queue.acknowledge(peer, DeliveryAck.of(message))
                model = [each for each in model if (each.peer, each.message) != (peer, message)]
            case "forget peer":
                queue.forget_peer(peer)
                model = [each for each in model if each.peer != peer]
            case "forget":
                queue.forget(key)
                model = [each for each in model if each.message.key != key]
            case _:
                now += number
                due = [each for each in model if now - each.last_at >= RETRY_S]
                expired = [each for each in due if now - each.first_at >= PATIENCE_S]
                resend = [each for each in due if each not in expired]
                assert queue.take_due(now) == (
                    [(each.peer, each.message) for each in resend],
                    [(each.peer, each.message) for each in expired],
                )
                model = [each for each in model if each not in due] + resend
                for each in resend:
                    each.last_at = now
        assert len(queue) == len(model)
