"""What `explain` says of windows, alignment and scales, and bottom-right alignment by `MaskInfo.decode`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    ragged_page_attention_v3,
    scaled_dot_product_attention,
    unified_attention,
)
from ejkernel.types import MaskInfo

QUERY = jnp.ones((1, 8, 2, 16))
CACHE = jnp.ones((1, 256, 2, 16))


def sentences(*args, **kwargs) -> str:
    """What `explain` says in addition to its table."""
    decision = ejkernel.explain(*args, **kwargs)
    assert all(sentence in str(decision) for sentence in decision.conventions)
    return "\n".join(decision.conventions)


@pytest.mark.parametrize(
    ("window", "causal", "words"),
    [
        (4, True, "sliding_window=(4, 4) with causal=True keeps 5 keys: 4 to the left and its own"),
        (4, False, "sliding_window=(4, 4) keeps 9 keys: 4 to the left, its own and 4 to the right"),
        ((0, 0), False, "sliding_window=(0, 0) keeps 1 key: its own"),
        ((None, 3), False, "sliding_window=(None, 3) keeps keys: all to the left, its own and 3 to the right"),
    ],
)
@pytest.mark.parametrize("operation", [flash_attention, scaled_dot_product_attention])
def test_explain_says_how_many_keys_an_int_window_keeps(operation, window, causal: bool, words: str) -> None:
    assert sentences(operation, QUERY, QUERY, QUERY, sliding_window=window, causal=causal) == words


def test_explain_says_how_causal_aligns_queries_and_keys() -> None:
    words = sentences(flash_attention, QUERY, CACHE, CACHE, causal=True)
    assert words.startswith("causal=True is top-left: query 0 sees key 0 of 256; ")
    assert words.endswith("pass mask_info=MaskInfo.decode(8, 256)")
    swapped = [x.swapaxes(1, 2) for x in (QUERY, CACHE, CACHE)]
    assert sentences(blocksparse_attention, *swapped) == words


def test_explain_mentions_no_convention_where_libraries_agree() -> None:
    assert not sentences(flash_attention, QUERY, QUERY, QUERY, causal=True)
    assert not sentences(flash_attention, QUERY, CACHE, CACHE)
    assert not sentences(flash_attention, QUERY, CACHE, CACHE, causal=True, mask_info=MaskInfo.decode(8, 256))


def test_pages_count_the_own_key_of_a_query() -> None:
    pages, ints = jnp.ones((4, 16, 2, 16)), jnp.array([3])
    call = QUERY[0, :1], pages, pages, ints, jnp.zeros((1, 1), jnp.int32), jnp.array([0, 1])
    words = "sliding_window=(4, 0) keeps 5 keys: 4 to the left and its own"
    assert sentences(unified_attention, *call, sliding_window=5) == words


def test_explain_mentions_a_default_scale_of_one() -> None:
    row, cache = jnp.ones((1, 2, 128)), jnp.ones((4, 16, 4, 1, 128))
    call = row, row, row, cache, jnp.array([3]), jnp.zeros((1, 1), jnp.int32), jnp.array([0, 1]), jnp.array([0, 0, 1])
    assert "softmax_scale=1.0, the default here, leaves scores as they are" in sentences(
        ragged_page_attention_v3, *call
    )
    assert not sentences(ragged_page_attention_v3, *call, softmax_scale=None)


def test_decode_aligns_the_last_query_with_the_last_key() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 3, 2, 8)), jax.random.normal(jax.random.key(1), (2, 7, 2, 8))
    got = flash_attention(query, key, key, causal=True, mask_info=MaskInfo.decode(3, 7))
    mask = np.arange(7) <= np.arange(3)[:, None] + 4
    want = flash_attention(query, key, key, attention_mask=mask[None, None])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_decode_with_lengths_reads_a_cache_up_to_each_row(causal: bool) -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 2, 2, 8)), jax.random.normal(jax.random.key(1), (2, 7, 2, 8))
    lengths = jnp.array([4, 7])
    got = jax.jit(lambda n: flash_attention(query, key, key, causal=causal, mask_info=MaskInfo.decode(2, 7, n)))(
        lengths
    )
    for row, length in enumerate((4, 7)):
        one = (x[row : row + 1] for x in (query, key[:, :length], key[:, :length]))
        want = flash_attention(*one, causal=causal, mask_info=MaskInfo.decode(2, length))
        np.testing.assert_allclose(got[row : row + 1], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [((0, 4), "queries must be at least 1"), ((1, 2.0), "keys must be a Python int"), ((1, 4, jnp.ones(2)), "kv_lens")],
)
def test_decode_refuses_what_is_no_number_of_tokens(given: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskInfo.decode(*given)
