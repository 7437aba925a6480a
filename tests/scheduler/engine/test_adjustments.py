"""Adjusted logits, against a reference that computes one row at a time with NumPy."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.engine import adjustments
from radixkv.scheduler.engine.adjustments import (
    Adjustments,
    RowValues,
    _forbid,
    _mask_without,
    _set_counts,
    adjust_logits,
)
from radixkv.scheduler.engine.sampling import SamplingBatch, sample
from radixkv.scheduler.request import MAX_FACTOR, MIN_FACTOR, Request, SamplingParams
from radixkv.scheduler.step_plan import Chunk, StepPlan

VOCABULARY = 37
ROWS = 3

_adjust = jax.jit(adjust_logits)

CHOICES: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 0.5, 1.0, 1.7),
    "min_p": (0.0, 0.02, 0.3, 1.0),
    "repetition_penalty": (0.5, 1.0, 1.3),
    "presence_penalty": (-2.0, 0.0, 0.75),
    "frequency_penalty": (-0.5, 0.0, 2.0),
}


def reference(
    logits: np.ndarray,
    sampling: SamplingParams,
    prompt: list[int],
    output: list[int],
    allowed: set[int] | None,
) -> np.ndarray:
    """As the documentation of vLLM has it, token by token."""
    adjusted = logits.astype(np.float64)
    for token in range(len(adjusted)):
        if allowed is not None and token not in allowed:
            adjusted[token] = -np.inf
        if token in prompt or token in output:
            factor = sampling.repetition_penalty
            adjusted[token] *= 1 / factor if adjusted[token] > 0 else factor
        adjusted[token] -= sampling.frequency_penalty * output.count(token)
        adjusted[token] -= sampling.presence_penalty * (token in output)
    if sampling.temperature > 0:
        probabilities = np.exp((adjusted - adjusted.max()) / sampling.temperature)
        adjusted[probabilities < sampling.min_p] = -np.inf
    return adjusted


def words_of(allowed: set[int] | None) -> list[int]:
    bits = [allowed is None or token in allowed for token in range(-(-VOCABULARY // 32) * 32)]
    packed = np.packbits(bits, bitorder="little").view(np.int32)
    return list(packed)


@given(seed=st.integers(0, 2**32 - 1), has_counts=st.booleans(), has_masks=st.booleans())
def test_logits_are_those_of_the_reference(seed, has_counts, has_masks):
    random = np.random.default_rng(seed)

    def some_tokens(least: int, is_any: bool = True) -> list[int]:
        most = VOCABULARY // random.integers(1, 4)
        return random.integers(0, VOCABULARY, random.integers(least, most) * is_any).tolist()

    rows: list[Any] = [
        (
            random.integers(-20, 21, VOCABULARY).astype(np.float32) / np.float32(3),
            SamplingParams(**{name: random.choice(values) for name, values in CHOICES.items()}),
            some_tokens(0, has_counts),
            some_tokens(0, has_counts),
            set(some_tokens(1)) if has_masks and random.random() < 0.7 else None,
        )
        for _ in range(ROWS)
    ]
    counts = np.zeros((ROWS, VOCABULARY), np.int32)
    for row, (_, _, prompt, output, _) in enumerate(rows):
        counts[row, prompt] = 1 << 30
        np.add.at(counts[row], output, 1)
    fields: Any = [
        np.array([getattr(sampling, name) for _, sampling, *_ in rows], np.float32)
        for name in RowValues._fields
    ]
    adjusted = _adjust(
        np.array([row[0] for row in rows], np.float32),
        np.array([row[1].temperature for row in rows], np.float32),
        RowValues(*fields),
        counts if has_counts else None,
        np.array([words_of(row[4]) for row in rows], np.int32) if has_masks else None,
    )
    for (logits, sampling, *rest), result in zip(rows, np.asarray(adjusted), strict=True):
        exact = reference(logits, sampling, *rest)
        near = _near_the_border(exact, logits, sampling, rest)
        np.testing.assert_allclose(result[~near], exact[~near], rtol=1e-5, atol=1e-4)
        if sampling == SamplingParams(sampling.temperature) and rest[2] is None:
            np.testing.assert_array_equal(result, logits)


def _near_the_border(
    exact: np.ndarray, logits: np.ndarray, sampling: SamplingParams, rest: list[Any]
) -> np.ndarray:
    """Tokens of which rounding decides whether min_p drops them."""
    if not (sampling.temperature and sampling.min_p):
        return np.zeros(len(exact), np.bool_)
    all_kept = SamplingParams(
        sampling.temperature,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )
    before = reference(logits, all_kept, *rest)
    with np.errstate(invalid="ignore"):
        distance = (before - before.max()) / sampling.temperature - np.log(sampling.min_p)
    return np.abs(distance) < 1e-4


@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    num_prompt=st.integers(0, 12),
    slot=st.integers(0, ROWS - 1),
)
def test_a_token_of_prompt_and_output_counts_in_both(tokens, num_prompt, slot):
    num_prompt = min(num_prompt, len(tokens))
    packed = np.zeros(3 + 12, np.int32)  # what follows the tokens does not count
    packed[: 3 + len(tokens)] = [slot, num_prompt, len(tokens), *tokens]
    counts = np.array(_set_counts(np.full((ROWS, VOCABULARY), 7, np.int32), packed))
    expected = np.full((ROWS, VOCABULARY), 7, np.int32)
    expected[slot] = np.bincount(tokens[num_prompt:], minlength=VOCABULARY)
    expected[slot, tokens[:num_prompt]] += 1 << 30  # once, however often it is there
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("penalty", [MIN_FACTOR, MAX_FACTOR])
@pytest.mark.parametrize("temperature", [MIN_FACTOR, MAX_FACTOR])
def test_large_logits_stay_finite_at_the_limits_of_penalty_and_temperature(penalty, temperature):
    logits = np.array([-1e32, -1.5, 1e32, 0.0, 2.5], np.float32)
    sampling = SamplingParams(temperature, repetition_penalty=penalty)
    one: Any = np.ones(1, np.float32)
    zero: Any = np.zeros(1, np.float32)
    values = RowValues(zero, one * penalty, zero, zero)
    counts = np.ones((1, 5), np.int32)
    adjusted = _adjust(logits[None], one * temperature, values, counts, None)
    exact = reference(logits, sampling, [], list(range(5)), None)
    np.testing.assert_allclose(adjusted[0], exact, rtol=1e-5)
    numbers = zero.astype(np.int32), one, zero.astype(np.uint32), zero.astype(np.int32)
    assert sample(adjusted, SamplingBatch(one * temperature, *numbers)).tolist() == [2]


@given(
    vocab_size=st.integers(1, 70),
    is_masked=st.booleans(),
    in_mask=st.sets(st.integers(0, 69)),
    late=st.sets(st.integers(-1, 99)) | st.just(set(range(70))),
)
def test_late_tokens_are_forbidden_unless_no_other_is_allowed(vocab_size, is_masked, in_mask, late):
    """Bits after the last token, which a mask of all tokens has, count for nothing."""
    num_words = -(-vocab_size // 32)
    bits = np.ones(32 * num_words, np.bool_)
    if is_masked:
        bits = np.isin(np.arange(32 * num_words), [each for each in in_mask if each < vocab_size])
    allowed = np.packbits(bits, bitorder="little").view(np.int32)
    _forbid(allowed, _mask_without(vocab_size, frozenset(late)))
    left = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:vocab_size]
    before = set(np.flatnonzero(bits[:vocab_size]).tolist())
    assert set(np.flatnonzero(left).tolist()) == (before - late or before)


def test_the_late_tokens_of_samples_are_visited_once(monkeypatch):
    masks: list[Any] = []
    make = Mock(side_effect=_mask_without)
    monkeypatch.setattr(adjustments, "_mask_without", make)
    adjuster, unused = Adjustments(1, ROWS, 9, VOCABULARY), None
    given: Any = unused
    monkeypatch.setattr(adjuster, "adjust_rows", lambda *rows: masks.append(rows[4]))
    sampling = SamplingParams(min_tokens=2)
    first = Request("a", [1], 4, sampling=sampling, stop_token_ids=[2, 3])
    second = Request("b", [1], 4, sampling=sampling, stop_token_ids=first.stop_token_ids)
    plan = StepPlan(prefill=[Chunk(request, 0, 1) for request in (first, second)])
    for _ in range(3):
        adjuster.adjust(plan, given, given, given)
    late = words_of(set(range(VOCABULARY)) - {2, 3})
    assert [mask[:2].tolist() for mask in masks] == [[late, late]] * 3
    assert make.call_count == 1


def test_the_late_tokens_of_all_rows_are_kept_and_no_others(monkeypatch):
    """A step finds those of the last one, and an engine does not remember those of all requests."""
    make = Mock(side_effect=_mask_without)
    monkeypatch.setattr(adjustments, "_mask_without", make)
    adjuster, unused = Adjustments(ROWS, ROWS, 9, VOCABULARY), None
    given: Any = unused
    monkeypatch.setattr(adjuster, "adjust_rows", lambda *rows: None)

    def step(first: int) -> None:
        requests = [
            Request(
                str(token), [1], 4, sampling=SamplingParams(min_tokens=2), stop_token_ids=[token]
            )
            for token in range(first, first + ROWS)
        ]
        plan = StepPlan(prefill=[Chunk(request, 0, 1) for request in requests])
        adjuster.adjust(plan, given, given, given)

    for first in range(0, 4 * ROWS, ROWS):
        for _ in range(3):
            step(first)
        assert make.call_count == first + ROWS
    step(0)
    assert make.call_count == 5 * ROWS, "those of requests that have ended are kept"


CHUNKS = [(0, 2, False, False), (0, 3, True, True), (2, 1, True, True), (3, 1, False, True)]
"""Start and length of a chunk of a request with three tokens that the host knows, whether a guide
has a mask for the token that it yields, and whether it yields one of the output."""


@pytest.mark.parametrize("is_ended", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_guide_masks_the_token_after_all_that_the_host_knows(is_ended, later, monkeypatch):
    adjuster, unused = Adjustments(len(CHUNKS), len(CHUNKS), 9, VOCABULARY), None
    given: Any = unused
    masks: list[Any] = []
    monkeypatch.setattr(adjuster, "adjust_rows", lambda *rows: masks.append(rows[4]))
    chunks, guides = [], []
    for start, length, is_masked, _ in CHUNKS:
        guide = Mock(has_failed=False)
        guide.allow.side_effect = lambda tokens, words: words.fill(len(tokens))
        made = Request(str(start), [1, 2] if later else [1, 2, 3], 5, guide=guide)
        if later:
            made.append(3)
        made.finish_reason = "length" if is_ended else None
        chunks.append(Chunk(made, start, length))
        guides.append((guide.allow, is_masked and not is_ended))
    adjuster.adjust(StepPlan(prefill=chunks), given, given, given)
    assert [allow.called for allow, _ in guides] == [is_masked for _, is_masked in guides]
    if is_ended:
        assert masks == []
        return
    [allowed] = masks
    for row, (_, is_masked) in enumerate(guides):
        assert set(allowed[row].tolist()) == {int(later) if is_masked else -1}


@pytest.mark.parametrize("number", [1, 2])
def test_tokens_of_output_are_counted_for_who_has_penalties(number, monkeypatch):
    """A chunk that ends inside what the host knows yields none."""
    adjuster, unused = Adjustments(9, 9, 9, VOCABULARY), None
    given: Any = unused
    counted: list[Any] = []
    monkeypatch.setattr(adjuster, "count_rows", lambda *rows: counted.append(rows[2].tolist()))
    penalised = SamplingParams(repetition_penalty=1.5)
    chunks = [
        (Chunk(Request("a", [1, 2, 3], 5, sampling=sampling), start, length), yields)
        for start, length, _, yields in CHUNKS
        for sampling in (SamplingParams(1.0), penalised)[-number:]
    ]
    adjuster.count(StepPlan(prefill=[chunk for chunk, _ in chunks]), given, given)
    expected = [yields and chunk.request.sampling is penalised for chunk, yields in chunks]
    assert counted == [expected + [False] * (9 - len(chunks))]
