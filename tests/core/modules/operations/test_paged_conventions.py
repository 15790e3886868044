"""One convention for all operations over pages: tables in rows, idle sequences, rows and slots that nobody owns."""

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from jax.sharding import PartitionSpec as P
from paged_calls import PACKED, Paged

import ejkernel.modules as ej

BATCH = paged_loop.make((17, 6, 1), (5, 1, 1))


def latent(tables):
    nope, rope, latents, keys = (jnp.ones(shape) for shape in ((2, 4, 64), (2, 4, 16), (2, 64), (2, 16)))
    cache = jax.random.normal(jax.random.key(0), (8, 16, 1, 256))
    batch = (jnp.array([20, 3]), tables, jnp.array([0, 1, 2]), jnp.array([0, 0, 2]))
    return ej.multi_latent_ragged_page_attention(nope, rope, latents, keys, cache, *batch)


def test_tables_of_version_3_and_of_latent_caches_may_have_rows():
    arguments = paged_calls.arguments("ragged_page_attention_v3", Paged(BATCH))
    flat = arguments[5]
    for tables in (flat, flat.reshape(3, -1)):
        arguments[5] = tables
        output, _ = ej.ragged_page_attention_v3(*arguments, softmax_scale=None)
        np.testing.assert_allclose(output, paged_loop.packed(BATCH), rtol=1e-4, atol=1e-5)
    table = jnp.array([[3, 5], [1, 9]])
    np.testing.assert_array_equal(latent(table)[0], latent(table.reshape(-1))[0])


@pytest.mark.parametrize("shape", [(2, 6), (7,), (2, 3, 1)])
def test_tables_of_another_number_of_sequences_are_wrong(shape):
    arguments = paged_calls.arguments("ragged_page_attention_v3", Paged(BATCH))
    arguments[5] = jnp.zeros(shape, jnp.int32)
    with pytest.raises(ValueError, match="block_tables: got shape"):
        ej.ragged_page_attention_v3(*arguments)


def test_tables_in_rows_are_split_with_the_heads():
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    arguments = paged_calls.arguments("ragged_page_attention_v3", Paged(BATCH))
    arguments[5] = arguments[5].reshape(3, -1)
    heads = P(None, "tp")
    specs = (heads, heads, heads, P(None, None, "tp"), P(), P(None, None), P(), P())
    placed = {"mesh": mesh, "in_specs": specs, "out_specs": heads}
    output, _ = jax.jit(lambda *x: ej.ragged_page_attention_v3(*x, softmax_scale=None, **placed))(*arguments)
    np.testing.assert_allclose(output, paged_loop.packed(BATCH), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", PACKED)
def test_idle_sequences_and_rows_behind_the_last_change_nothing(op):
    """Two idle sequences behind the live ones, with garbage tables, and three rows that belong to nobody."""
    paged = Paged(BATCH)
    arguments = dict(enumerate(paged_calls.arguments(op, paged)))
    rows, sequences = len(paged.queries), len(paged.lens)
    for n, x in arguments.items():
        name = "rows" if x.ndim == 3 and x.shape[0] == rows else "sequences"
        if name == "rows":
            arguments[n] = jnp.concatenate([x, jnp.full((3, *x.shape[1:]), jnp.nan, x.dtype)])
        elif x.ndim == 1 and x.shape == (sequences,) and np.array_equal(x, paged.lens):
            arguments[n] = jnp.append(x, jnp.zeros(2, x.dtype))
        elif x.ndim == 1 and x.shape == (sequences + 1,):
            arguments[n] = jnp.append(x, jnp.full(2, rows, x.dtype))
        elif np.array_equal(np.ravel(x), np.ravel(paged.tables())):
            garbage = jnp.full((2, paged.tables().shape[1]), 10**6, x.dtype)
            arguments[n] = jnp.concatenate([x.reshape(sequences, -1), garbage])
    keywords = {"softmax_scale": None} if op == "ragged_page_attention_v3" else {}
    found = getattr(ej, op)(*arguments.values(), **keywords)
    output = found[0] if isinstance(found, tuple) else found
    np.testing.assert_allclose(output[:rows], paged_loop.packed(BATCH), rtol=1e-4, atol=1e-5)
    assert not np.any(output[rows:])
