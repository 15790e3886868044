"""The refs of the tiled-attention kernels, each with its shape: blocks of arrays, results and scratch memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ejkernel_pallas.tpu.mosaic.launch import Ref


def row_name(field: str, index: int) -> str:
    """Returns the name of an operand that is one of the refs `score_rows` or `mask_rows`."""
    return f"{field}_{index}"


def gather_rows(refs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that constructs refs by name, with those of `row_name` as tuples."""

    def construct(**named: Ref) -> Any:
        rows: dict[str, list[Ref]] = {}
        for name in [name for name in named if name.rpartition("_")[0] in ("score_rows", "mask_rows")]:
            rows.setdefault(name.rpartition("_")[0], []).append(named.pop(name))
        return refs(**named, **{field: tuple(listed) for field, listed in rows.items()})

    return construct


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileRefs:
    """Refs that every kernel reads for a tile pair; fields that the record does not have are None.

    Attributes:
        table: Tile pairs in scalar memory, as listed by module `plan`.
        query: [block_q, D].
        key: [block_kv, D].
        value: [block_kv, Dv].
        q_ids: Segment ids of queries, [1, block_q]; `k_ids` has those of keys, [1, block_kv].
        q_positions: Positions of queries, [1, block_q]; `k_positions` has those of keys, [1, block_kv].
        dropout_row_keys: Dropout's hash keys of queries, [1, block_q]; `dropout_column_keys` has those of keys, [1,
            block_kv].
        bias: [block_q, block_kv]; if it is a row, `bias_per_query` [1, block_q] or `bias_per_key` [1, block_kv].
        mask: In the same three forms as the bias.
        pattern: [block_q, block_kv].
        q_indices: Indices of queries in the whole call, [1, block_q], if the arrays are one shard of it; `k_indices`
            has those of keys, [1, block_kv].
        score_rows: The rows of `score_mod`, each [1, block_q], [1, block_kv] or, in scalar memory, [1, 1].
        mask_rows: The rows of `mask_mod`.
        dropout_keys_column: Scratch, [queries or keys of the accumulated tile, 128]: its hash keys, along sublanes.
    """

    table: Ref
    query: Ref
    key: Ref
    value: Ref
    q_ids: Ref = None
    k_ids: Ref = None
    q_positions: Ref = None
    k_positions: Ref = None
    dropout_row_keys: Ref = None
    dropout_column_keys: Ref = None
    bias: Ref = None
    bias_per_query: Ref = None
    bias_per_key: Ref = None
    mask: Ref = None
    mask_per_query: Ref = None
    mask_per_key: Ref = None
    pattern: Ref = None
    q_indices: Ref = None
    k_indices: Ref = None
    score_rows: tuple[Ref, ...] = ()
    mask_rows: tuple[Ref, ...] = ()
    dropout_keys_column: Ref = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardRefs(TileRefs):
    """Refs of the forward kernel.

    Attributes:
        sinks: [1, 128], a head's sink in every lane.
        output: [block_q, Dv].
        lse: [1, block_q].
        row_max: Scratch, [block_q, 128], the same in every lane.
        row_sum: Scratch, [block_q, 128]: partial sums per lane, or the whole sum if `TiledSpec.sums_on_mxu`.
        alpha: Scratch, [block_q, 128]: factor on `acc` and `row_sum`, the same in every lane.
        acc: Scratch, [block_q, Dv].
        scores: Scratch, two buffers [chunk_q, chunk_kv].
        weights: Scratch, two buffers of the same shape.
    """

    output: Ref
    lse: Ref
    row_max: Ref
    row_sum: Ref
    alpha: Ref
    acc: Ref
    scores: tuple[Ref, Ref]
    weights: tuple[Ref, Ref]
    sinks: Ref = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardRefs(TileRefs):
    """Refs of the backward kernels; a result and its accumulator are None if another kernel writes them.

    Attributes:
        cotangent: [block_q, Dv].
        log2_lse: Log-sum-exp as a power of two, [1, block_q].
        delta: <cotangent, output>, [1, block_q].
        dquery: [block_q, D].
        dkey: [block_kv, D].
        dvalue: [block_kv, Dv].
        dbias: A tile of the bias's gradient, or a row of it.
        dquery_acc: Scratch, float32; same for the other accumulators.
        log2_lse_column: Scratch, [block_q, 128], `log2_lse` in every lane; same for `delta_column`.
        weights: Scratch, two buffers of the shape of scores.
        dscores: Scratch, two buffers of the same shape.
    """

    cotangent: Ref
    log2_lse: Ref
    delta: Ref
    weights: tuple[Ref, Ref]
    dscores: tuple[Ref, Ref]
    dquery: Ref = None
    dkey: Ref = None
    dvalue: Ref = None
    dbias: Ref = None
    dquery_acc: Ref = None
    dkey_acc: Ref = None
    dvalue_acc: Ref = None
    dbias_acc: Ref = None
    log2_lse_column: Ref = None
    delta_column: Ref = None

    @property
    def accumulators(self) -> tuple[Any, ...]:
        """Returns the accumulators of the results that this kernel writes."""
        refs = (self.dkey_acc, self.dvalue_acc, self.dquery_acc, self.dbias_acc)
        return tuple(ref for ref in refs if ref is not None)
