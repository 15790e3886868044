"""Latent caches in the paged-attention kernel, compiled for real chips by their own compiler, which needs none."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from test_tpu_ahead import CHIPS

from ejkernel.modules import mla_decode, multi_latent_ragged_page_attention
from ejkernel_pallas.tpu.profile.chips import chip
from ejkernel_pallas.tpu.profile.compiling import compiling_for

pytestmark = pytest.mark.libtpu


def shapes(sharding, dtype=jnp.bfloat16, **arrays):
    return [jax.ShapeDtypeStruct(x, y if y else dtype, sharding=sharding) for x, y in arrays.values()]


def paged(sharding, rows, sequences, heads=16, cache=jnp.bfloat16):
    """A call of the size of DeepSeek-V3's latent vectors; `cache` is the dtype of what is kept."""
    pack = 4 // jnp.dtype(cache).itemsize
    return shapes(
        sharding,
        nope=((rows, heads, 512), None),
        rope=((rows, heads, 64), None),
        latent=((rows, 512), cache),
        key=((rows, 64), cache),
        cache=((2048, 64 // pack, pack, 640), cache),
        lengths=((sequences,), jnp.int32),
        tables=((sequences * 32,), jnp.int32),
        starts=((sequences + 1,), jnp.int32),
        distribution=((3,), jnp.int32),
    )


@pytest.mark.parametrize(("name", "cache"), [*((name, jnp.bfloat16) for name in CHIPS), ("v5p", jnp.float8_e4m3fn)])
def test_decoding_over_pages_compiles_and_a_donated_cache_stays_where_it_is(name, cache):
    with compiling_for(chip(name)) as sharding:
        step = jax.jit(functools.partial(multi_latent_ragged_page_attention, platform="pallas"), donate_argnums=4)
        made = step.trace(*paged(sharding, 16, 16, cache=cache)).lower(lowering_platforms=("tpu",)).compile()
    size, stats = jnp.dtype(cache).itemsize * math.prod((2048, 64, 640)), made.memory_analysis()
    assert "tpu_custom_call" in made.as_text()
    assert stats.alias_size_in_bytes >= size
    assert stats.temp_size_in_bytes < size // 8


@pytest.mark.parametrize(("name", "cache"), [("v5e", jnp.bfloat16), ("v7x", jnp.float8_e4m3fn)])
def test_prefill_compiles(name, cache):
    with compiling_for(chip(name)) as sharding:
        step = jax.jit(functools.partial(multi_latent_ragged_page_attention, platform="pallas"))
        made = step.trace(*paged(sharding, 64, 2, cache=cache)).lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in made.as_text()


INSTRUCTION = re.compile(r" = \w+\[([\d,]+)\]\S* ([a-z-]+)\(")
"""Of a compiled module: the shape of an array that it makes, and the operation."""


@pytest.mark.parametrize("rotary", [64, 128])
@pytest.mark.parametrize("name", CHIPS)
def test_a_step_that_writes_to_a_dense_cache_and_decodes_copies_none_of_it(name, rotary):
    """XLA keeps rows of 576 along sublanes and rows of 640 along lanes; the kernel reads both as they are.

    The cache is larger than VMEM, where XLA would otherwise copy it unseen by the sizes of what it allocates.
    """
    shape = (2, 2**17, 512 + rotary)

    def step(query, cache, w_kc, w_vc, lengths, rows):
        for n in range(shape[0]):
            cache = lax.dynamic_update_slice(cache, rows[n, None, None], (n, lengths[n] - 1, 0))
        return mla_decode(query, cache, None, w_kc, w_vc, lengths, platform="pallas"), cache

    with compiling_for(chip(name)) as sharding:
        arrays = shapes(
            sharding,
            query=((2, 16, 128 + rotary), None),
            cache=(shape, None),
            w_kc=((512, 16, 128), None),
            w_vc=((512, 16, 128), None),
            lengths=((2,), jnp.int32),
            rows=((2, shape[-1]), None),
        )
        made = jax.jit(step, donate_argnums=1).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    made = made.as_text()
    found = {
        what for size, what in INSTRUCTION.findall(made) if math.prod(map(int, size.split(","))) >= math.prod(shape)
    }
    assert "tpu_custom_call" in made
    assert found == {"parameter", "bitcast", "dynamic-update-slice"}
