"""`top_logprobs`: ranks and values of logits that tie, which those of a model seldom do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.scheduler.engine.logprobs import top_logprobs
from radixkv.scheduler.request import MAX_LOGPROBS

ROWS = 200


@pytest.mark.parametrize("vocabulary", [1, 3, MAX_LOGPROBS, MAX_LOGPROBS + 5])
def test_each_row_is_that_of_the_oracle(vocabulary: int) -> None:
    """Few values, so most tokens tie: a rank counts only the tokens that are more likely."""
    rng = np.random.default_rng(0)
    rows = rng.choice([-2.0, 0.0, 1.0, 5.0], size=(ROWS, vocabulary))
    tokens = rng.integers(vocabulary, size=ROWS)
    logits_of_rows, of_tokens = jnp.asarray(rows, jnp.float32), jnp.asarray(tokens, jnp.int32)
    fields = jax.jit(top_logprobs)(logits_of_rows, of_tokens)
    for logits, token, *found in zip(rows, tokens, *map(np.asarray, fields), strict=True):
        logprob, rank, values, ids = found
        exact = logits - np.log(np.exp(logits).sum())
        # Of equals the lowest token comes first, as greedy takes it.
        best = np.argsort(-logits, kind="stable")[:MAX_LOGPROBS]
        assert rank == 1 + (logits > logits[token]).sum()
        np.testing.assert_allclose(logprob, exact[token], atol=1e-5)
        np.testing.assert_allclose(values, exact[best], atol=1e-5)
        assert ids.tolist() == best.tolist()
