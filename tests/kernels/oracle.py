"""Reference attention in float64 numpy, in plain loops, with which the kernels are compared."""

import numpy as np


def attend_one(q, k, v, position, *, sm_scale, soft_cap=None, window=None, sinks=None):
    """Attend with one query token `q` [HQ, D] at `position` over its row's `k`, `v` [S, HKV, D]."""
    num_q_heads, head_dim = q.shape
    group = num_q_heads // k.shape[1]
    first = 0 if window is None else max(0, position - window + 1)
    out, lse = np.zeros((num_q_heads, head_dim)), np.full(num_q_heads, -np.inf)
    if position < 0:
        return out, lse
    for head in range(num_q_heads):
        keys, values = (x[first : position + 1, head // group] for x in (k, v))
        logits = keys @ q[head] * sm_scale
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        denominator = np.exp(logits).sum()
        if sinks is not None:
            denominator += np.exp(np.float64(sinks[head]))
        out[head] = np.exp(logits) @ values / denominator
        lse[head] = np.log(denominator)
    return out, lse


def row_tokens(pool, block_table, length):
    """The first `length` tokens of a row, [length, HKV, D] float64, read token by token."""
    block_size = pool.shape[2]
    tokens = [pool[block_table[p // block_size], :, p % block_size] for p in range(length)]
    return np.array(tokens, np.float64).reshape(length, pool.shape[1], pool.shape[3])


def extend(q, k_blocks, v_blocks, block_tables, kv_lengths, q_lengths, q_starts, **options):
    """Reference of `paged_extend`: (out [T, HQ, D], lse [T, HQ]), both float64."""
    q = np.asarray(q, np.float64)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, (kv_length, q_length, start) in enumerate(
        zip(kv_lengths, q_lengths, q_starts, strict=True)
    ):
        if q_length == 0:
            continue
        k, v = (row_tokens(x, block_tables[row], kv_length) for x in (k_blocks, v_blocks))
        for i in range(q_length):
            position = kv_length - q_length + i
            out[start + i], lse[start + i] = attend_one(q[start + i], k, v, position, **options)
    return out, lse


def decode(q, k_blocks, v_blocks, block_tables, lengths, **options):
    """Reference of `paged_decode`: one query per row, none if the length is 0."""
    ones = [int(length > 0) for length in lengths]
    return extend(
        q, k_blocks, v_blocks, block_tables, lengths, ones, range(len(lengths)), **options
    )
