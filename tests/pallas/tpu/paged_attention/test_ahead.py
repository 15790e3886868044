"""The paged-attention kernel compiled for real chips by their own compiler, which needs none of them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from tpu_chips import compiled, on_chips
from tpu_paged_records import LAYOUTS, layout, lowered

from ejkernel.modules import (
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_turboquant,
)
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel.ops.device import current_device
from ejkernel_pallas.tpu.paged_attention import MAX_TABLE_SMEM_WORDS, config, refusal_reasons
from ejkernel_pallas.tpu.paged_attention.forward import forward
from ejkernel_pallas.tpu.paged_attention.plan import ITEM_FIELDS
from ejkernel_pallas.tpu.profile.chips import chip
from ejkernel_pallas.tpu.profile.compiling import compiling_for

EVERY_CHIP = ("v2", "v3", "v3, 8 bits", "v2, a tree and a prefix", "v2, functions")
pytestmark = pytest.mark.needs("libtpu")


def attend(record):
    return forward(record, config.heuristic(record, current_device(), "forward"))[0]


@pytest.mark.parametrize(("lies", "name"), on_chips(EVERY_CHIP))
def test_decoding_compiles_for_every_chip(lies, name):
    made = compiled(attend, (layout(lies),), name)
    assert "tpu_custom_call" in made.as_text()


@pytest.mark.parametrize(("lies", "name"), on_chips(("v2", "v2, decoding", "v3, 8 bits")))
def test_equal_products_compile_for_every_chip(lies, name):
    """The kernel of `batch_invariant` blocks."""

    def attend_in_block(record):
        return forward(record, config.batch_invariant(record, current_device(), "forward"))[0]

    assert "tpu_custom_call" in compiled(attend_in_block, (layout(lies),), name).as_text()


@pytest.mark.parametrize("options", [{}, {"shared_prefix": 512}])
def test_a_donated_cache_stays_where_it_is(options):
    """A model's cache: the program keeps none of its own, its output is its input, and a prefix is read as it lies."""
    shapes = {"queries": (16, 32, 128), "keys": (16, 8, 128), "values": (16, 8, 128), "cache": (4096, 16, 8, 2, 128)}
    ints = {"lengths": (16,), "tables": (16 * 128,), "starts": (17,), "distribution": (3,)}
    with compiling_for(chip("v5e")) as sharding:
        arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in shapes.values()]
        arrays += [jax.ShapeDtypeStruct(x, jnp.int32, sharding=sharding) for x in ints.values()]
        step = jax.jit(functools.partial(ragged_page_attention_v3, platform="pallas", **options), donate_argnums=3)
        stats = step.trace(*arrays).lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    size = 2 * math.prod(shapes["cache"])
    assert stats.alias_size_in_bytes >= size
    assert stats.temp_size_in_bytes < size // 8


@pytest.mark.parametrize(("codes", "name"), on_chips([(4, 64), (3, 64), (3, 128)]))
def test_donated_codes_stay_where_they_are(codes, name):
    """Pages of 128 slots are read as XLA stores them, and are written as whole pages, in place."""
    pages, (bits, size) = (4096, 128, 2), codes
    num_bytes = {"codes": size * bits // 8, "signs": size // 8, "values": size * bits // 8}
    with compiling_for(chip(name)) as sharding:
        arrays = [jax.ShapeDtypeStruct((4, n, size), jnp.bfloat16, sharding=sharding) for n in (4, 2, 2)]
        codes = [jax.ShapeDtypeStruct((*pages, n), jnp.uint8, sharding=sharding) for n in num_bytes.values()]
        norms = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in ((*pages, 2), pages)]
        cache = [*codes[:2], norms[0], codes[2], norms[1]]
        ints = [jax.ShapeDtypeStruct(x, jnp.int32, sharding=sharding) for x in ((4,), (4, 3), (5,), (3,))]
        tables = ((size, size), (size, size), (2**bits,), (2**bits,))
        tables = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=sharding) for x in tables]
        step = jax.jit(
            functools.partial(ragged_page_attention_v3_turboquant, platform="pallas"), donate_argnums=range(3, 8)
        )
        stats = step.trace(*arrays, *cache, *ints, *tables).lower(lowering_platforms=("tpu",)).compile()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in cache)
    assert stats.memory_analysis().alias_size_in_bytes >= size
    assert stats.memory_analysis().temp_size_in_bytes < size // 8


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 64), ("float32", 128)])
def test_prefill_fits_vmem_with_default_tiles(dtype, size):
    """Rows of 64 take the memory of 128, and those of float32 twice that of bfloat16."""
    shapes = {"query": (2048, 32, size), "cache": (512, 16, 16, size)}
    ints = {"lengths": (4,), "tables": (4, 128), "starts": (5,), "sequences": (1,)}
    with compiling_for(chip("v6e")) as sharding:
        arrays = [jax.ShapeDtypeStruct(x, dtype, sharding=sharding) for x in shapes.values()]
        arrays += [jax.ShapeDtypeStruct(x, jnp.int32, sharding=sharding) for x in ints.values()]
        step = jax.jit(functools.partial(ragged_page_attention_v2, platform="pallas"))
        made = step.trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in made.as_text()


def test_page_tables_that_just_fit_scalar_memory_compile():
    def record(entries):
        tables = jax.ShapeDtypeStruct((1024, entries), jnp.int32)
        lengths = jax.ShapeDtypeStruct((1024,), jnp.int32)
        single = lowered(
            "page_attention", paged_inputs.page_inputs, PagedSizes(dtype=jnp.bfloat16, g=2, h=4, d=128, v=128)
        )
        query = jax.ShapeDtypeStruct((1024, *single.query.shape[1:]), jnp.bfloat16)
        return dataclasses.replace(single, query=query, block_tables=tables, kv_lens=lengths)

    most = MAX_TABLE_SMEM_WORDS // 1024 - len(ITEM_FIELDS)
    assert list(refusal_reasons(record(most))) == []
    assert list(refusal_reasons(record(most + 1)))
    assert "tpu_custom_call" in compiled(attend, (record(most),), "v5e").as_text()


@pytest.mark.parametrize("lies", sorted(LAYOUTS.keys() - set(EVERY_CHIP)))
def test_every_cache_layout_compiles(lies):
    record = layout(lies)
    assert list(refusal_reasons(record)) == []
    assert "tpu_custom_call" in compiled(attend, (record,), "v5e").as_text()
