"""Sampling: which tokens may be drawn, and independence of rows."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.engine.sampling import SamplingBatch, sample

VOCABULARY = 7
ROWS = 64

_sample = jax.jit(sample)


def batch(rows: int = ROWS, **fields) -> SamplingBatch:
    """Return the parameters of rows; a scalar applies to all rows, positions count up."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0} | fields
    values.setdefault("position", np.arange(rows))
    dtypes = {"temperature": np.float32, "top_p": np.float32, "seed": np.uint32}
    return SamplingBatch(
        **{
            name: jnp.asarray(np.broadcast_to(value, rows).astype(dtypes.get(name, np.int32)))
            for name, value in values.items()
        }
    )


def draws(logits, rows: int = ROWS, **fields) -> list[int]:
    """Sample the same logits at many positions."""
    logits = jnp.asarray(np.broadcast_to(np.asarray(logits, np.float32), (rows, len(logits))))
    return np.asarray(_sample(logits, batch(rows, **fields))).tolist()


def kept(logits, temperature: float, top_k: int, top_p: float) -> set[int]:
    """Oracle: return the tokens that may be drawn, computed one by one in float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    ranked = sorted(range(len(logits)), key=lambda token: -probabilities[token])
    ranked = ranked[: top_k or len(ranked)]
    probabilities /= probabilities[ranked].sum()
    nucleus, total = [], 0.0
    for token in ranked:
        nucleus.append(token)
        total += probabilities[token]
        if total >= top_p:
            break
    return set(nucleus)


LOGITS = (0.3, 2.0, -1.0, 1.1, 0.9, -4.0, 1.6)


def test_temperature_zero_takes_the_likeliest():
    assert set(draws(LOGITS, temperature=0.0)) == {1}
    logits = np.random.RandomState(0).standard_normal((ROWS, VOCABULARY)).astype(np.float32)
    tokens = _sample(jnp.asarray(logits), batch(temperature=0.0))
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


def test_of_equals_greedy_takes_the_lowest_token():
    assert set(draws((0.0, 3.0, 3.0, 1.0), temperature=0.0)) == {1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (3, 1.0), (0, 0.5), (0, 0.85), (2, 0.9), (6, 0.3)]
)
def test_drawn_tokens_are_those_that_the_oracle_keeps(temperature, top_k, top_p):
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = set()
    for seed in range(32):
        drawn |= set(draws(LOGITS, seed=seed, **fields))
    expected = kept(LOGITS, temperature, top_k, top_p)
    rare = {5} if temperature < 2 else set()  # fewer than one in 2000 draws
    assert drawn | rare == expected | rare and drawn <= expected


@given(
    logits=st.lists(st.integers(-30, 30), min_size=VOCABULARY, max_size=VOCABULARY, unique=True),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 5.0]),
    top_k=st.integers(0, VOCABULARY + 1),
    top_p=st.sampled_from([0.01, 0.37, 0.61, 0.93, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_nothing_else_is_drawn(logits, temperature, top_k, top_p, seed):
    scaled = [value / 7 for value in logits]
    drawn = draws(scaled, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    assert set(drawn) <= kept(scaled, temperature, top_k, top_p)


def test_top_k_above_the_vocabulary_keeps_all():
    assert draws(LOGITS, top_k=2**31 - 1) == draws(LOGITS) == draws(LOGITS, top_k=VOCABULARY)


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_a_sum_that_is_top_p_is_enough(top_p, count):
    assert set(draws([0.0] * 4, top_p=top_p)) == set(range(count))


def test_a_tiny_top_p_is_greedy():
    assert set(draws(LOGITS, top_p=1e-6)) == {1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1.2e-38, 1e-44])
def test_a_tiny_temperature_is_greedy(temperature):
    # Two logits that both overflow float32 when divided by it.
    logits = [20 * logit for logit in LOGITS]
    assert set(draws(logits, temperature=temperature)) == {1}


def test_a_row_does_not_depend_on_the_others():
    random = np.random.RandomState(1)
    logits = jnp.asarray(random.standard_normal((ROWS, VOCABULARY)).astype(np.float32))
    rows = batch(
        temperature=random.choice([0.0, 0.8, 1.3], ROWS),
        top_k=random.randint(0, VOCABULARY, ROWS),
        top_p=random.uniform(0.3, 1.0, ROWS),
        seed=random.randint(0, 2**31, ROWS),
        position=random.randint(0, 10_000, ROWS),
    )
    together = np.asarray(_sample(logits, rows))
    order = random.permutation(ROWS)
    shuffled = _sample(logits[order], SamplingBatch(*(field[order] for field in rows)))
    np.testing.assert_array_equal(shuffled, together[order])
    for row in range(0, ROWS, 7):
        one = SamplingBatch(*(field[row : row + 1] for field in rows))
        assert int(_sample(logits[row : row + 1], one)[0]) == together[row]


def test_rows_of_temperature_zero_are_greedy_beside_rows_that_draw():
    temperature = np.where(np.arange(ROWS) % 2, 1.5, 0.0)
    mixed = draws(LOGITS, temperature=temperature)
    assert set(mixed[::2]) == {1}
    assert mixed[1::2] == draws(LOGITS, temperature=1.5)[1::2]
    assert len(set(mixed[1::2])) > 2


def test_a_draw_depends_on_the_seed_and_the_position():
    assert draws(LOGITS, seed=5) == draws(LOGITS, seed=5)
    assert draws(LOGITS, seed=5) != draws(LOGITS, seed=6)
    assert draws(LOGITS, seed=2**32 - 1) != draws(LOGITS, seed=2**31 - 1)
    assert len(set(draws(LOGITS, position=3))) == 1
    positions = np.arange(ROWS)
    assert draws(LOGITS, position=positions[::-1]) == draws(LOGITS)[::-1]
    assert draws(LOGITS, position=positions + 1)[:-1] == draws(LOGITS)[1:]


def test_more_of_the_vocabulary_kept_changes_only_draws_that_were_cut():
    """Noise belongs to the token: a draw that the cut allows is the same without the cut."""
    allowed = kept(LOGITS, 1.0, 3, 1.0)
    whole, cut = draws(LOGITS), draws(LOGITS, top_k=3)
    same = [token for token in whole if token in allowed]
    assert [c for w, c in zip(whole, cut, strict=True) if w in allowed] == same
    assert set(cut) <= allowed and len(same) < ROWS


def test_rounding_that_changes_the_ranks_does_not_change_the_draws():
    """Programs may round equal logits differently; a draw must not depend on the last bit."""
    rising = np.arange(VOCABULARY) * 1e-6
    assert len(set(draws(rising))) == VOCABULARY
    assert draws(rising) == draws(rising[::-1]) == draws(rising, top_k=VOCABULARY)


def test_each_draw_is_that_of_the_oracle():
    """The likeliest kept token after the token's own noise is added, computed in float64."""
    rows, vocabulary = 256, 40
    random = np.random.RandomState(2)
    logits = (3 * random.standard_normal((rows, vocabulary))).astype(np.float32)
    fields = batch(
        rows,
        temperature=random.choice([0.3, 0.8, 1.0, 1.7], rows),
        top_k=random.choice([0, 1, 2, 5, 20], rows),
        top_p=random.choice([0.3, 0.6, 0.9, 1.0], rows),
        seed=random.randint(0, 2**32, rows, np.uint32),
        position=random.randint(0, 100_000, rows),
    )
    drawn = np.asarray(_sample(jnp.asarray(logits), fields))

    def noise_of(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (vocabulary,))

    noise = np.asarray(jax.vmap(noise_of)(fields.seed, fields.position), np.float64)
    num_close = 0
    for row in range(rows):
        temperature, top_k, top_p = (float(field[row]) for field in fields[:3])
        # The float32 sum of a nucleus may be on the other side of top_p, unless all is kept.
        off = 1e-5 if top_p < 1 else 0.0
        nuclei = [kept(logits[row], temperature, int(top_k), top_p + by) for by in (-off, off)]
        scores = logits[row].astype(np.float64) / temperature + noise[row]
        scores[[token for token in range(vocabulary) if token not in nuclei[0]]] = -np.inf
        best, second = np.sort(scores)[:-3:-1]
        if nuclei[0] != nuclei[1] or best - second < 1e-4:
            num_close += 1
        else:
            assert drawn[row] == scores.argmax(), row
    assert num_close < rows // 20


def test_tokens_are_drawn_as_often_as_they_are_likely():
    counts: Counter[int] = Counter()
    for seed in range(100):
        counts.update(draws(LOGITS, seed=seed, temperature=0.9))
    total = sum(counts.values())
    probabilities = np.exp(np.array(LOGITS) / 0.9)
    probabilities /= probabilities.sum()
    # Fixed seeds, so a fixed result: within four standard deviations of each frequency.
    for token, probability in enumerate(probabilities):
        spread = np.sqrt(total * probability * (1 - probability))
        assert abs(counts[token] - total * probability) < 4 * spread, token
