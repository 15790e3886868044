"""Latent caches in the paged-attention kernel, in pages and dense: its numbers, interpreted, and races."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tpu_paged_records import QUICKLY, case, lowered
from tpu_races import found
from tpu_records import close, interpreted, simulated

from ejkernel.families import paged_attention, tiled_attention
from ejkernel.modules.operations.cases import mla_decode as dense_cases
from ejkernel.modules.operations.cases import paged_latent
from ejkernel.modules.operations.cases.mla_decode import DecodeSizes
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel_pallas.tpu.latent_attention import forward as latent_forward
from ejkernel_pallas.tpu.latent_attention.plan import paged_record_of_dense_cache
from ejkernel_pallas.tpu.mosaic.paged_layout import make_cache_layout
from ejkernel_pallas.tpu.paged_attention import refusal_reasons
from ejkernel_pallas.tpu.paged_attention.config import TpuPaged
from ejkernel_pallas.tpu.paged_attention.forward import forward

PAGED = "multi_latent_ragged_page_attention"
TILES, SINGLE = TpuPaged(block_q=8, block_kv=128), TpuPaged(block_q=1, block_kv=128)
DECODING = PagedSizes(kv_lens=(140, 9), q_lens=(1, 1), query_rows=2, h=4, s=16, v=60, d=17, dtype=jnp.bfloat16)


def attend(record, params):
    with interpreted():
        return jax.jit(lambda record: forward(record, params)[0], compiler_options=QUICKLY)(record)


def check(record, params):
    for x, wanted in zip(attend(record, params), paged_attention.reference(record)[0], strict=True):
        assert (x.dtype, x.shape) == (wanted.dtype, wanted.shape)
        close(x, wanted, record.query.dtype)


@pytest.mark.parametrize(("op", "name"), [
    (PAGED + "_v2", "int8, everything, lse"),
    (PAGED, "float8_e4m3fn, scales"),
])  # fmt: skip
def test_prefill_and_decode_with_a_cache_of_8_bits(op, name):
    check(case(op, name), TILES)


@pytest.mark.parametrize(("q_lens", "params"), [((20, 9), TILES), ((1, 1), SINGLE)], ids=["tiles", "decoding"])
def test_alibi_slopes_and_attention_chunks(q_lens, params):
    record = lowered(
        PAGED, paged_latent.make_base_inputs, dataclasses.replace(DECODING, q_lens=q_lens, query_rows=sum(q_lens))
    )
    check(dataclasses.replace(record, alibi_slopes=jnp.array([0.5, -0.25, 0.125, 1.0]), chunk_size=48), params)


def test_decoding_over_pages_with_nan_in_unused_slots():
    """Words have two tokens each: the first of a word is the last of a sequence, and so is the second."""
    record = lowered(PAGED, paged_latent.make_base_inputs, DECODING)
    used = jnp.zeros(record.key_pages.shape[:2], bool)
    place = jnp.arange(140)
    used = used.at[record.block_tables[0, place // 16], place % 16].set(True)
    used = used.at[record.block_tables[1, 0], :9].set(True)
    broken = dataclasses.replace(record, key_pages=jnp.where(used[..., None], record.key_pages, jnp.nan))
    wanted = paged_attention.reference(record)[0]
    for x, y in zip(attend(broken, SINGLE)[:2], wanted[:2], strict=True):
        close(x, y, record.query.dtype)


def dense():
    return case("mla_decode", "one cache, window, cap, sinks, lse")


def test_a_dense_cache_decodes_without_races():
    record = dense()
    with simulated():
        output, residuals = jax.block_until_ready(jax.jit(lambda x: latent_forward.forward(x, SINGLE))(record))
    assert not found()
    wanted, kept = tiled_attention.reference(record)
    close(output, wanted, record.query.dtype)
    close(residuals.lse, kept.lse, record.query.dtype)


ORDERS = {"rows": (120, True), "tokens along lanes": (32, True), "rows, and tokens along lanes": (128, False)}
"""What XLA keeps of caches of `latent` + 8 numbers -> latent, and whether one array has both."""


@pytest.mark.parametrize("order", ORDERS)
def test_dense_caches_in_every_layout_with_nan_in_unused_slots(order):
    """Pages of 128 tokens, eight a block: all keys of the first attend, in two products; the next has one page."""
    (latent, one), lengths = ORDERS[order], (1100, 3, 0)
    sizes = DecodeSizes(s=1152, r=latent, has_joint_cache=one, lengths=lengths, dtype=jnp.bfloat16)
    record = lowered("mla_decode", dense_cases.make_arrays, sizes)
    cache = make_cache_layout(paged_record_of_dense_cache(record))
    assert (cache.tokens_along_lanes, cache.rotary_dim) == (latent == 32, 0 if one else 8)
    there = (jnp.arange(1152) < jnp.array(lengths)[:, None])[..., None, None]
    broken = {name: jnp.where(there, getattr(record, name), jnp.nan) for name in ("key", "value")}
    with interpreted():
        run = jax.jit(lambda x: latent_forward.forward(x, TpuPaged(block_q=1, block_kv=1024)), compiler_options=QUICKLY)
        output, residuals = run(dataclasses.replace(record, **broken))
    wanted, kept = tiled_attention.reference(record)
    close(output, wanted, record.query.dtype)
    close(residuals.lse, kept.lse, record.query.dtype)


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"key_pages": jax.ShapeDtypeStruct((4, 7, 256), jnp.bfloat16)}, "pages of 7 slots of bfloat16; wants"),
    ({"key_pages": jax.ShapeDtypeStruct((4, 8, 200), jnp.bfloat16)}, "rows of 200 elements, rotary part at 128"),
    ({"latent": (1100, 1152)}, "the kernel takes at most 1024"),
])  # fmt: skip
def test_unsupported_caches_are_refused(fields, sentence):
    record = dataclasses.replace(case(PAGED, "window and soft cap, bfloat16"), **fields)
    assert sentence in " ".join(refusal_reasons(record))
