"""The compile-time constants of the kernel over codes."""

import dataclasses

import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.paged_attention.turboquant.config import CodeSplits
from ejkernel_triton.sizes import pad_to_power_of_two

MIN_TILE_ROWS = 16
"""Rows of the smallest tile of a product."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeSpec:
    """Constants of the kernel.

    Attributes:
        T: Query rows.
        HK: KV heads.
        G: Query heads per KV head.
        M: Rows of a tile of scores: G, padded.
        D: Head size.
        Q: Signs of a key; 0 for none.
        KEY_BITS: Bits of a code of keys.
        VALUE_BITS: Bits of a code of values.
        KEY_LEVELS: Entries of the keys' codebook.
        VALUE_LEVELS: Entries of the values' codebook.
        NUM_SEQUENCES: Rows of the block tables.
        PAGES_PER_SEQUENCE: Entries of such a row.
        NUM_PAGES: Pages of the cache.
        PAGE_SIZE: Slots of a page.
        BLOCK_KV: Keys per tile.
        NUM_SPLITS: Programs that share the keys of a row and a KV head.
        SCORE_SCALE: Factor on products; in base 2 if there is no soft cap.
        SOFT_CAP: Soft cap; None for none.
        DOT_DTYPE: Dtype of the operands of both products.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are multiplied in float32, as the interpreter needs it.
    """

    T: int
    HK: int
    G: int
    M: int
    D: int
    Q: int
    KEY_BITS: int
    VALUE_BITS: int
    KEY_LEVELS: int
    VALUE_LEVELS: int
    NUM_SEQUENCES: int
    PAGES_PER_SEQUENCE: int
    NUM_PAGES: int
    PAGE_SIZE: int
    BLOCK_KV: int
    NUM_SPLITS: int
    SCORE_SCALE: float
    SOFT_CAP: float | None
    DOT_DTYPE: str
    PRECISION: str
    WIDEN_TO_FLOAT32: bool


def make_code_spec(record: PagedAttention, config: CodeSplits) -> CodeSpec:
    """Returns the constants of the kernel for a record."""
    assert record.code_bits is not None
    assert record.key_codebook is not None
    assert record.value_codebook is not None
    assert record.block_tables is not None
    rows, heads, columns = record.query.shape
    kv_heads, size = paged_cache.kv_heads(record), paged_cache.value_head_dim(record)
    return CodeSpec(
        T=rows,
        HK=kv_heads,
        G=heads // kv_heads,
        M=max(MIN_TILE_ROWS, pad_to_power_of_two(heads // kv_heads)),
        D=size,
        Q=columns - size,
        KEY_BITS=record.code_bits[0],
        VALUE_BITS=record.code_bits[1],
        KEY_LEVELS=record.key_codebook.shape[0],
        VALUE_LEVELS=record.value_codebook.shape[0],
        NUM_SEQUENCES=record.block_tables.shape[0],
        PAGES_PER_SEQUENCE=record.block_tables.shape[1],
        NUM_PAGES=paged_cache.page_count(record),
        PAGE_SIZE=paged_cache.page_size(record),
        BLOCK_KV=config.block_kv,
        NUM_SPLITS=config.num_splits,
        SCORE_SCALE=record.softmax_scale,
        SOFT_CAP=record.logits_soft_cap,
        DOT_DTYPE=jnp.dtype(record.query.dtype).name,
        PRECISION="tf32x3" if current_device().vendor == "nvidia" else "ieee",
        WIDEN_TO_FLOAT32=is_interpreting(),
    )
