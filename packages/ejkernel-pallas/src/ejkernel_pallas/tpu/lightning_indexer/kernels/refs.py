"""The refs of the indexer's kernel."""

import dataclasses

from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerRefs:
    """Refs of the kernel; `key_scales` is None where there are none.

    Attributes:
        first_key_tile: The first tile of keys of each block of queries, in scalar memory.
        end_key_tile: The tile after the last one.
        query: [H 128, D], head by head.
        weights: float32 [H, 128].
        key_starts: int32 [1, 128].
        key_ends: int32 [1, 128].
        key: [block_k, D].
        key_scales: float32 [1, block_k].
        indices: Result, int32 [128, rows of the selected keys].
        scores: Result, float32, in the same shape.
        ordered_scores: Scratch, int32 [rows, 128]: scores as integers in the order of numbers, a lane per query. The
            selected keys are in the first rows.
        packed_indices: Scratch, int32 [rows, 128]: the indices of keys, and how many rows each still has to move.
        num_scored_tiles: Scratch, int32 [1] in scalar memory: tiles of keys since the last selection.
    """

    first_key_tile: Ref
    end_key_tile: Ref
    query: Ref
    weights: Ref
    key_starts: Ref
    key_ends: Ref
    key: Ref
    key_scales: Ref = None
    indices: Ref
    scores: Ref
    ordered_scores: Ref
    packed_indices: Ref
    num_scored_tiles: Ref
