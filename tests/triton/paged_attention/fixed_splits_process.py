"""Rows have the same bits however splits are shared, and right values; run by `test_paged_attention.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.ops.device import current_device
from ejkernel_triton.paged_attention import config
from ejkernel_triton.paged_attention.fixed_splits import config as fixed_splits
from ejkernel_triton.paged_attention.forward import forward

LENGTHS, SLOTS, HEADS, SIZE = (110, 1, 70), 8, (4, 2), 16
WINDOW_AND_CAP = {
    "sliding_window": (45, 0),
    "logits_soft_cap": 3.0,
    "softmax_aux": jnp.array([0.5, -1.0, 2.0, 0.0]),
}


def tokens(seed):
    """Queries, keys and values of all sequences."""
    rng = np.random.default_rng(seed)
    return [
        tuple(rng.normal(size=(n, h, SIZE)).astype(np.float32) for h in (HEADS[0], *HEADS[1:] * 2)) for n in LENGTHS
    ]


def call(sequences, parts, **fields):
    """The record of parts (sequence, its length in this call, query rows), whose pages are in a random order."""
    rng = np.random.default_rng(len(parts))
    counts = [-(-length // SLOTS) for _, length, _ in parts]
    order, tables = rng.permutation(sum(counts)), np.full((len(parts), max(counts)), -1, np.int32)
    pages = np.full((2, sum(counts) * SLOTS, HEADS[1], SIZE), np.nan, np.float32)
    for n, (sequence, length, _) in enumerate(parts):
        own = order[sum(counts[:n]) : sum(counts[: n + 1])]
        tables[n, : counts[n]] = own
        slots = (own[:, None] * SLOTS + np.arange(SLOTS)).ravel()[:length]
        for array, values in zip(pages, sequences[sequence][1:], strict=True):
            array[slots] = values[:length]
    keys, values = pages.reshape(2, -1, SLOTS, HEADS[1], SIZE)
    return PagedAttention(
        query=jnp.asarray(np.concatenate([sequences[n][0][length - rows : length] for n, length, rows in parts])),
        key_pages=jnp.asarray(keys),
        value_pages=jnp.asarray(values),
        block_tables=jnp.asarray(tables),
        kv_lens=jnp.asarray([length for _, length, _ in parts], jnp.int32),
        query_start=jnp.asarray(np.cumsum([0, *(rows for *_, rows in parts)]), jnp.int32),
        softmax_scale=0.25,
        kv_layout="pshd",
        kv_heads=None,
        **fields,
    )


def rows_of(parts, output):
    """The result of each row, by sequence and position."""
    names = [(n, length - rows + row) for n, length, rows in parts for row in range(rows)]
    return {name: x.tobytes() for name, x in zip(names, np.asarray(output), strict=True)}


def check(fields):
    sequences, seen = tokens(0), {}
    calls = (
        ([(0, 110, 6), (1, 1, 1), (2, 70, 2)], {}),  # three programs
        ([(2, 70, 1), (0, 110, 1)], {"num_programs": 11}),  # each split of an item in another program
        ([(0, 109, 5)], {"cuts_items": False}),
        ([(0, 110, 2)], {"block_q": 1}),
    )
    for parts, changes in calls:
        record = call(sequences, parts, **fields)
        params = fixed_splits.batch_invariant(record, current_device(), "forward")
        fixed_splits.MAX_SLOT_BYTES = 2**28 if changes.pop("cuts_items", True) else 0
        (output, lse), _ = forward(record, dataclasses.replace(params, **changes))
        if not seen:
            outside = forward(record, config.heuristic(record, current_device(), "forward"))[0]
            for got, want in zip((output, lse), outside, strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
        both = rows_of(parts, jnp.concatenate((output, lse[..., None]), axis=-1))
        assert all(seen.setdefault(row, bits) == bits for row, bits in both.items()), (fields, parts, changes)


def main():
    jax.config.update("jax_platforms", "cpu")
    check({})
    check(WINDOW_AND_CAP)


if __name__ == "__main__":
    main()
