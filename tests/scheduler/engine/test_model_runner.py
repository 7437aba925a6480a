"""The runner of a model without programs: what it dispatches, in which order, and what it keeps."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest

from radixkv.kvcache.copies.block_copies import BlockCopies
from radixkv.scheduler.engine.batch_state import Needs
from radixkv.scheduler.engine.model_runner import ModelRunner, _Pending, _Results
from radixkv.scheduler.request import Request
from radixkv.scheduler.step_plan import BlockCopy, Chunk, StepPlan

NOTHING: Any = None


def runner_of(**parts: Any) -> Any:
    runner: Any = ModelRunner.__new__(ModelRunner)
    vars(runner).update(parts)
    return runner


@pytest.mark.parametrize("number", [1, 7, 8, 9, 16, 17])
def test_a_step_copies_the_blocks_of_any_number_of_samples(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program copies eight of them; fewer are padded."""
    copies: Any = BlockCopies.__new__(BlockCopies)
    copies.max_blocks = copies._min_blocks = 8
    copied, sizes = list[tuple[int, int]](), list[int]()

    def copy(arrays: Any, sources: Any, destinations: Any, size: int) -> None:
        assert arrays == "arrays" and {sources.dtype, destinations.dtype} == {np.dtype(np.int32)}
        copied.extend(zip(sources.tolist(), destinations.tolist(), strict=True))
        sizes.append(size)

    monkeypatch.setattr(copies, "copy", copy)
    pairs = [(1 + place // 2, 100 + place) for place in range(number)]
    runner_of(_copies=copies, arrays="arrays")._copy([BlockCopy(NOTHING, *pair) for pair in pairs])
    assert copied == pairs and sizes == [8] * -(-number // 8)


def test_a_step_whose_wait_is_interrupted_can_be_read_again() -> None:
    class Tokens:
        is_interrupted = True

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            if self.is_interrupted:
                raise KeyboardInterrupt
            return np.array([5, 6, 0], np.int32)

    tokens: Any = Tokens()
    later = _Results(np.array([7], np.int32), 1, None)  # type: ignore[arg-type]
    runner = runner_of(_results=deque([_Results(tokens, 2, NOTHING), later]), _read_logprobs=None)
    with pytest.raises(KeyboardInterrupt):
        runner.read()
    Tokens.is_interrupted = False
    assert runner.read() == [5, 6]
    assert runner.read() == [7] and not runner._results


def test_log_probabilities_are_those_of_the_step_that_was_read_last() -> None:
    tokens: Any = np.array([5], np.int32)
    logprobs: Any = [Mock(), None, Mock()]
    results = [_Results(tokens, 1, each) for each in logprobs]
    runner, plans = runner_of(_results=deque(results), _read_logprobs=None), [Mock() for _ in "abc"]
    for plan in plans:
        runner.read()
        runner.append_logprobs(plan)
        runner.append_logprobs(plan)
    assert [each and each.append.mock_calls for each in logprobs] == [
        [call(plans[0])],
        None,
        [call(plans[2])],
    ]


@pytest.mark.parametrize(
    ("start", "options", "needs", "awaits"),
    [
        (3, {}, Needs.GUIDE, True),
        (2, {}, Needs.GUIDE, False),
        (1, {}, Needs.GUIDE, False),
        (3, {}, Needs.DRAWS, False),
        (3, {"guide": None}, Needs.GUIDE, False),
        (3, {"finish_reason": "length"}, Needs.GUIDE, False),
    ],
)
def test_only_a_guided_request_awaits_its_last_token(
    start: int, options: dict[str, Any], needs: int, awaits: bool
) -> None:
    """The request has three tokens that the host knows."""
    request = Request("a", [1, 2, 3], 2)
    for name, value in {"guide": SimpleNamespace(has_failed=False), **options}.items():
        setattr(request, name, value)
    plan = StepPlan(prefill=[Chunk(request, start, 1)], copies=[BlockCopy(request, 1, 2)])
    log = Mock()
    runner = runner_of(
        **{name: getattr(log, name) for name in ("dispatch", "_copy", "_finish")},
        _counter=SimpleNamespace(count=0),
        _late_compilations=0,
        _pending=None,
    )

    def compute(plan: StepPlan, wrote: Any) -> None:
        log.compute(plan, wrote)
        runner._pending = _Pending(plan, NOTHING, NOTHING, needs)
        runner._counter.count += 1

    def finish() -> None:
        runner._pending = None
        runner._counter.count += 10

    log._finish.side_effect = finish
    runner._compute = compute
    wrote = Mock()
    runner.start(plan, wrote)
    begun = [call.dispatch(), call._copy(plan.copies), call.compute(plan, wrote)]
    assert log.mock_calls == begun + [call._finish()] * (not awaits)
    if awaits:
        assert not runner.sample()
        request.append(9)
    assert runner.sample() and runner.sample()
    assert log.mock_calls == [*begun, call._finish()]
    assert runner._late_compilations == 11, "compilations of both parts are late"
