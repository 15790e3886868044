"""The paged-attention kernel under a simulator of the TPU's copies, watched for races: pages, results, new tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu  # noqa: TID251
from tpu_paged_records import lowered
from tpu_records import close, simulated

from ejkernel.families.paged_attention import reference
from ejkernel.modules.operations.cases import paged_inputs, paged_turboquant
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel.types.pair_functions import score_function
from ejkernel_pallas.tpu.paged_attention.config import TpuPaged
from ejkernel_pallas.tpu.paged_attention.forward import forward
from ejkernel_pallas.tpu.paged_attention.kernels import copies, load_keys, pair_bias

PARAMS = TpuPaged(block_q=8, block_kv=128)


def found():
    return interpret_pallas_call.races.races_found


def read_words(buffer, head_group, word, at, spec):
    """What `load_keys._load_words` reads, without a view of another shape, which the simulator does not have."""
    words = spec.cache_layout.word_rows_per_token
    rows = buffer[...].reshape(spec.block_kv * words, buffer.shape[-1])
    return lax.dynamic_slice_in_dim(rows, at.start_in_buffer * words, spec.chunk_kv * words)[word::words]


def records():
    sizes = PagedSizes(kv_lens=(150, 20, 9), q_lens=(9, 20, 1), h=2, g=1, d=32, v=32, s=16)
    tables = sizes.block_tables()
    absent = jnp.where(jnp.arange(tables.shape[1]) % 3 == 1, -1, jnp.asarray(tables))
    # All pages of the last block of 250 tokens are copied, and its last page ends with NaN.
    single = paged_inputs.page_inputs, dataclasses.replace(sizes, kv_lens=(300, 256, 250))
    biases = jnp.cos(jnp.arange(3 * 160.0)).reshape(3, 160)
    codes = paged_turboquant.TurboQuantSizes(
        kv_lens=(150, 20, 9), q_lens=(9, 1, 1), h=2, g=1, d=64, v=64, s=128, dtype=jnp.bfloat16, key_bits=4,
        value_bits=3, projections=64,
    )  # fmt: skip
    new = PagedSizes(kv_lens=(37, 1, 20), q_lens=(7, 1, 20), h=2, g=1, d=128, v=128, s=16)
    return {
        "decoding": lowered("page_attention", *single),
        "several blocks": lowered("unified_attention", paged_inputs.packed_inputs, sizes),
        "slopes and chunks": lowered(
            "unified_attention", paged_inputs.packed_inputs, sizes, alibi_slopes=jnp.array([0.5, -0.25]), chunk_size=48
        ),
        "trees": lowered(
            "unified_attention",
            paged_inputs.packed_inputs,
            dataclasses.replace(sizes, kv_lens=(150, 40, 39)),
            qq_bias=jnp.where(jnp.arange(3 * 9 * 9).reshape(3, 9, 9) % 4 == 1, -jnp.inf, 0.5),
        ),
        "functions": dataclasses.replace(
            lowered("unified_attention", paged_inputs.packed_inputs, sizes),
            score_mod=score_function("score_mod", lambda s, b, h, q, k: s + biases[b, k] * (1 + b * q), jnp.float32),
        ),
        # The call's last kernel, which is the one that is watched, attends to the prefix.
        "a prefix": lowered(
            "unified_attention",
            paged_inputs.packed_inputs,
            dataclasses.replace(sizes, kv_lens=(150, 40, 39)),
            shared_prefix=19,
            sliding_window=(130, None),
            alibi_slopes=jnp.array([0.5, -0.25]),
        ),
        "absent pages": lowered("unified_attention", paged_inputs.packed_inputs, sizes, block_tables=absent),
        "codes": lowered("ragged_page_attention_v3_turboquant", paged_turboquant.v3_inputs, codes),
        "written": lowered("ragged_page_attention_v3", paged_inputs.v3_inputs, new),
    }


SAME_COPIES = ("decoding", "several blocks", "slopes and chunks", "a prefix", "absent pages")
OTHER_COPIES = ("trees", "functions", "codes", "written")
"""Calls that copy more than pages of keys and values, or in another way."""


@pytest.mark.parametrize("name", SAME_COPIES)
def test_paged_attention_has_no_races(name, monkeypatch):
    check(name, monkeypatch)


@pytest.mark.whole
@pytest.mark.parametrize("name", OTHER_COPIES)
def test_other_copies_have_no_races(name, monkeypatch):
    check(name, monkeypatch)


def check(name, monkeypatch):
    """No race is found, and the output is that of the reference."""
    record = records()[name]
    monkeypatch.setattr(load_keys, "_load_words", read_words)
    with simulated():
        got = jax.block_until_ready(jax.jit(lambda record: forward(record, PARAMS)[0])(record))
    assert not found()
    for x, wanted in zip(got, reference(record)[0], strict=True):
        close(x, wanted, record.query.dtype)


def test_reading_pages_before_tokens_are_written_is_a_race(monkeypatch):
    record = records()["written"]
    monkeypatch.setattr(load_keys, "_load_words", read_words)
    monkeypatch.setattr(copies, "wait_for_cache_writes", lambda refs, spec: None)
    # A copy that nobody waits for is made nonetheless.
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    with pltpu.force_tpu_interpret_mode(params):
        jax.block_until_ready(jax.jit(lambda record: forward(record, PARAMS)[0])(record))
    assert found()


def test_reading_a_bias_before_it_is_there_is_one(monkeypatch):
    record = records()["trees"]
    monkeypatch.setattr(load_keys, "_load_words", read_words)
    copy_pair_bias = pair_bias.copy_pair_bias

    def copy(refs, block, spec, *, wait):
        if not wait:
            copy_pair_bias(refs, block, spec, wait=False)

    monkeypatch.setattr(pair_bias, "copy_pair_bias", copy)
    # With clocks as large as by default, a later copy of pages would nearly always hide the race.
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager", vector_clock_size=512)
    with pltpu.force_tpu_interpret_mode(params):
        jax.block_until_ready(jax.jit(lambda record: forward(record, PARAMS)[0])(record))
    assert found()
