"""Latent caches in the paged-attention kernel, compiled for real chips by their own compiler, which needs none."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tpu_chips import CHIPS

from ejkernel.modules import mla_decode, multi_latent_ragged_page_attention
from ejkernel.ops import batch_invariant
from ejkernel_pallas.tpu.profile.chips import chip
from ejkernel_pallas.tpu.profile.compiling import compiling_for

pytestmark = pytest.mark.needs("libtpu")


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
def test_decoding_compiles_and_a_donated_cache_is_not_copied(name, cache):
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


CACHES = [*((name, (576,)) for name in CHIPS), ("v5e", (640,)), ("v5p", (512, 64)), ("v6e", (512, 64))]
"""Chips, and the sizes of dense caches."""


@pytest.mark.parametrize(("name", "sizes"), CACHES)
def test_writing_to_and_decoding_dense_caches_copies_none(name, sizes):
    """XLA keeps tokens along lanes in caches of 576 and of 64; the kernel reads all caches in the order they have.

    They are larger than VMEM, where XLA would otherwise copy them, unseen by the sizes of what it allocates.
    """
    batch, length = 2, 2**19

    def write(cache, rows, lengths):
        for n in range(batch):
            cache = lax.dynamic_update_slice(cache, rows[n, None, None], (n, lengths[n] - 1, 0))
        return cache

    def step(query, w_kc, w_vc, lengths, rows, caches):
        caches = [write(*both, lengths) for both in zip(caches, rows, strict=True)]
        latent, rope = caches if len(caches) == 2 else (*caches, None)
        return mla_decode(query, latent, rope, w_kc, w_vc, lengths, platform="pallas"), caches

    with compiling_for(chip(name)) as sharding:
        given = shapes(
            sharding,
            query=((batch, 16, 128 + sum(sizes) - 512), None),
            w_kc=((512, 16, 128), None),
            w_vc=((512, 16, 128), None),
            lengths=((batch,), jnp.int32),
        )
        rows, caches = (
            shapes(sharding, **{str(n): ((*lead, n), None) for n in sizes}) for lead in ((batch,), (batch, length))
        )
        made = jax.jit(step, donate_argnums=5).trace(*given, rows, caches).lower(lowering_platforms=("tpu",)).compile()
    made, smallest = made.as_text(), batch * length * sizes[-1]
    found = {what for size, what in INSTRUCTION.findall(made) if math.prod(map(int, size.split(","))) >= smallest}
    assert "tpu_custom_call" in made
    assert found == {"parameter", "bitcast", "dynamic-update-slice"}


IN_BLOCK = [(*x, n) for x, n in zip(CACHES, (16, 128, 16, 128, 16, 128, 128), strict=True)]
"""Chips, the sizes of caches, and heads."""


@pytest.mark.parametrize(("name", "sizes", "heads"), IN_BLOCK)
def test_decoding_compiles_in_a_block(name, sizes, heads):
    """The cache is shorter than a block of whole steps."""

    def step(query, w_kc, w_vc, lengths, *caches):
        latent, rope = caches if len(caches) == 2 else (*caches, None)
        with batch_invariant():
            return mla_decode(query, latent, rope, w_kc, w_vc, lengths, platform="pallas")

    with compiling_for(chip(name)) as sharding:
        arrays = shapes(
            sharding,
            query=((2, heads, 128 + sum(sizes) - 512), None),
            w_kc=((512, heads, 128), None),
            w_vc=((512, heads, 128), None),
            lengths=((2,), jnp.int32),
            **{f"cache{n}": ((2, 300, n), None) for n in sizes},
        )
        compiled = jax.jit(step).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in compiled.as_text()
