"""The axes of a cache of pages: taken from the shape where it allows one order, an error where it allows several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import page_attention, prefill_page_attention

LENS, TABLES = jnp.array([17, 5]), jnp.array([[1, 3, 0], [4, 0, 0]])


def cache_of(pages, slots, heads, size=64):
    return jax.random.normal(jax.random.key(1), (pages, slots, heads, size))


def transposed(cache, layout):
    return cache.transpose(["pshd".index(axis) for axis in layout])


def test_a_shape_of_several_layouts_is_an_error_that_lists_them():
    query, pages = jnp.zeros((2, 32, 64)), jnp.zeros((8, 8, 16, 64))
    wants = (
        r"kv_layout: got None with key_cache of shape \(8, 8, 16, 64\), which may be "
        r"\[P, S, Hk, D\] with 16 KV heads \('pshd'\) or \[P, Hk, S, D\] with 8 KV heads \('phsd'\) or "
        r"\[Hk, P, S, D\] with 8 KV heads \('hpsd'\); say which it is"
    )
    for call in (page_attention, jax.jit(page_attention)):
        with pytest.raises(ValueError, match=wants):
            call(query, pages, pages, jnp.array([9, 4]), jnp.zeros((2, 2), jnp.int32))
    with pytest.raises(ValueError, match=wants):
        prefill_page_attention(query, pages, pages, jnp.array([9]), jnp.zeros(2, jnp.int32))


@pytest.mark.parametrize("layout", ["pshd", "phsd", "hpsd"])
def test_the_only_layout_that_fits_is_taken(layout):
    # 7 pages of 5 slots: neither divides the 8 heads of the queries.
    query, cache = jax.random.normal(jax.random.key(0), (2, 8, 64)), cache_of(7, 5, 2)
    arrays = (transposed(cache, layout),) * 2
    tables = jnp.concatenate([TABLES, TABLES[:, :1]], axis=1)
    got = page_attention(query, *arrays, LENS, tables)
    np.testing.assert_array_equal(got, page_attention(query, *arrays, LENS, tables, kv_layout=layout))
    np.testing.assert_allclose(got, page_attention(query, cache, cache, LENS, tables, kv_layout="pshd"), rtol=1e-5)
    chunk = prefill_page_attention(query, *arrays, LENS[:1], tables[0])
    np.testing.assert_array_equal(chunk, prefill_page_attention(query, *arrays, LENS[:1], tables[0], kv_layout=layout))


def test_a_shape_of_no_layout_names_the_usual_one():
    query, cache = jnp.zeros((2, 8, 64)), jnp.zeros((7, 5, 3, 64))
    with pytest.raises(ValueError, match=r"3 heads \(as kv_layout='pshd' says\), wants a divisor of the 8"):
        page_attention(query, cache, cache, LENS, TABLES)
    with pytest.raises(ValueError, match=r"7 heads \(as kv_layout='hpsd' says\), wants a divisor of the 8"):
        prefill_page_attention(query, cache, cache, LENS[:1], TABLES[0])
