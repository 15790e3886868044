"""`native_sparse_attention` under JAX's transformations, on a mesh, and in memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import native_sparse_attention

SIZES = {"block_size": 4, "window_size": 3}


def make(seed, tokens=20, heads=4, kv_heads=2):
    """Query, key, value and three gates."""
    rng = np.random.default_rng(seed)
    shapes = [(1, tokens, n, 3) for n in (heads, kv_heads, kv_heads)]
    gates = [rng.random((1, tokens, heads)) for _ in range(3)]
    return [x.astype(np.float32) for x in (*(rng.normal(size=shape) for shape in shapes), *gates)]


def test_transforms_with_traced_lengths_where_blocks_are_selected():
    def call(query, key, value, g_cmp, g_slc, g_swa, cum):
        return native_sparse_attention(query, key, value, g_cmp, g_slc, None, 2, cum, g_swa=g_swa, **SIZES)

    lengths = [np.array(x, np.int32) for x in ([0, 9, 9, 18], [0, 0, 13, 20])]
    arrays, others = ((*make(seed), cum) for seed, cum in enumerate(lengths))
    transformed.check_transforms(call, arrays, range(6), others)


def test_nothing_is_compiled_again_for_other_blocks_counts_and_lengths():
    rng = np.random.default_rng(0)
    lengths = [np.array(x, np.int32) for x in ([0, 9, 9, 18], [0, 0, 13, 20])]
    blocks = [(rng.integers(-1, 5, (1, 20, 2, 3)), rng.integers(0, 4, (1, 20, 2)), cum) for cum in lengths]

    def call(query, key, value, indices, counts, cum):
        return native_sparse_attention(query, key, value, None, None, indices, counts, cum, **SIZES)

    arrays, others = ((*make(seed)[:3], *given) for seed, given in enumerate(blocks))
    transformed.check_no_new_compilations(call, arrays, others)


@pytest.mark.parametrize("kind", ["selected", "given", "pages"])
def test_temporary_memory_grows_linearly_and_nothing_is_square(kind):
    lengths = (1024, 4096) if kind == "pages" else (4096, 16384)

    def program(tokens):
        rows = (tokens // 64, 64) if kind == "pages" else (1, tokens)
        shapes = [(1, tokens, 2, 16), (*rows, 1, 16), (*rows, 1, 16)] + [(1, tokens, 2)] * 2
        floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        indices = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.int32)

        def loss(floats, indices):
            *inputs, g_cmp, g_swa = floats
            arguments = (None, None, indices) if kind == "given" else (g_cmp, None, None, 8)
            options = {} if kind == "given" else {"g_swa": g_swa}
            if kind == "pages":
                options["block_tables"] = jnp.arange(tokens // 64)[None]
            return jnp.sum(native_sparse_attention(*inputs, *arguments, **options) ** 2)

        return jax.jit(jax.value_and_grad(loss)).lower(floats, indices).compile()

    programs = [program(tokens) for tokens in lengths]
    short, long = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert long <= 4.2 * short
    shapes = re.findall(r"\w+\[([\d,]+)\]", programs[-1].as_text())
    sizes = [[int(size) for size in shape.split(",")] for shape in shapes]
    assert not [shape for shape in sizes if sum(size >= lengths[-1] for size in shape) > 1]


@pytest.mark.parametrize("paged", [False, True])
def test_a_decode_step_needs_less_memory_than_its_cache(paged):
    """Of two requests of 16384 tokens: less than an eighth of their keys is copied."""
    rows, keys, blocks = (8, 4096, 64) if paged else (2, 16384, 256)
    floats = {name: jax.ShapeDtypeStruct((2, 1, 4), jnp.float32) for name in ("g_cmp", "g_swa")}
    floats["query"] = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.float32)
    for name, size in (("key", keys), ("value", keys), ("compressed_key", blocks), ("compressed_value", blocks)):
        floats[name] = jax.ShapeDtypeStruct((rows, size, 2, 64), jnp.float32)
    lengths = {"kv_lens": jax.ShapeDtypeStruct((2,), jnp.int32)}
    if paged:
        lengths["block_tables"] = jax.ShapeDtypeStruct((2, 4), jnp.int32)

    def step(floats, lengths):
        return native_sparse_attention(**floats, **lengths, block_counts=8)

    program = jax.jit(step).lower(floats, lengths).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2 * 16384 * 2 * 64 * 4 / 8


def test_shards_are_parts_of_the_whole():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(AxisType.Auto,) * 3)
    *inputs, g_cmp, g_slc, g_swa = (np.concatenate([x, x[:, ::-1]]) for x in make(0))
    split = P("dp", "sp", "tp")

    def call(query, key, value, g_cmp, g_slc, g_swa, **placed):
        return native_sparse_attention(query, key, value, g_cmp, g_slc, None, 2, g_swa=g_swa, **SIZES, **placed)

    def placed(*arrays):
        return call(*arrays, mesh=mesh, in_specs=(split, P("dp", None, "tp"), P("dp", None, "tp")), out_specs=split)

    arrays = (*inputs, g_cmp, g_slc, g_swa)
    got, want = (transformed.quickly(transformed.graded(f, range(6)))(*arrays) for f in (placed, call))
    transformed.close(got, want, 2e-5, 1e-5)
    with pytest.raises(ValueError, match="cannot be split"):
        call(*arrays, mesh=mesh, in_specs=(P(), P(None, "sp"), P()), out_specs=P())
