"""The arguments that the operations over TurboQuant caches share: pages of codes, signs and norms, and four tables."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.modules.operations.shared.paged_arguments import check_head_groups
from ejkernel.modules.operations.shared.paged_terms import score_fields
from ejkernel.modules.operations.shared.shapes import as_count, check_dtype, check_not_empty, check_shape
from ejkernel.ops.invariant_rows import compute_rows
from ejkernel.planning import turboquant
from ejkernel.quantization.turboquant import bits_of_codes

AXES_BY_ARGUMENT = {
    "key_indices_pages": "p s g key_bytes",
    "key_signs_pages": "p s g sign_bytes",
    "key_norms_pages": "p s g norms",
    "value_indices_pages": "p s g value_bytes",
    "value_norms_pages": "p s g",
    "rotation_matrix": "rotated_columns columns",
    "qjl_projection": "projections columns",
    "key_codebook": "key_levels",
    "value_codebook": "value_levels",
    "softmax_aux": "h sinks",
}

PAGES = tuple(AXES_BY_ARGUMENT)[:5]
"""The arguments that are the cache, in the order in which `ragged_page_attention_v3_turboquant` returns them."""


def canonical_format_arguments(args: Any) -> dict[str, int]:
    """Returns the canonical values of `bits`, and of `qjl_dim`, for which None is the projection's number of rows."""
    shape = getattr(args.qjl_projection, "shape", ())
    rows = args.qjl_dim if args.qjl_dim is not None else shape[0] if shape else 0
    return {"bits": as_count("bits", args.bits), "qjl_dim": as_count("qjl_dim", rows)}


def check_turboquant_cache(args: Any, sizes: dict[str, int]) -> None:
    """Checks the pages and the tables of a TurboQuant cache against the queries' sizes.

    Args:
        args: The argument record.
        sizes: Known sizes, H and D among them.

    Raises:
        ValueError: One of them is wrong.
    """
    for name, axes in zip(PAGES, ("P S Hk Bk", "P S Hk Q/8", "P S Hk 2", "P S Hk Bv", "P S Hk"), strict=True):
        pages = getattr(args, name)
        check_shape(name, pages, axes, {**sizes, "2": 2} if axes.endswith("2") else sizes)
        sizes |= dict(zip(["P", "S", "Hk"], pages.shape[:3], strict=True))
        check_dtype(name, pages, *((jnp.floating, "a floating dtype") if "norms" in name else (jnp.uint8, "uint8")))
    check_not_empty("key_indices_pages", args.key_indices_pages, "P S Hk Bk", "S Hk")
    check_head_groups("key_indices_pages", args.key_indices_pages, "queries", sizes)
    projections = 8 * sizes["Q/8"]
    check_shape("rotation_matrix", args.rotation_matrix, "D D", sizes)
    check_shape("qjl_projection", args.qjl_projection, "Q D", {**sizes, "Q": projections})
    if args.qjl_dim != projections:
        raise ValueError(f"qjl_dim: got {args.qjl_dim}, wants the {projections} rows of qjl_projection, or None")
    for name, bits in zip(("key_codebook", "value_codebook"), code_bits(args), strict=True):
        check_shape(name, getattr(args, name), "levels", {})
        most = 2 ** min(bits, args.bits)
        if not 0 < getattr(args, name).shape[0] <= most:
            raise ValueError(
                f"{name}: got shape {tuple(getattr(args, name).shape)}, wants [levels] with 1 to {most} levels for "
                f"pages of {bits}-bit codes and bits={args.bits}"
            )
    for name in ("rotation_matrix", "qjl_projection", "key_codebook", "value_codebook"):
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")


def code_bits(args: Any) -> tuple[int, int]:
    """Returns the bits of a code of keys and of values, which follow from the sizes of their pages.

    Raises:
        ValueError: Pages have a size that is none of D codes.
    """
    size = args.queries.shape[-1]
    names = ("key_indices_pages", "value_indices_pages")
    key_bits, value_bits = (bits_of_codes(name, getattr(args, name), size) for name in names)
    return key_bits, value_bits


def cache_fields(args: Any) -> dict[str, Any]:
    """Returns the fields of a paged-attention record that a TurboQuant cache, its queries and its tables give."""
    return {
        "query": args.queries,
        "key_pages": args.key_indices_pages,
        "value_pages": args.value_indices_pages,
        "key_signs": args.key_signs_pages if args.qjl_dim else None,
        "key_norms": args.key_norms_pages,
        "value_norms": args.value_norms_pages,
        "key_codebook": args.key_codebook,
        "value_codebook": args.value_codebook,
        "code_bits": code_bits(args),
        "rotation": args.rotation_matrix,
        "projection": args.qjl_projection if args.qjl_dim else None,
        "query_start": args.query_start_loc,
        "kv_lens": args.kv_lens,
        "kv_layout": paged_cache.LAYOUTS[0],
        "kv_heads": None,
        **score_fields(args, args.queries, args.queries.shape[-1]),
    }


def new_token_fields(args: Any) -> dict[str, Any]:
    """Returns the fields of a paged-attention record that the codes of new keys and values give."""
    key_bits, value_bits = code_bits(args)
    tables = args.rotation_matrix, args.key_codebook, args.qjl_projection
    keys = compute_rows(functools.partial(turboquant.encode_keys, bits=key_bits), (args.keys,), tables, axes=2)
    tables = args.rotation_matrix, args.value_codebook
    codes, norms = compute_rows(functools.partial(_encode_values, bits=value_bits), (args.values,), tables, axes=2)
    return {
        "new_keys": keys.codes,
        "new_key_signs": keys.signs if args.qjl_dim else None,
        "new_key_norms": keys.norms,
        "new_values": codes,
        "new_value_norms": norms,
    }


def _encode_values(x: jax.Array, rotation: jax.Array, codebook: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    encoded = turboquant.encode_vectors(x, rotation, codebook, bits)
    return encoded.codes, encoded.norms


def returned_pages(args: Any, written: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns all pages after a call, of which the signs are the given ones where there are none."""
    if args.qjl_dim:
        return written
    return (written[0], args.key_signs_pages, *written[1:])


def paged_record(args: Any, **fields: Any) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    return PagedAttention(**cache_fields(args), **fields)
