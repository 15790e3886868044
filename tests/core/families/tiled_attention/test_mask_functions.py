"""What `mask_mod` tells kernels before they run, against all of its pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.families.tiled_attention.block_maps import block_lists, block_map
from ejkernel.families.tiled_attention.mask_bounds import bounds_of_tiles
from ejkernel.families.tiled_attention.mask_functions import mask_function_as_window
from ejkernel.types.pair_functions import mask_function

INT32_MAX = np.int32(2**31 - 1)
DOCUMENTS = jnp.array([[0] * 20 + [1] * 20, [0] * 5 + [1] * 30 + [2] * 5])


def record(mask, keys=30, **fields):
    query, key = (jax.ShapeDtypeStruct((2, n, 2, 8), jnp.float32) for n in (40, keys))
    function = mask_function("mask_mod", mask)
    return TiledAttention(query=query, key=key, value=key, softmax_scale=1.0, mask_mod=function, **fields)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (lambda b, h, q, k: q - k >= 0, (None, 0)),
        (lambda b, h, q, k: (k < q + 3) & ~(q - k > 5), (5, 2)),
        (lambda b, h, q, k: k >= q + 3, (-3, None)),
        (lambda b, h, q, k: q >= 0, (None, None)),
        (lambda b, h, q, k: (k <= q) | (k < 3), None),
        (lambda b, h, q, k: (k <= q) & (q != 7), None),
        (lambda b, h, q, k: (k <= q) & (k != q - 4), None),
        (lambda b, h, q, k: q < 0, None),
        (lambda b, h, q, k: k <= q + h, None),
        (lambda b, h, q, k: k <= q + DOCUMENTS[0, 0], None),
    ],
)
def test_masks_that_are_windows_are_found(mask, window):
    found = mask_function_as_window(record(mask))
    assert (found.mask_mod is None) == (window is not None)
    assert causal_window_bounds(found) == (window or (None, None))


def test_the_window_of_a_function_is_cut_by_the_calls():
    found = mask_function_as_window(record(lambda b, h, q, k: q - k <= 9, causal=True, sliding_window=(5, 5)))
    assert causal_window_bounds(found) == (5, 0)


@pytest.mark.parametrize("origin", [None, (0, 1, 0, 2)])
@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (k <= q),
        lambda b, h, q, k: (k < 8 * h) | (k <= q),
        lambda b, h, q, k: (jnp.abs(k - q - DOCUMENTS[b, q]) <= 9) != (jnp.where(k == q, h, DOCUMENTS[1, k]) > 0),
        lambda b, h, q, k: jnp.clip(-jnp.maximum(q, k), -20, 9) + INT32_MAX * DOCUMENTS[b, q] < 0,
        lambda b, h, q, k: ~(jnp.minimum(k, 30) - DOCUMENTS[b, k] * INT32_MAX >= q) | ((q - k) % 3 == DOCUMENTS[0, 0]),
        lambda b, h, q, k: DOCUMENTS[b, k] != 1,
    ],
)
def test_tiles_of_a_mask_function_match_its_pairs(mask, origin):
    fields = {} if origin is None else {"dropout_origin": jnp.array(origin, jnp.int32)}
    blocks = block_map(record(mask, **fields), 16, 8)
    index = np.ogrid[:2, :2, :40, :30]
    pairs = np.asarray(jnp.vectorize(mask)(*(x + n for x, n in zip(index, origin or (0,) * 4, strict=True))))
    pairs = np.pad(pairs, ((0, 0), (0, 0), (0, 8), (0, 2)))
    tiles = pairs.reshape(2, 2, 3, 16, 4, 8)
    some, every = tiles.any((3, 5)), tiles.all((3, 5))
    if isinstance(blocks.any_allowed, np.ndarray):
        np.testing.assert_array_equal(np.broadcast_to(blocks.any_allowed, some.shape), some)
        np.testing.assert_array_equal(np.broadcast_to(blocks.all_allowed, some.shape), every)
    else:  # bounds: a tile may be said to be partial that is not
        assert not np.any(some & ~blocks.any_allowed)
        assert not np.any(blocks.all_allowed & ~every)
    assert isinstance(blocks.any_allowed, np.ndarray) == (origin is None and blocks.any_allowed.shape[0] == 1)


def test_bounds_of_documents_are_sharp():
    mask = record(lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (k <= q), keys=40)
    blocks = block_map(mask, 8, 8)
    assert not isinstance(blocks.any_allowed, np.ndarray)
    assert blocks.any_allowed.shape[1] == 1
    np.testing.assert_array_equal(blocks.any_allowed.sum((1, 2, 3)), [11, 15])
    np.testing.assert_array_equal(blocks.all_allowed.sum((1, 2, 3)), [2, 3])


def test_bounds_of_plain_indices_and_of_arrays_are_sharp():
    lengths = jnp.array([100, 300])
    function = mask_function("mask_mod", lambda b, h, q, k: (q >= k) | (k < lengths[b]))
    some, every = bounds_of_tiles(function, (2, 1, 512, 512), (64, 64), None)
    query, key = np.arange(512)[:, None], np.arange(512)
    pairs = (query >= key) | (key < np.asarray(lengths)[:, None, None])
    tiles = pairs.reshape(2, 1, 8, 64, 8, 64)
    np.testing.assert_array_equal(some, tiles.any((3, 5)))
    np.testing.assert_array_equal(every, tiles.all((3, 5)))


def test_lists_of_traced_tiles_have_full_tiles_first():
    mask = record(lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (k <= q), keys=40)
    blocks = block_map(mask, 8, 8)
    lists = block_lists(blocks)
    rank = np.where(blocks.any_allowed & blocks.all_allowed, 0, np.where(blocks.any_allowed, 1, 2))
    np.testing.assert_array_equal(lists.blocks, np.argsort(rank, axis=-1, kind="stable"))
    np.testing.assert_array_equal(lists.full, (rank == 0).sum(-1))
