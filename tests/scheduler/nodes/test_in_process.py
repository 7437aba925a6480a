"""Nodes in one process: what their front keeps of attempts."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.scheduler.gateway.gateway import Gateway, RunAttempt
from radixkv.scheduler.gateway.router import CacheSize
from radixkv.scheduler.nodes import Disaggregated
from radixkv.scheduler.request import Request, RequestStatus


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_request_that_was_preempted_on_a_replaced_node_is_forgotten(is_replaced: bool) -> None:
    gateway = Gateway(backoff_s=1.0)
    gateway.add_prefill("prefill-0", CacheSize(8, 4))
    gateway.add_decode("decode-0", CacheSize(8, 4))
    gateway.add_request(Request("a", [1, 2, 3], 4), 0.0)
    gateway.tick(0.0)
    [run] = gateway.take_actions()
    assert isinstance(run, RunAttempt)
    gateway.started(run.key)
    on_node = Request("a", [1, 2, 3], 4)
    on_node.append(7)
    on_node.status = RequestStatus.PREEMPTED
    front: Any = Disaggregated.__new__(Disaggregated)
    front.prefill, front.decode, front._gateway = {}, {}, gateway
    front._preempted = {run.key: on_node}
    if is_replaced:
        gateway.remove_node("decode-0")
        gateway.take_actions()
    front._offer_preempted()
    assert front._preempted == ({} if is_replaced else {run.key: on_node})
    on_node.status = RequestStatus.RUNNING
    front._offer_preempted()
    assert front._preempted == {}
    assert gateway.take_actions() == []
