"""The running state of the softmax, for peaks and sinks of any distance."""

import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels.online_softmax import (
    LOWEST,
    V_FACTOR,
    SoftmaxState,
    empty_state,
    finalize,
    merge,
    merge_into_rows,
)

from .problems import int32

# exp of more than 88 is infinite in float32.
FAR = np.array([-1e4, -200.0, -100.0, -80.0, -1.0, 0.0, 1.0, 80.0, 100.0, 200.0, 1e4])
PEAKS, OTHERS = (each.ravel() for each in np.meshgrid(FAR, FAR))
TOTAL = 1.5


def state_of(peaks, mean):
    """Return the state of queries that saw tokens of these largest logits, and of this mean."""
    return SoftmaxState(
        jnp.full((len(peaks), 2), V_FACTOR * TOTAL * mean, jnp.float32),
        jnp.asarray(peaks, jnp.float32),
        jnp.full(len(peaks), TOTAL, jnp.float32),
    )


def assert_merged(found, peaks, mean, others, other_mean):
    """Compare out and lse with the mean of two means, each with the weight of its lse."""
    lses = np.asarray(peaks) + np.log(TOTAL), np.asarray(others)
    lse = np.logaddexp(*lses)
    out = mean * np.exp(lses[0] - lse) + other_mean * np.exp(lses[1] - lse)
    np.testing.assert_allclose(found[0], np.stack([out, out], axis=1), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(found[1], lse, rtol=1e-6, atol=1e-5)


def test_a_sink_of_any_distance_is_a_token_without_a_value():
    sinks = jnp.asarray(OTHERS, jnp.float32)
    assert_merged(finalize(state_of(PEAKS, 3.0), sinks), PEAKS, 3.0, OTHERS, 0.0)
    assert_merged(finalize(state_of(PEAKS, 3.0), None), PEAKS, 3.0, np.full(len(PEAKS), -np.inf), 0)


@pytest.mark.parametrize("sinks", [None, [0.0, 1e4, -1e4]])
def test_what_saw_no_token_is_empty_whatever_the_sink(sinks):
    sinks = None if sinks is None else jnp.asarray(sinks)
    out, lse = finalize(empty_state((3,), 2), sinks)
    assert not out.any() and (lse == -jnp.inf).all()


@pytest.mark.parametrize("sinks", [None, [1.0, 1e4, -1e4]])
def test_what_is_nan_stays_nan_and_alone(sinks):
    """It is no query that saw nothing, whose output is 0."""
    sinks = None if sinks is None else jnp.asarray(sinks)
    state = state_of([0.0, 1.0, 2.0], 3.0)
    state = merge(empty_state((3,), 2), state._replace(total=state.total.at[1].set(jnp.nan)))
    for found in finalize(state, sinks):
        is_nan = np.isnan(found)
        assert is_nan[1].all() and not is_nan[[0, 2]].any()


def test_states_of_any_distance_merge():
    others = OTHERS + np.log(TOTAL)
    a, b = state_of(PEAKS, 3.0), state_of(OTHERS, -1.0)
    assert_merged(finalize(merge(a, b), None), PEAKS, 3.0, others, -1.0)
    assert_merged(finalize(merge(b, a), None), PEAKS, 3.0, others, -1.0)
    rows = jnp.arange(len(PEAKS), dtype=jnp.int32)
    assert_merged(finalize(merge_into_rows(a, b, rows), None), PEAKS, 3.0, others, -1.0)


def test_parts_merge_into_the_rows_of_which_they_are():
    """In any order, several into a row, beside parts of no row, and over nothing."""
    parts = state_of([100.0, -200.0, 300.0, 1e4, LOWEST], 3.0)
    merged = merge_into_rows(empty_state((3,), 2), parts, int32([2, 0, 2, 3, 9]))
    out, lse = finalize(merged, None)
    np.testing.assert_allclose(out, [[3, 3], [0, 0], [3, 3]], rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(TOTAL) + np.array([-200.0, -np.inf, 300.0]), rtol=1e-6)
