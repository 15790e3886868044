"""The operations over paged caches under JAX's transformations: what they compile to, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from jax import export
from paged_calls import DECODING, OPS, QUICK, Paged

import ejkernel.modules as ej
from ejkernel_xla.paged_attention.config import MAX_GATHERED_ELEMENTS

MIXED = paged_loop.make((17, 9, 0, 1), (5, 9, 0, 1))
OTHER = paged_loop.make((12, 11, 3, 0), (4, 8, 3, 0), seed=1)
DECODE = paged_loop.make((17, 9, 0, 1), (1, 1, 1, 1))
CHUNK = paged_loop.make((17,), (5,))
WRITING = {"ragged_page_attention_v3": (3,), "chunked_prefill_paged_decode": (3, 4)}


def call_of(op):
    """The operation on the arrays of a batch, and these arrays."""
    paged = Paged(DECODE if op in DECODING else CHUNK if op == "prefill_page_attention" else MIXED, entries=6)
    options = {"page_size": paged.slots} if op == "decode_attention" else paged_calls.layout(op)
    arrays = [
        jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in paged_calls.arguments(op, paged)
    ]
    return (lambda *args: getattr(ej, op)(*args, **options, platform="xla")), arrays


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6), got, want)


@pytest.mark.parametrize("op", OPS)
def test_vmap_checkpoint_and_export_give_the_same(op):
    call, arrays = call_of(op)
    want = jax.jit(call, compiler_options=QUICK)(*arrays)
    exported = export.deserialize(export.export(jax.jit(call))(*arrays).serialize())
    close(jax.jit(exported.call, compiler_options=QUICK)(*arrays), want)
    # One axis mapped over everything, through a checkpoint; the other entry has its queries doubled.
    stacked = [jnp.stack((x, x)) for x in arrays]
    stacked[0] = stacked[0].at[1].multiply(2.0)
    mapped = jax.jit(jax.vmap(jax.checkpoint(call)), compiler_options=QUICK)(*stacked)
    close(jax.tree.map(lambda x: x[0], mapped), want)
    assert np.abs(jax.tree.leaves(mapped)[0][1] - jax.tree.leaves(want)[0]).max() > 1e-3


def test_vmap_over_lengths_and_tables_alone():
    call, (queries, keys, values, lens, tables, starts) = call_of("unified_attention")
    lengths = jnp.stack((lens, jnp.maximum(lens - 2, 0)))
    several = jnp.stack((tables, tables[::-1]))
    got = jax.jit(jax.vmap(call, (None, None, None, 0, 0, None)), compiler_options=QUICK)(
        queries, keys, values, lengths, several, starts
    )
    one = jax.jit(call, compiler_options=QUICK)
    for n in range(2):
        close(got[n], one(queries, keys, values, lengths[n], several[n], starts))


@pytest.mark.parametrize("op", ["unified_attention", "ragged_page_attention_v2"])
def test_other_lengths_tables_and_starts_compile_nothing_new(op):
    call = jax.jit(getattr(ej, op))
    for batch in (MIXED, OTHER):
        paged = Paged(batch, entries=6)
        args = paged_calls.arguments(op, paged)
        pages = slice(1, 3) if op.startswith("unified") else slice(1, 2)
        args[pages] = [jnp.pad(x, ((0, 12 - len(x)), *((0, 0),) * 3)) for x in args[pages]]
        close(call(*args), paged_loop.packed(batch))
    assert call._cache_size() == 1


@pytest.mark.parametrize("op", OPS)
def test_differentiation_is_refused(op):
    call, (query, *rest) = call_of(op)
    with pytest.raises(NotImplementedError, match=f"{op} has no gradient with respect to query"):
        jax.grad(lambda query: jnp.sum(jax.tree.leaves(call(query, *rest))[0]))(query)


@pytest.mark.parametrize("op", WRITING)
def test_donated_caches_are_updated_in_place(op):
    call, arrays = call_of(op)
    donated = WRITING[op]
    arrays = [jnp.tile(x, (2000, *(1,) * (x.ndim - 1))) if n in donated else x for n, x in enumerate(arrays)]
    size = sum(arrays[n].nbytes for n in donated)
    compiled = jax.jit(call, donate_argnums=donated).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8  # nor is there a copy
    pointers = [arrays[n].unsafe_buffer_pointer() for n in donated]
    _, *caches = compiled(*arrays)
    assert [cache.unsafe_buffer_pointer() for cache in caches] == pointers


@pytest.mark.parametrize("op", ["page_attention", "unified_attention", "ragged_page_attention_v2"])
def test_memory_does_not_grow_with_the_cache_and_linearly_with_the_queries(op):
    def temporary(rows, entries, pages):
        sequences = rows if op == "page_attention" else 4
        caches = [
            jax.ShapeDtypeStruct((pages, 16, heads, 16), jnp.float32) for heads in ((4,) if "v2" in op else (2, 2))
        ]
        ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sequences,), (sequences, entries))]
        tail = [] if op == "page_attention" else [jax.ShapeDtypeStruct((sequences + 1,), jnp.int32)]
        tail += [jax.ShapeDtypeStruct((), jnp.int32)] if "v2" in op else []
        query = jax.ShapeDtypeStruct((rows, 4, 16), jnp.float32)
        lowered = jax.jit(getattr(ej, op)).lower(query, *caches, *ints, *tail)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, long, wide = temporary(512, 128, 600), temporary(512, 512, 2400), temporary(1024, 128, 600)
    # Tables of int32 may be copied; keys (8 KiB a page here) may not.
    assert long - small < 512 * 512 * 4 + 2**16
    assert wide <= 2.1 * small
    # A tile of keys and one of values, the tables twice, the output.
    assert small < 4 * (2 * MAX_GATHERED_ELEMENTS["cpu"] + 2 * 512 * 128 + 512 * 4 * 16)
