"""The refs of the decode step's kernel."""

import dataclasses

from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerDecodeRefs:
    """Refs of the kernel. Those of pages are None for dense keys, `key_scales` is None where there are none.

    Attributes:
        num_steps: [1], the steps of the grid, in scalar memory, as all tables.
        step_rows: The batch row of each step.
        step_tiles: The tile of keys of each step.
        first_tiles: The first tile of each row.
        end_tiles: The tile after the last one.
        key_starts: The first key that each query may select.
        key_ends: The key after the last one.
        page_table: The pages of all tiles of each row, -1 for one that is not copied.
        num_copied_pages: How many pages of each tile are copied.
        query: [T H, D].
        weights: float32 [T H, 128], the same in every lane.
        key: A tile of dense keys, [block_k, D], or all pages in HBM, [P, S, D].
        key_scales: float32 [1, block_k].
        indices: Result, int32 [T, rows of a list, 128].
        scores: Result, float32, in the same shape.
        ordered_scores: Scratch, int32 [T, rows, 128]: scores as integers in the order of numbers, 128 keys per row.
        thresholds: Scratch, int32 [T, 128]: the ordered score of the last selected key of each query, in every lane.
        num_ties: Scratch, float32 [T, 128]: how many keys of this score are selected.
        positions: Scratch, int32 [rows, 128]: the positions of the selected keys of one query in its list, else -1.
        placed: Scratch, float32 [bytes rows of a list, 128]: the bytes of scores and indices in a list.
        list_scores: Scratch, int32 [rows of a list, 128]: the selected ordered scores of one query.
        list_indices: Scratch: their keys.
        list_positions: Scratch: their positions in descending order, -1 after the last one.
        score_columns: Scratch, int32 [128 rows of a list, 128]: the selected scores, the same in every lane.
        key_buffer: Scratch, [2, block_k, D]: the keys of this step and of the next one.
        pages_arrived: A semaphore per buffer.
    """

    num_steps: Ref
    step_rows: Ref
    step_tiles: Ref
    first_tiles: Ref
    end_tiles: Ref
    key_starts: Ref
    key_ends: Ref
    page_table: Ref = None
    num_copied_pages: Ref = None
    query: Ref
    weights: Ref
    key: Ref
    key_scales: Ref = None
    indices: Ref
    scores: Ref
    ordered_scores: Ref
    thresholds: Ref
    num_ties: Ref
    positions: Ref
    placed: Ref
    list_scores: Ref
    list_indices: Ref
    list_positions: Ref
    score_columns: Ref
    key_buffer: Ref = None
    pages_arrived: Ref = None
