"""The named cases of the operations over TurboQuant caches, and their arguments of given shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.cases.paged import MIXED_BATCH_SIZES
from ejkernel.modules.operations.cases.paged_arguments import random_per_head
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes, normal_arrays, packed_inputs
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case
from ejkernel.planning import turboquant
from ejkernel.quantization.turboquant import generate_projection_matrix, generate_rotation_matrix, get_codebook

FORMAT_FIELDS = (
    *("code_bits", "key_signs", "key_norms", "value_norms", "key_codebook", "value_codebook"),
    *("rotation", "projection"),
)
NEW_TOKEN_FIELDS = ("new_keys", "new_values", "new_key_signs", "new_key_norms", "new_value_norms")
SIGN_FIELDS = ("key_signs", "new_key_signs", "projection")
"""Those that a cache without signs does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurboQuantSizes(PagedSizes):
    """A batch of sequences in a TurboQuant cache.

    Attributes:
        key_bits: Bits of a code of keys.
        value_bits: Bits of a code of values.
        projections: Q.
    """

    key_bits: int = 3
    value_bits: int = 4
    projections: int = 40


def _turboquant_sizes(sizes: PagedSizes, **changes: Any) -> TurboQuantSizes:
    return TurboQuantSizes(**{**{f.name: getattr(sizes, f.name) for f in dataclasses.fields(sizes)}, **changes})


MIXED_SIZES = _turboquant_sizes(MIXED_BATCH_SIZES)
BFLOAT16_SIZES = _turboquant_sizes(
    MIXED_BATCH_SIZES, d=64, v=64, dtype=jnp.bfloat16, key_bits=4, value_bits=2, projections=64
)
UNSIGNED_SIZES = _turboquant_sizes(MIXED_BATCH_SIZES, key_bits=2, value_bits=3, projections=0)
SMALL_DECODE_SIZES = _turboquant_sizes(
    PagedSizes(kv_lens=(500, 400, 300, 200), q_lens=(1,) * 4, h=8, g=2, d=64, v=64), projections=64
)
MODEL_DECODE_SIZES = _turboquant_sizes(
    PagedSizes(kv_lens=(4000, 3000, 2000, 1000) * 4, q_lens=(1,) * 16, h=32, g=8, d=128, v=128, dtype=jnp.bfloat16),
    projections=128,
)

_TIMED_ROWS: tuple[Row[TurboQuantSizes], ...] = (
    ("model", MODEL_DECODE_SIZES, lambda key: {}, (), ("bench",)),
    ("small model", SMALL_DECODE_SIZES, lambda key: {}, (), ("bench_cpu",)),
)


def table_inputs(sizes: TurboQuantSizes) -> dict[str, Any]:
    """Returns rotation, projection and codebooks."""
    z = sizes
    codebooks = {"key_codebook": z.key_bits, "value_codebook": z.value_bits}
    return {
        "rotation_matrix": generate_rotation_matrix(3, z.d),
        "qjl_projection": generate_projection_matrix(4, z.projections, z.d),
        **{name: jnp.asarray(get_codebook(bits, z.d).centroids) for name, bits in codebooks.items()},
    }


def encoded_cache(keys: jax.Array, values: jax.Array, tables: dict[str, Any], sizes: TurboQuantSizes) -> dict[str, Any]:
    """Returns the five arrays of pages of keys and values [P, S, Hk, D]; norms are NaN where these are."""
    rotation, z = tables["rotation_matrix"], sizes
    encoded = turboquant.encode_keys(keys, rotation, tables["key_codebook"], tables["qjl_projection"], z.key_bits)
    codes, norms, _ = turboquant.encode_vectors(values, rotation, tables["value_codebook"], z.value_bits)
    norms_dtype = jnp.float32 if z.dtype == jnp.float32 else jnp.bfloat16
    return {
        "key_indices_pages": encoded.codes,
        "key_signs_pages": encoded.signs,
        "key_norms_pages": encoded.norms.astype(norms_dtype),
        "value_indices_pages": codes,
        "value_norms_pages": norms.astype(norms_dtype),
    }


def v2_inputs(key: jax.Array, sizes: TurboQuantSizes) -> dict[str, Any]:
    """Returns arguments of `ragged_page_attention_v2_turboquant`; the last sequence is not live, though it looks it."""
    fields, tables = packed_inputs(key, sizes), table_inputs(sizes)
    cache = encoded_cache(fields.pop("key_cache"), fields.pop("value_cache"), tables, sizes)
    return {**fields, **cache, **tables, "num_seqs": len(sizes.kv_lens) - 1}


def v3_inputs(key: jax.Array, sizes: TurboQuantSizes) -> dict[str, Any]:
    """Returns arguments of `ragged_page_attention_v3_turboquant`; caches are compared, so that they hold no NaN."""
    z, keys = sizes, jax.random.split(key)
    fields = v2_inputs(keys[0], sizes)
    del fields["num_seqs"]
    norms = {name: jnp.nan_to_num(fields[name]) for name in ("key_norms_pages", "value_norms_pages")}
    tokens = (z.num_query_rows, z.g, z.d)
    return {
        **fields,
        **norms,
        **normal_arrays(keys[1], z.dtype, keys=tokens, values=tokens),
        "block_tables": fields["block_tables"].reshape(-1),
        "distribution": jnp.array([0, 0, len(z.kv_lens) - 1], jnp.int32),
    }


def _all_terms(key: jax.Array) -> dict[str, Any]:
    sinks = random_per_head(key, "softmax_aux", BFLOAT16_SIZES)
    return {**sinks, "sliding_window": 9, "logits_soft_cap": 1.5, "return_lse": True}


def v2_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_page_attention_v2_turboquant`."""
    rows: tuple[Row[TurboQuantSizes], ...] = (
        ("codes of 3 and 4 bits", MIXED_SIZES, lambda key: {}, FORMAT_FIELDS, ()),
        (
            "codes of 4 and 2 bits, bfloat16, window, soft cap, sinks, lse",
            BFLOAT16_SIZES,
            _all_terms,
            (*FORMAT_FIELDS, "softmax_aux", "sliding_window", "logits_soft_cap"),
            ("awkward",),
        ),
        *_TIMED_ROWS,
    )
    return make_cases_of_rows(record_type, v2_inputs, rows)


def v3_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_page_attention_v3_turboquant`."""
    unsigned = tuple(name for name in (*FORMAT_FIELDS, *NEW_TOKEN_FIELDS) if name not in SIGN_FIELDS)
    rows: tuple[Row[TurboQuantSizes], ...] = (
        ("writes codes of 3 and 4 bits", MIXED_SIZES, lambda key: {}, (*FORMAT_FIELDS, *NEW_TOKEN_FIELDS), ()),
        ("writes codes of 2 and 3 bits without signs", UNSIGNED_SIZES, lambda key: {}, unsigned, ("awkward",)),
        *_TIMED_ROWS,
    )
    return make_cases_of_rows(record_type, v3_inputs, rows)


make_inputs = functools.partial(paged_inputs.make_inputs, cache_size=lambda args: args.key_indices_pages.shape[:2])
