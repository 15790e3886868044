"""`mask_mod` as a window and segment ids, against all of its pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.families.tiled_attention.mask_terms import mask_function_as_arguments
from ejkernel.types.pair_functions import mask_function

DOCUMENTS = jnp.array([[-1] * 3 + [0] * 17 + [1] * 20, [-(2**31)] * 5 + [1] * 30 + [2] * 5], jnp.int32)


def as_arguments(mask, **fields):
    query, key = (jax.ShapeDtypeStruct((2, n, 2, 8), jnp.float32) for n in (40, 30))
    function = mask_function("mask_mod", mask)
    record = TiledAttention(query=query, key=key, value=key, softmax_scale=1.0, mask_mod=function, **fields)
    return mask_function_as_arguments(record)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (k <= q),
        lambda b, h, q, k: (DOCUMENTS[b, k] >= 0) & (q - k < 9) & (DOCUMENTS[b, k] == DOCUMENTS[b, q]) & (q != 3),
        lambda b, h, q, k: (k <= q) & (DOCUMENTS[0, k] >= 0) & (b != 1),
        lambda b, h, q, k: (jnp.abs(q + 1 - k) <= 9) & (DOCUMENTS[b, q] == DOCUMENTS[b, k]),
        lambda b, h, q, k: (jnp.abs(k - q - 2) < 9) & (-k > -q - 4) & (2 + q < k + 7) & (DOCUMENTS[b, q] != 1),
    ],
)
def test_documents_padding_and_windows_are_found(mask):
    found = as_arguments(mask)
    assert found.mask_mod is None
    left, right = causal_window_bounds(found)
    _, _, q, k = index = np.ogrid[:2, :2, :40, :30]
    q_ids, k_ids = (np.asarray(x) for x in (found.q_segment_ids, found.kv_segment_ids))
    pairs = ((q_ids[:, :, None] == k_ids[:, None]) & (q_ids >= 0)[:, :, None])[:, None]
    pairs = pairs & (k - q >= (-40 if left is None else -left)) & (k - q <= (40 if right is None else right))
    expected = np.asarray(jnp.vectorize(mask)(*index))
    np.testing.assert_array_equal(np.broadcast_to(pairs, expected.shape), expected)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) | (k <= q),
        lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (h > 0),
        lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (DOCUMENTS[0, q] == DOCUMENTS[0, k]),
        lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (k <= q + DOCUMENTS[0, 0]),
        lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (k <= 2 * q),
        lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (k + q <= 30) & (jnp.abs(q - k) < k),
    ],
)
def test_other_functions_are_kept(mask):
    assert as_arguments(mask).mask_mod is not None


def test_functions_are_kept_where_the_call_has_segments():
    ids = {"q_segment_ids": jnp.zeros((2, 40), jnp.int32), "kv_segment_ids": jnp.zeros((2, 30), jnp.int32)}
    assert as_arguments(lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k], **ids).mask_mod is not None
