"""Masks of block-sparse attention: which pairs they let attend, what they make of tiles, and that they are values."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types.sparse_masks import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    NumpyMask,
    TileSpans,
)

SHAPE = (13, 17)
ARRAY = np.random.default_rng(0).random(SHAPE) < 0.3

# A mask, and the same said of one pair.
MASKS = {
    "full": (FullMask(SHAPE), lambda q, k: True),
    "causal": (CausalMask(SHAPE), lambda q, k: k <= q),
    "causal, moved": (CausalMask(SHAPE, 4), lambda q, k: k <= q + 4),
    "causal, moved back": (CausalMask(SHAPE, offset=-3), lambda q, k: k <= q - 3),
    "local": (LocalMask(SHAPE, (2, 3)), lambda q, k: q - 2 <= k <= q + 3),
    "local, open": (LocalMask(SHAPE, (None, 1)), lambda q, k: k <= q + 1),
    "local, open, moved": (LocalMask(SHAPE, (2, None), 5), lambda q, k: k >= q + 3),
    "chunked": (ChunkedCausalMask(SHAPE, 5), lambda q, k: k <= q and q // 5 == k // 5),
    "array": (NumpyMask(ARRAY), lambda q, k: ARRAY[q, k]),
    "both": (CausalMask(SHAPE) & LocalMask(SHAPE, (4, 4)), lambda q, k: q - 4 <= k <= q),
    "either": (
        ChunkedCausalMask(SHAPE, 4) | NumpyMask(ARRAY),
        lambda q, k: (k <= q and q // 4 == k // 4) or ARRAY[q, k],
    ),
}


def pairs(said, shape=SHAPE):
    return np.array([[bool(said(q, k)) for k in range(shape[1])] for q in range(shape[0])])


def spans(length, block):
    low = np.minimum(np.arange(0, length, block), length - block)
    return TileSpans(low, low + block - 1)


@pytest.mark.parametrize("name", MASKS)
def test_pairs_are_those_of_the_rule_in_the_whole_and_in_tiles(name):
    mask, said = MASKS[name]
    np.testing.assert_array_equal(mask.allowed(0, 0, SHAPE), pairs(said))
    np.testing.assert_array_equal(mask.allowed(6, 9, (4, 8)), pairs(said)[6:10, 9:17])


# Combinations and single masks for which what is said of tiles is exact.
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [1, 4, 5])
def test_tiles_without_pairs_are_known_and_full_ones_too(name, block):
    mask, said = MASKS[name]
    queries, keys = spans(SHAPE[0], block), spans(SHAPE[1], block)
    some, every = mask.tiles(queries, keys)
    whole = pairs(said)
    for row, column in np.ndindex(some.shape):
        tile = whole[queries.low[row] : queries.high[row] + 1, keys.low[column] : keys.high[column] + 1]
        assert some[row, column] == tile.any()
        assert every[row, column] <= tile.all()
        assert name == "either" or every[row, column] == tile.all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    chunk=st.integers(1, 5),
    window=st.tuples(st.one_of(st.none(), st.integers(0, 5)), st.one_of(st.none(), st.integers(0, 5))),
    offset=st.integers(-4, 4),
    both=st.booleans(),
    block=st.integers(1, 4),
)
def test_no_combination_leaves_out_a_pair_or_lets_one_in(shape, chunk, window, offset, both, block):
    one, other = ChunkedCausalMask(shape, chunk), LocalMask(shape, window, offset)
    mask = one & other if both else one | other
    parts = [np.asarray(m.allowed(0, 0, shape)) for m in (one, other)]
    whole = parts[0] & parts[1] if both else parts[0] | parts[1]
    np.testing.assert_array_equal(mask.allowed(0, 0, shape), whole)
    queries, keys = (spans(n, min(block, n)) for n in shape)
    some, every = mask.tiles(queries, keys)
    for row, column in np.ndindex(some.shape):
        tile = whole[queries.low[row] : queries.high[row] + 1, keys.low[column] : keys.high[column] + 1]
        assert some[row, column] >= tile.any()
        assert every[row, column] <= tile.all()


def test_equal_masks_are_equal_and_hash_alike():
    for name, (mask, _) in MASKS.items():
        for other, (another, _) in MASKS.items():
            assert (mask == another) == (name == other)
            assert name != other or hash(mask) == hash(another)
    assert NumpyMask(ARRAY) == NumpyMask(ARRAY.astype(int) * 3)
    assert hash(NumpyMask(ARRAY)) == hash(NumpyMask(ARRAY.copy()))
    assert CausalMask(SHAPE, 0, 8) == CausalMask(list(SHAPE))  # shards find their part by themselves
    assert len(repr(NumpyMask(np.ones((500, 500))))) < 100


def test_an_array_that_changes_later_changes_no_mask():
    array = np.zeros(SHAPE, bool)
    mask = NumpyMask(array)
    array[:] = True
    assert not np.asarray(mask.allowed(0, 0, SHAPE)).any()


def test_masks_of_heads_combine_head_by_head():
    causal, local = MASKS["causal"][0], MASKS["local"][0]
    heads = MultiHeadMask([causal, local, causal])
    assert (heads.heads, heads.distinct_masks, heads.mask_index_by_head) == (3, (causal, local), (0, 1, 0))
    assert (heads & local).of_head(2) == causal & local
    assert (heads | heads).heads == 3
    some, every = heads.tiles(spans(13, 4), spans(17, 4))
    parts = [mask.tiles(spans(13, 4), spans(17, 4)) for mask in (causal, local)]
    np.testing.assert_array_equal(some, parts[0].any_allowed | parts[1].any_allowed)
    np.testing.assert_array_equal(every, parts[0].all_allowed & parts[1].all_allowed)


def test_sorting_the_tiles_of_a_million_tokens_holds_no_matrix_of_pairs():
    shape = (2**20, 2**20)
    mask = (CausalMask(shape) & LocalMask(shape, (4096, 0))) | ChunkedCausalMask(shape, 8192)
    sides = spans(2**20, 1024), spans(2**20, 1024)
    tracemalloc.start()
    some, _ = mask.tiles(*sides)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**28  # of 2**40 pairs
    assert some.sum() < 12 * 1024


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CausalMask((4,)), r"shape: got \(4,\), wants \(queries, keys\)"),
        (lambda: FullMask((4, 0)), r"shape: got \(4, 0\), wants"),
        (lambda: CausalMask(SHAPE, 1.5), "offset: got 1.5, wants an int"),
        (lambda: LocalMask(SHAPE, 3), r"window_size: got 3, wants \(left, right\)"),
        (lambda: LocalMask(SHAPE, (-1, 2)), "window_size: got -1, wants an int of at least 0"),
        (lambda: ChunkedCausalMask(SHAPE, 0), "chunk_size: got 0, wants an int of at least 1"),
        (lambda: NumpyMask(np.ones(4)), r"shape: got \(4,\), wants"),
        (lambda: MultiHeadMask(()), r"masks: got \(\), wants at least one mask"),
        (lambda: MultiHeadMask([MultiHeadMask([FullMask(SHAPE)])]), "none of them a MultiHeadMask"),
        (
            lambda: CausalMask(SHAPE) & CausalMask((4, 4)),
            r"got shapes \(13, 17\) and \(4, 4\), wants equal shapes",
        ),
        (lambda: MultiHeadMask([FullMask(SHAPE), FullMask((4, 4))]), "wants equal shapes"),
        (lambda: MultiHeadMask([FullMask(SHAPE)] * 2) | MultiHeadMask([FullMask(SHAPE)]), "got 2 and 1 heads"),
        (lambda: MultiHeadMask([FullMask(SHAPE)]).allowed(0, 0, SHAPE), "call the mask of one head"),
    ],
)
def test_wrong_masks_are_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_masks_combine_with_masks_only():
    with pytest.raises(TypeError):
        CausalMask(SHAPE) & ARRAY.tolist()
