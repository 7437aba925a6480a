"""Prefill and decode nodes over tiny models: faults, aborts and refusals."""

import itertools
import re
from itertools import product
from unittest.mock import patch

import pytest

from radixkv.scheduler.engine import Engine
from radixkv.scheduler.errors import ConfigError, RequestError
from radixkv.scheduler.handoff import PartId, Timing
from radixkv.scheduler.nodes import DecodeEngine, Disaggregated, PrefillEngine
from radixkv.scheduler.nodes.transport import (
    Descriptor,
    Event,
    Fault,
    InProcessExchange,
    InProcessTransport,
    Offered,
    OfferFailed,
    PullFailed,
    PullInfo,
    Received,
)
from radixkv.scheduler.request import Request, RequestStatus

from .cluster import TIMING, Cluster, over_jax, over_nixl
from .conftest import MAX_MODEL_LEN, complete, fresh
from .test_engine import PREFIX, PROMPTS, SAMPLED


@pytest.fixture
def expected(llama: Engine) -> list[list[int]]:
    """The output of one engine."""
    return complete(fresh(llama), PROMPTS, 24, SAMPLED)


# Ends and losses


def test_a_request_that_was_aborted_alone_leaves_no_work(llama):
    cluster = Cluster(llama)
    cluster.add([PREFIX], 4)
    assert cluster.front.abort("0")
    assert cluster.finish() == []
    cluster.complete([PREFIX], 4)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6, 9, 20])
@pytest.mark.parametrize("order", ["early", "prefill_complete"])
def test_an_abort_leaks_nothing_and_does_not_disturb_the_others(llama, expected, order, num_steps):
    cluster = Cluster(llama, prefill={"order": order, "token_budget": 16})
    requests = cluster.add(PROMPTS, 24, SAMPLED)
    cluster.step(num_steps)
    aborted = [r for r in requests[::2] if cluster.front.abort(r.request_id)]
    ended = cluster.finish()
    assert not set(ended) & set(aborted)
    for request, tokens in zip(requests, expected, strict=True):
        if request in aborted:
            assert request.status is RequestStatus.ABORTED
        else:
            assert request.output_tokens == tokens
    assert cluster.front.failures == {}
    assert not cluster.front.abort("0") and not cluster.front.abort("no such request")


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_ends_and_comes_back_changes_no_token(llama, expected, role, num_steps):
    cluster = Cluster(llama, prefill={"token_budget": 16})
    requests = cluster.add(PROMPTS, 24, SAMPLED)
    cluster.step(num_steps)
    if role == "prefill":
        cluster.restart_prefill()
    else:
        cluster.restart_decode()
    cluster.finish()
    assert cluster.front.failures == {}
    assert [request.output_tokens for request in requests] == expected


@pytest.mark.parametrize("share", [0.24, 0.26, 0.9, 1.1, 100])
def test_long_steps_are_no_silence_of_a_peer(llama, expected, share):
    """All messages of one process are delivered between two steps, however long these take."""
    cluster = Cluster(llama, prefill={"token_budget": 16})
    clock, later = cluster.front._clock, itertools.count(1)
    cluster.front._clock = lambda: clock() + next(later) * share * TIMING.silence_s
    requests = cluster.add(PROMPTS, 24, SAMPLED)
    cluster.finish()
    assert (cluster.front.failures, cluster.front._gateway.num_lost) == ({}, 0)
    assert [request.output_tokens for request in requests] == expected


class Unreliable(InProcessTransport):
    """Fails the first pulls or offers."""

    def __init__(self, exchange: InProcessExchange, num_failures: int) -> None:
        super().__init__(exchange)
        self.num_failures = num_failures

    def poll(self) -> list[Event]:
        return [self._spoil(event) for event in super().poll()]

    def _spoil(self, event: Event) -> Event:
        if self.num_failures == 0 or not isinstance(event, Offered | Received):
            return event
        self.num_failures -= 1
        if isinstance(event, Offered):
            return OfferFailed(event.part_id, "it was too cold")
        self.release(event.part_id)
        return PullFailed(event.part_id, Fault.CORRUPT, "it was too warm")


def replace_transport(node: PrefillEngine | DecodeEngine, transport: InProcessTransport) -> None:
    parts = node._sender if isinstance(node, PrefillEngine) else node._receiver
    node._transport = parts._transport = transport


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_part_that_is_lost_is_sent_by_another_attempt(llama, expected, role):
    cluster = Cluster(llama, prefill={"token_budget": 16})
    node = cluster.p if role == "prefill" else cluster.d
    replace_transport(node, Unreliable(cluster.exchange, 2))
    assert cluster.complete(PROMPTS, 24, SAMPLED) == expected


@pytest.mark.parametrize(
    ("role", "reason"),
    [
        ("prefill", "part 0 could not be offered: it was too cold"),
        ("decode", "part 0 could not be pulled: it was too warm"),
    ],
)
def test_after_some_attempts_a_request_fails_with_the_reason(llama, role, reason):
    cluster = Cluster(llama)
    node = cluster.p if role == "prefill" else cluster.d
    network = Unreliable(cluster.exchange, 100)
    replace_transport(node, network)
    [failing] = cluster.add([PREFIX], 4)
    cluster.finish()
    assert failing.status is RequestStatus.ABORTED and failing.finish_reason == "abort"
    assert cluster.front.failures == {"0": reason}
    network.num_failures = 0
    cluster.complete([PREFIX], 4)


class Stuck(InProcessTransport):
    """Pulls nothing, and ends a pull only when it is cancelled."""

    def pull(
        self, part_id: PartId, info: PullInfo, expected: Descriptor, *, timeout_s: float
    ) -> None:
        pass

    def cancel(self, part_id: PartId) -> None:
        self._events.append(PullFailed(part_id, Fault.CANCELLED, "cancelled"))


def test_the_pull_of_an_aborted_request_is_cancelled(llama):
    cluster = Cluster(llama)
    replace_transport(cluster.d, Stuck(cluster.exchange))
    cluster.add([PREFIX], 4)
    cluster.step(8)
    assert cluster.d.scheduler.num_receiving == 1
    assert cluster.front.abort("0")
    cluster.step(4)
    assert not cluster.front.has_work
    cluster.assert_nothing_leaked()


def test_the_transport_knows_whether_all_was_read(llama):
    cluster = Cluster(llama)
    with patch.object(cluster.p._transport, "withdraw", wraps=cluster.p._transport.withdraw) as spy:
        cluster.complete([PREFIX], 4)
        spy.assert_called_once_with(("0 #0.0", 1), was_read=True)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [over_jax, over_nixl])
def test_faults_over_transports_between_processes(llama, expected, transport):
    """Aborts requests, then ends each node, while threads transfer."""
    options = {"timing": Timing(retry_s=0.2, silence_s=5.0, transfer_s=10.0, remember_s=10.0)}
    for num_steps, fault in product((1, 2, 4), ("abort", "prefill", "decode")):
        cluster = Cluster(llama, transport=transport, prefill=options, decode=options)
        requests = cluster.add(PROMPTS, 24, SAMPLED)
        cluster.step(num_steps)
        if fault == "abort":
            for request in requests[::2]:
                assert cluster.front.abort(request.request_id)
        elif fault == "prefill":
            cluster.restart_prefill()
        else:
            cluster.restart_decode()
        cluster.finish()
        ended = requests[1::2] if fault == "abort" else requests
        tokens = expected[1::2] if fault == "abort" else expected
        assert [request.output_tokens for request in ended] == tokens
        assert cluster.front.close()


# What cannot be


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_size": 160}, "refused, block size: 4 here, 160 there"),
        ({"num_blocks": 2}, "refused, too large: 3 needed, 2 available"),
        (
            {"weights_revision": "newer"},
            "part 0 could not be pulled: of another namespace or model",
        ),
    ],
)
def test_nodes_that_do_not_match_are_refused(llama, options, reason):
    cluster = Cluster(llama, decode=options)
    [refused] = cluster.add([PREFIX[:8]], 4)
    cluster.finish()
    assert refused.status is RequestStatus.ABORTED
    assert cluster.front.failures == {"0": reason}
    # P keeps what it has computed; nothing can be matched on D.
    assert cluster.d.manager.match(PREFIX[:8]).num_tokens == 0


def test_nodes_of_another_dtype_are_refused_by_name(llama):
    cluster, name = Cluster(llama), llama._runner.model.config.name
    short = f"llama {name.split()[1][:12]}"
    other = cluster.new_decode()
    other.model_name = f"{name} bfloat16"
    message = (
        f"all nodes need the same model and dtype: that of decode-0 is {short} bfloat16, but that "
        f"of prefill-0 is {short} float32"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        cluster.front.replace("decode-0", other)
    assert cluster.front.decode["decode-0"] is not other
    cluster.d.model_name = other.model_name
    with pytest.raises(ConfigError, match=r"^all nodes need the same model and dtype: that of"):
        Disaggregated([cluster.p], [cluster.d])


def test_d_refuses_what_its_model_cannot_take(llama):
    cluster = Cluster(llama)
    cluster.add([PREFIX], 4)
    cluster.d._runner.max_model_len = 43
    cluster.finish()
    assert cluster.front.failures == {
        "0": (
            "refused, malformed: request '0': 40 prompt tokens and 4 new ones are more than "
            "max_model_len 43"
        )
    }


@pytest.mark.parametrize("num_blocks", [2, 200])
def test_what_a_node_takes_fits_into_its_blocks(llama, num_blocks):
    sizes = {"num_blocks": num_blocks}
    cluster = Cluster(llama, prefill=sizes, decode=sizes)
    expected = min(MAX_MODEL_LEN, num_blocks * llama.manager.block_size)
    assert cluster.p.max_model_len == cluster.d.max_model_len == expected


def test_an_open_request_fails_that_is_too_long_for_a_node_in_the_place_of_its_own(llama):
    cluster = Cluster(llama)
    _, short = cluster.add([PREFIX, PREFIX[:8]], 4)
    cluster.step(1)
    node = cluster.new_prefill()
    node._runner.max_model_len = 43
    cluster.p._transport.close()
    cluster.front.replace("prefill-0", node)
    cluster.finish()
    assert cluster.front.failures == {
        "0": "request '0': 40 prompt tokens and 4 new ones are more than max_model_len 43"
    }
    assert len(short.output_tokens) == 4


def test_a_prompt_that_no_node_has_room_for_fails(llama):
    cluster = Cluster(llama, prefill={"num_blocks": 9})
    cluster.add([PREFIX], 4)
    cluster.finish()
    assert cluster.front.failures == {"0": "40 tokens need 10 blocks, but the pool has 9"}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            Request("a", [5, 1024], 1),
            "request 'a': token 1024 at position 1 is outside the vocabulary of 1024",
        ),
        (
            Request("a", [5] * 380, 5),
            "request 'a': 380 prompt tokens and 5 new ones are more than max_model_len 384",
        ),
        (Request("live", [5], 1), "request 'live' is already active"),
    ],
)
def test_requests_that_cannot_run_are_refused(llama, request_, text):
    cluster = Cluster(llama)
    cluster.front.add_request(Request("live", [7], 1))
    with pytest.raises(RequestError, match=f"^{re.escape(text)}$"):
        cluster.front.add_request(request_)
    cluster.finish()


def test_a_request_is_added_once_but_its_id_again(llama):
    cluster = Cluster(llama)
    [request] = cluster.add([[7]], 1)
    cluster.finish()
    with pytest.raises(RequestError, match=r"^request '0' was added before$"):
        cluster.front.add_request(request)
    cluster.complete([[7]], 1)
