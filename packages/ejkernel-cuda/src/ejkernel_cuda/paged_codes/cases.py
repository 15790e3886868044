"""Conformance cases of decode attention over codes: one query row per sequence, and the formats that are compiled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import paged_turboquant
from ejkernel.modules.operations.cases.paged_turboquant import (
    FORMAT_FIELDS,
    NEW_TOKEN_FIELDS,
    SIGN_FIELDS,
    TurboQuantSizes,
)
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.ragged_page_attention_v2_turboquant import RaggedPageAttentionv2TurboQuantArguments
from ejkernel.modules.operations.ragged_page_attention_v3_turboquant import RaggedPageAttentionv3TurboQuantArguments
from ejkernel.ops.model import Case

FOUR_BIT_SIZES = TurboQuantSizes(
    kv_lens=(1537, 7, 20, 300),
    q_lens=(1, 1, 1, 1),
    h=8,
    g=2,
    d=128,
    v=128,
    s=16,
    dtype=jnp.bfloat16,
    key_bits=4,
    value_bits=4,
    projections=0,
)
"""Has a sequence whose keys are split over several blocks."""
SIGNED_SIZES = dataclasses.replace(FOUR_BIT_SIZES, key_bits=3, h=20, g=1, projections=128)
"""Has more query heads than fit in one block."""
FOUR_BIT_SIGNED_SIZES = dataclasses.replace(FOUR_BIT_SIZES, h=9, g=3, projections=128)
THREE_BIT_SIZES = dataclasses.replace(FOUR_BIT_SIZES, key_bits=3, value_bits=3, q_lens=(0, 3, 0, 1), s=24)
"""Has as many query rows as sequences, but not one for each, and page sizes that do not divide tiles."""
TWO_BIT_SIGNED_SIZES = dataclasses.replace(SIGNED_SIZES, key_bits=2, value_bits=3, h=8, g=2)
ONE_BIT_SIGNED_SIZES = dataclasses.replace(FOUR_BIT_SIGNED_SIZES, key_bits=1, value_bits=2)
TWO_BIT_SIZES = dataclasses.replace(FOUR_BIT_SIZES, key_bits=2, value_bits=2, s=1)


def _terms(key: jax.Array) -> dict[str, Any]:
    sinks = jax.random.normal(key, (8,), jnp.float32)
    return {"softmax_aux": sinks, "sliding_window": 270, "logits_soft_cap": 1.5, "return_lse": True}


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    unsigned = tuple(name for name in FORMAT_FIELDS if name not in SIGN_FIELDS)
    terms = (*unsigned, "softmax_aux", "sliding_window", "logits_soft_cap")
    read: tuple[Row[TurboQuantSizes], ...] = (
        ("decode, 4 bits", FOUR_BIT_SIZES, lambda key: {"return_lse": True}, (*unsigned, "num_seqs"), ()),
        ("decode, 4 bits, window, soft cap, sinks, lse", FOUR_BIT_SIZES, _terms, terms, ()),
        ("decode, 3 bits and signs, 20 heads", SIGNED_SIZES, lambda key: {}, FORMAT_FIELDS, ("awkward",)),
        ("decode, 4 bits and signs, 3 heads each", FOUR_BIT_SIGNED_SIZES, lambda key: {}, FORMAT_FIELDS, ("awkward",)),
        ("decode, 2 bits and signs", TWO_BIT_SIGNED_SIZES, lambda key: {}, FORMAT_FIELDS, ("awkward",)),
        ("decode, 1 bit and signs, 3 heads each", ONE_BIT_SIGNED_SIZES, lambda key: {}, FORMAT_FIELDS, ("awkward",)),
        ("decode, 3 bits, rows of few sequences", THREE_BIT_SIZES, lambda key: {}, unsigned, ("awkward",)),
        ("decode, 2 bits, pages of 1", TWO_BIT_SIZES, lambda key: {}, unsigned, ("awkward",)),
    )
    tokens = (*FORMAT_FIELDS, *NEW_TOKEN_FIELDS)
    written: tuple[Row[TurboQuantSizes], ...] = (
        ("decode, 4 bits and signs, written", FOUR_BIT_SIGNED_SIZES, lambda key: {}, tokens, ()),
    )
    return {
        "ragged_page_attention_v2_turboquant": make_cases_of_rows(
            RaggedPageAttentionv2TurboQuantArguments, paged_turboquant.v2_inputs, read
        ),
        "ragged_page_attention_v3_turboquant": make_cases_of_rows(
            RaggedPageAttentionv3TurboQuantArguments, paged_turboquant.v3_inputs, written
        ),
    }
