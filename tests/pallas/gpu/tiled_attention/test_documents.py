"""Lists of key blocks that begin with documents, against every query looked at one by one."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import pad_segment_ids
from ejkernel_pallas.gpu.tiled_attention.plan.documents import are_sorted, document_operands, key_order
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec

BLOCK_Q, BLOCK_KV = 16, 8
MASKS = ({}, {"causal": True}, {"sliding_window": (11, 0)}, {"sliding_window": (5, 9)})


def operands(q_ids, k_ids, **mask):
    """The kernel's operands for packed rows, their spec, and the order of keys in which they are."""
    q, k = (jax.ShapeDtypeStruct((*ids.shape, 1, 64), jnp.bfloat16) for ids in (q_ids, k_ids))
    q_ids, k_ids = (jnp.asarray(ids, jnp.int32) for ids in (q_ids, k_ids))
    record = TiledAttention(
        query=q, key=k, value=k, softmax_scale=1.0, q_segment_ids=q_ids, kv_segment_ids=k_ids, **mask
    )
    spec = dataclasses.replace(make_spec(record), is_batch_invariant=True)
    assert spec.lists_first_keys
    q_ids, k_ids = pad_segment_ids(q_ids, BLOCK_Q, -1), pad_segment_ids(k_ids, BLOCK_KV, -2)
    order = None
    if not are_sorted((q_ids, k_ids), BLOCK_Q, BLOCK_KV):
        order = key_order(k_ids)
        k_ids = jnp.take_along_axis(k_ids, order, axis=1)
    arrays = jax.jit(document_operands, static_argnums=(0, 2, 3))(spec, (q_ids, k_ids), BLOCK_Q, BLOCK_KV, order)
    return {name: np.asarray(x) for name, x in arrays.items()}, spec, order


def attended(spec, q_ids, k_ids):
    """Which pairs of a row attend."""
    i, j = np.arange(len(q_ids))[:, None], np.arange(len(k_ids))
    pairs = (q_ids[:, None] == k_ids) & (k_ids >= 0)
    pairs &= True if spec.left_window is None else j >= i - spec.left_window
    return pairs & (True if spec.right_window is None else j <= i + spec.right_window)


def random_ids(rng, tokens, largest=40):
    """Sorted ids, with padding at the end of some rows and before the others."""
    lengths = rng.integers(1, largest, tokens)
    ids = np.repeat(np.arange(tokens), lengths)[:tokens]
    padding = int(rng.integers(0, 20))
    if padding:
        ids[-padding:] = -1
    return ids if rng.integers(0, 2) else np.roll(ids, padding)


def check_row(planned, row, q_ids, k_ids):
    """Checks ranges, and that the blocks of a query are those of its document, in order, each once."""
    arrays, spec, order = planned
    pairs = attended(spec, q_ids, k_ids)
    if order is not None:
        places = np.asarray(order[row, : len(k_ids)])
        pairs, k_ids = pairs[:, places], k_ids[places]
    first, last, first_block = arrays["ranges"][row]
    for i, keys in enumerate(map(np.flatnonzero, pairs)):
        assert (last[i] < first[i]) if not keys.size else (first[i], last[i]) == (keys[0], keys[-1])
    for tile, (start, full_start, full_end, stop) in enumerate(arrays["table"][row]):
        assert start == 0 < stop <= arrays["blocks"].shape[2]
        blocks = arrays["blocks"][row, tile, :stop]
        queries = range(tile * BLOCK_Q, min((tile + 1) * BLOCK_Q, len(q_ids)))
        needed = set()
        for i in queries:
            keys = np.flatnonzero(pairs[i])
            if keys.size:
                document = np.flatnonzero(k_ids == q_ids[i])[0]
                own_blocks = range(document + (keys[0] - document) // BLOCK_KV * BLOCK_KV, keys[-1] + 1, BLOCK_KV)
                needed |= set(own_blocks)
        assert list(blocks) == (sorted(needed) or [0])
        assert 0 <= full_start <= full_end <= stop
        columns = {k: slice(k, k + BLOCK_KV) for k in blocks}
        rows = list(queries) if len(queries) == BLOCK_Q else []
        is_full = [bool(rows) and k + BLOCK_KV <= len(k_ids) and pairs[rows, columns[k]].all() for k in blocks]
        assert is_full == [full_start <= n < full_end for n in range(stop)]
        for i in queries:
            # Blocks of the row's document have each of its keys once; those of earlier documents are masked.
            own_blocks = [k for k in blocks if k >= first_block[i]]
            seen = [key for k in own_blocks for key in range(max(k, first[i]), min(k + BLOCK_KV - 1, last[i]) + 1)]
            assert seen == list(np.flatnonzero(pairs[i]))
        for k in blocks:
            assert arrays["padded"][row, k] or (k_ids[k : k + BLOCK_KV] >= 0).all()


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("lengths", [(100, 100), (37, 90), (90, 37), (128, 128), (1, 1)])
def test_blocks_begin_with_documents(mask, lengths):
    rng = np.random.default_rng(0)
    ids = [random_ids(rng, max(lengths)) for _ in range(5)]
    q_ids, k_ids = (np.stack([row[:n] for row in ids]) for n in lengths)
    planned = operands(q_ids, k_ids, **mask)
    assert planned[2] is None
    for row in range(len(ids)):
        check_row(planned, row, q_ids[row], k_ids[row])


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("unsorted", ["both", "queries"])
def test_keys_of_documents_that_are_not_in_order_are_brought_into_it(unsorted, mask):
    rng = np.random.default_rng(1)
    q_ids = rng.integers(-1, 4, (3, 90))
    k_ids = q_ids if unsorted == "both" else np.stack([random_ids(rng, 90) for _ in range(3)])
    planned = operands(q_ids, k_ids, **mask)
    assert planned[2] is not None
    for row in range(3):
        check_row(planned, row, q_ids[row], k_ids[row])


def test_lists_are_long_enough_for_documents_of_one_token():
    ids = np.arange(64)[None]
    check_row(operands(ids, ids), 0, ids[0], ids[0])


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_blocks_of_a_document_do_not_depend_on_where_it_is(mask):
    """Relative to its first key, alone and after other documents."""

    def operands_of(before, after):
        ids = np.repeat([1, 2, 3], [before, 45, after])
        return operands(*[np.pad(ids, (0, 112 - ids.size), constant_values=-1)[None]] * 2, **mask)[0]

    alone = operands_of(0, 0)
    for before, after in itertools.product((0, 1, 8, 23), (0, 40)):
        arrays = operands_of(before, after)
        for n in range(45):
            tile = (before + n) // BLOCK_Q
            blocks = arrays["blocks"][0, tile][: arrays["table"][0, tile, 3]] - before
            first, last, _ = (x[n] for x in alone["ranges"][0])
            own_blocks = set(range(first // BLOCK_KV * BLOCK_KV, last + 1, BLOCK_KV))
            assert own_blocks <= {k for k in blocks if k % BLOCK_KV == 0}
