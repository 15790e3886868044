"""Latent caches in the paged-attention kernel, compiled for real chips by their own compiler, which needs none."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from test_tpu_ahead import CHIPS

from ejkernel.modules import mla_decode, multi_latent_ragged_page_attention
from ejkernel_pallas.tpu.profile.chips import chip
from ejkernel_pallas.tpu.profile.compiling import compiling_for

pytestmark = pytest.mark.libtpu


def shapes(sharding, dtype=jnp.bfloat16, **arrays):
    return [jax.ShapeDtypeStruct(x, y if y else dtype, sharding=sharding) for x, y in arrays.values()]


def paged(sharding, rows, sequences, heads=16):
    """A call of the size of DeepSeek-V3's latent vectors."""
    return shapes(
        sharding,
        nope=((rows, heads, 512), None),
        rope=((rows, heads, 64), None),
        latent=((rows, 512), None),
        key=((rows, 64), None),
        cache=((2048, 32, 2, 640), None),
        lengths=((sequences,), jnp.int32),
        tables=((sequences * 32,), jnp.int32),
        starts=((sequences + 1,), jnp.int32),
        distribution=((3,), jnp.int32),
    )


@pytest.mark.parametrize("name", CHIPS)
def test_decoding_over_pages_compiles_and_a_donated_cache_stays_where_it_is(name):
    with compiling_for(chip(name)) as sharding:
        step = jax.jit(functools.partial(multi_latent_ragged_page_attention, platform="pallas"), donate_argnums=4)
        made = step.trace(*paged(sharding, 16, 16)).lower(lowering_platforms=("tpu",)).compile()
    size, stats = 2 * math.prod((2048, 64, 640)), made.memory_analysis()
    assert "tpu_custom_call" in made.as_text()
    assert stats.alias_size_in_bytes >= size
    assert stats.temp_size_in_bytes < size // 8


def test_prefill_compiles():
    with compiling_for(chip("v5e")) as sharding:
        step = jax.jit(functools.partial(multi_latent_ragged_page_attention, platform="pallas"))
        made = step.trace(*paged(sharding, 64, 2)).lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in made.as_text()


@pytest.mark.parametrize("name", CHIPS)
def test_decoding_over_a_dense_cache_compiles(name):
    with compiling_for(chip(name)) as sharding:
        arrays = shapes(
            sharding,
            query=((8, 16, 192), None),
            cache=((8, 4096, 576), None),
            w_kc=((512, 16, 128), None),
            w_vc=((512, 16, 128), None),
            lengths=((8,), jnp.int32),
        )
        step = jax.jit(lambda q, x, k, v, n: mla_decode(q, x, None, k, v, n, platform="pallas"))
        made = step.trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in made.as_text()
    if name in ("v5e", "v6e"):  # by default, others keep arguments with rows of 576 transposed, which a call copies
        assert made.memory_analysis().temp_size_in_bytes < 2 * math.prod((8, 4096, 576)) // 8
