"""The paged softmax attention family: attention over a key-value cache that lies in pages, for inference."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.record import (
    PagedAttention,
    Window,
    causal_window_bounds,
    in_same_chunk,
    qq_bias_of_pairs,
    qq_bias_starts,
    round_to_compute_dtype,
    sequences_and_heads_in_call,
)
from ejkernel.families.paged_attention.reference import reference
from ejkernel.families.paged_attention.rotation import key_head_dim
from ejkernel.planning.requests import PADDING, UNUSED, claim_entries

__all__ = [
    "FAMILY",
    "PagedAttention",
    "Window",
    "apply_shard_offsets",
    "axes",
    "causal_window_bounds",
    "in_same_chunk",
    "qq_bias_of_pairs",
    "qq_bias_starts",
    "reference",
    "requests",
    "round_to_compute_dtype",
    "sequences_and_heads_in_call",
]


def apply_shard_offsets(record: PagedAttention, offsets: Mapping[str, jax.Array]) -> PagedAttention:
    """Returns one shard's record: heads are independent, and so are sequences; only functions of pairs read global
    indices.

    Raises:
        ValueError: A cache with padding heads is split by KV heads: a shard cannot tell which of its heads are padding.
    """
    if ("g" in offsets or "h" in offsets) and record.kv_heads is not None:
        raise ValueError(f"in_specs: a cache with padded heads cannot be split by its {record.kv_heads} KV heads")
    if record.score_mod is None and record.mask_mod is None:
        return record
    origin = jnp.stack([jnp.int32(offsets.get(letter, 0)) for letter in "rh"])
    return dataclasses.replace(record, index_origin=origin)


def axes(record: PagedAttention) -> dict[str, Any]:
    """Returns axis letters of a record's fields and of its outputs: the cache's follow from its layout.

    r counts sequences; without `query_start` they have a query row each. Without `block_tables` each has its own page.
    """
    rows = "r" if record.query_start is None else "t"
    pages = record.kv_layout.replace("h", "g")
    pages = " ".join(pages if record.block_tables is not None else pages.replace("p", "r"))
    values = pages.replace("d", "v")
    written = () if record.new_keys is None else (pages,) if record.value_pages is None else (pages, values)
    of_codes = {} if record.code_bits is None else _axes_of_codes(record)
    if of_codes and written:
        written = tuple(of_codes[name] for name in paged_cache.NEW_CODES_BY_PAGES if getattr(record, name) is not None)
    return {
        "query": f"{rows} h d",
        "key_pages": pages,
        "value_pages": values,
        "block_tables": "r k",
        "kv_lens": "r",
        "query_start": "n",
        "kv_starts": "r",
        "num_seqs": "counts" if record.num_seqs is not None and record.num_seqs.ndim else "",
        "shared_prefix": "",
        "softmax_aux": "h",
        "alibi_slopes": "h",
        "qq_bias": ("", "pairs", "i j", "r i j")[0 if record.qq_bias is None else record.qq_bias.ndim],
        "score_mod": None,
        "mask_mod": None,
        "index_origin": "c",
        "new_keys": "t g d",
        "new_values": "t g v",
        **of_codes,
        "output": (f"{rows} h v", f"{rows} h", *written),
    }


def _axes_of_codes(record: PagedAttention) -> dict[str, str]:
    """Returns axis letters of pages, new tokens, codebooks and rotations of a cache of codes."""
    sizes = {
        "key_pages": " key_bytes",
        "key_signs": " sign_bytes",
        "key_norms": " norms",
        "value_pages": " value_bytes",
        "value_norms": "",
    }
    new = {paged_cache.NEW_CODES_BY_PAGES[name]: f"t g{size}" for name, size in sizes.items()}
    tables = {
        "key_codebook": "key_levels",
        "value_codebook": "value_levels",
        "rotation": "rotated_columns columns",
        "projection": "projections columns",
    }
    return {**{name: f"p s g{size}" for name, size in sizes.items()}, **new, **tables}


def requests(record: PagedAttention) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: the sequences, with the slots of the cache that hold their tokens."""
    sequences, tokens = (
        np.arange(record.kv_lens.shape[0]),
        np.asarray(paged_cache.token_sequences_and_positions(record)[0]),
    )
    live = paged_cache.num_live_sequences(record)
    lens, starts = np.asarray(record.kv_lens), np.zeros_like(sequences)
    if record.kv_starts is not None:
        starts = np.asarray(record.kv_starts)
    pages = np.full((paged_cache.page_count(record), paged_cache.page_size(record)), UNUSED)
    for n in sequences if live is None else sequences[: int(live)]:
        position = np.arange(starts[n], min(lens[n], paged_cache.max_sequence_len(record)), dtype=np.int32)
        page, slot = (
            np.asarray(x) for x in paged_cache.find_pages_and_slots(record, jnp.int32(n), jnp.asarray(position))
        )
        in_pages = page < pages.shape[0]
        claim_entries(pages, (page[in_pages], slot[in_pages]), n)
    places = "r s" if record.block_tables is None else "p s"
    return (
        {
            "t": tokens,
            "r": sequences if live is None else np.where(sequences < int(live), sequences, PADDING),
            places: pages,
        },
    )


FAMILY = Family(
    name="paged_attention",
    record=PagedAttention,
    differentiable=(),
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (key_head_dim(record), paged_cache.value_head_dim(record)),
    axes=axes,
    # A shard without the first sequence lacks the page table row of a prefix that all share.
    shardable=lambda record: "rhg" if record.query_start is None and record.shared_prefix is None else "hg",
    aligned=(("h", "g"),),
    apply_shard_offsets=apply_shard_offsets,
    reference=reference,
    requests=requests,
    invariances=lambda record: frozenset({"batch", "padding", "chunking", "pages"}),
)
