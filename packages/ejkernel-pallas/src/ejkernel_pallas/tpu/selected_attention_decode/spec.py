"""The compile-time constants of the decode step's kernel."""

import dataclasses
from typing import NamedTuple

import jax
from jax import lax

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.selected_attention import SelectedAttention, num_keys
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.selected_attention_decode import config as tiles
from ejkernel_pallas.tpu.selected_attention_decode.config import TpuSelectedDecode

MAX_KEYS_PER_PRODUCT = 512
"""The most keys of a product."""


class BlockLists(NamedTuple):
    """The keys that the queries of a branch attend to.

    Attributes:
        blocks: [B, T, Hk|1, N] int32, blocks of `block_size` keys, no block twice in a row; -1 for none.
        end_keys: [B, T] int32, the key after the last one of each query.
        first_keys: [B, T] int32, the first key of each query; None where that is the row's.
    """

    blocks: jax.Array
    end_keys: jax.Array
    first_keys: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedDecodeSpec:
    """Constants of the kernel.

    Attributes:
        num_queries: T, queries per batch row.
        kv_heads: Hk.
        heads_per_list: KV heads that share a list: 1, or all.
        lists_per_step: Lists of one query per grid step.
        group_size: Query heads per KV head.
        rows: `group_size`, padded to whole registers.
        block_size: Keys per block.
        blocks_per_step: Blocks of each list per grid step.
        steps_per_list: Grid steps that a list takes.
        slots_per_page: Slots of a page; the keys of a row for dense keys.
        table_entries: Entries of a row of the page table; 0 for dense keys.
        num_keys: Keys of a row.
        tokens_per_copy: Consecutive tokens that are copied at once.
        elements_per_word: Elements of keys and values in 32 bits.
        word_rows_per_token: Rows of 32-bit words of a token in HBM, one per `elements_per_word` heads; 1 for a single
            head, whose tokens share words.
        log2_scale: Factor on the scores, for scores that are exponents of two.
        precision: Precision of the products.
        dtype: Dtype of queries, keys and values.
        has_first_keys: Whether queries have a first key.
    """

    num_queries: int
    kv_heads: int
    heads_per_list: int
    lists_per_step: int
    group_size: int
    rows: int
    block_size: int
    blocks_per_step: int
    steps_per_list: int
    slots_per_page: int
    table_entries: int
    num_keys: int
    tokens_per_copy: int
    elements_per_word: int
    word_rows_per_token: int
    log2_scale: float
    precision: lax.Precision | None
    dtype: str
    has_first_keys: bool

    @property
    def has_single_head(self) -> bool:
        """Returns whether tokens share words, instead of heads."""
        return self.kv_heads == 1

    @property
    def heads_per_word(self) -> int:
        """Returns the KV heads that share words."""
        return 1 if self.has_single_head else self.elements_per_word

    @property
    def tokens_per_word(self) -> int:
        """Returns the tokens that share words."""
        return self.elements_per_word if self.has_single_head else 1

    @property
    def word_rows_per_copy(self) -> int:
        """Returns the rows of words that are copied of a token: that of a head, or all."""
        return self.word_rows_per_token if self.heads_per_list > 1 else 1

    @property
    def heads_per_step(self) -> int:
        """Returns the KV heads of a grid step."""
        return self.lists_per_step * self.heads_per_list

    @property
    def steps_per_query(self) -> int:
        """Returns the grid steps of a query."""
        return self.kv_heads // self.heads_per_step * self.steps_per_list

    @property
    def keys_per_step(self) -> int:
        """Returns the keys of each list per grid step."""
        return self.blocks_per_step * self.block_size

    @property
    def copies_per_block(self) -> int:
        """Returns the copies that a block takes."""
        return self.block_size // self.tokens_per_copy

    @property
    def copies_per_list(self) -> int:
        """Returns the copies of each list per grid step."""
        return self.blocks_per_step * self.copies_per_block

    @property
    def copies_per_step(self) -> int:
        """Returns the copies per grid step, of keys, and as many of values."""
        return self.lists_per_step * self.copies_per_list

    @property
    def keys_per_product(self) -> int:
        """Returns the keys of a product, a multiple of 128 that divides those of a step."""
        groups = self.keys_per_step // 128
        return 128 * max(n for n in range(1, min(groups, MAX_KEYS_PER_PRODUCT // 128) + 1) if groups % n == 0)


def make_spec(record: SelectedAttention, lists: BlockLists, config: TpuSelectedDecode) -> SelectedDecodeSpec:
    """Returns the constants of the kernel that attends to lists of blocks."""
    (_, tokens, heads, _), (slots, kv_heads) = record.query.shape, record.key.shape[1:3]
    config, packed = tiles.fit_config(record, config), tiles.elements_per_word(record)
    shares_list = lists.blocks.shape[2] == 1
    blocks_per_step = config.block_kv // record.block_size
    return SelectedDecodeSpec(
        num_queries=tokens,
        kv_heads=kv_heads,
        heads_per_list=kv_heads if shares_list else 1,
        lists_per_step=1 if shares_list else config.lists,
        group_size=heads // kv_heads,
        rows=tiles.padded_rows(record),
        block_size=record.block_size,
        blocks_per_step=blocks_per_step,
        steps_per_list=cdiv(lists.blocks.shape[3], blocks_per_step),
        slots_per_page=slots,
        table_entries=0 if record.block_tables is None else record.block_tables.shape[1],
        num_keys=num_keys(record),
        tokens_per_copy=tiles.tokens_per_copy(record),
        elements_per_word=packed,
        word_rows_per_token=1 if kv_heads == 1 else kv_heads // packed,
        log2_scale=record.softmax_scale * LOG2E,
        precision=product_precision(record.query.dtype),
        dtype=record.query.dtype.name,
        has_first_keys=lists.first_keys is not None,
    )
