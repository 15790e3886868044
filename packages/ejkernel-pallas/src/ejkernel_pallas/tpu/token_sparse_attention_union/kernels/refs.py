"""The arrays of the kernel that attends to the union of lists."""

import dataclasses

from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnionRefs:
    """Refs of the kernel.

    Attributes:
        first_key_tile: The first tile of keys of each tile of queries, in scalar memory.
        end_key_tile: The tile after the last one.
        query: [rows, lanes], with 1 in the lanes of the row's query among those of terms.
        indices: int32 [block_q, entries].
        key: [block_kv, lanes], with 0 in the lanes of terms.
        is_not_finite: float32 [block_kv / 128, 128], 1 for keys with numbers that are not finite.
        output: Result, [rows, Dv].
        lse: Result, float32 [rows, 128].
        counts: Scratch, float32 [keys / 128, block_q, 128], how often a query lists a key.
        not_finite_counts: Scratch, float32 [block_q, 128], how many entries of a query are keys that are not finite.
        is_before: Scratch, bfloat16 [256, 256], 1 above the diagonal.
        tail: Scratch, [block_kv, 128], the last lanes of this step's keys with their terms.
        slots: Scratch, int32 [block_kv / 256, 256], the slot of each key of this step in its group, -1 if it has none.
        union: Scratch, [keys, lanes], keys that some query lists and that were not attended yet.
        row_max: Scratch, float32 [rows, 128], the same in every lane.
        row_sum: Scratch, float32 [rows, 128], a sum per lane.
        acc: Scratch, float32 [rows, Dv].
        group_counts: Scratch, int32 in scalar memory: how many keys of each group of this step some query lists.
        union_end: Scratch, int32 [1] in scalar memory: the slot of `union` after the last key.
    """

    first_key_tile: Ref
    end_key_tile: Ref
    query: Ref
    indices: Ref
    key: Ref
    is_not_finite: Ref
    output: Ref
    lse: Ref
    counts: Ref
    not_finite_counts: Ref
    is_before: Ref
    tail: Ref
    slots: Ref
    union: Ref
    row_max: Ref
    row_sum: Ref
    acc: Ref
    group_counts: Ref
    union_end: Ref
