"""The refs of the decode step's kernel."""

import dataclasses

from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedDecodeRefs:
    """Refs of the kernel; those of features that a call does not have are None.

    Attributes:
        blocks: The lists of blocks, list by list, in scalar memory, as all tables; -1 for none.
        end_keys: The key after the last one of each query.
        first_keys: The first key of each query.
        page_table: The pages of each batch row, -1 for none.
        query: [heads, rows, D], the query heads of the KV heads of a step.
        keys: All keys in HBM, [copies, tokens, word rows, elements per word, D].
        values: All values, in the same way.
        output: Result, [heads, rows, Dv].
        lse: Result, float32 [heads, rows, 128], the same in every lane.
        key_buffer: Scratch, [buffers, lists, copies, tokens, word rows, elements per word, D]: the keys of this step
            and of later ones.
        value_buffer: Scratch, the values.
        row_max: Scratch, float32 [heads, rows, 128], the largest score of each row in an earlier step of its list.
        row_sum: Scratch, float32 [heads, rows, 128], the sum of exponentials.
        acc: Scratch, float32 [heads, rows, Dv], the sum of exponentials times values.
        valid_firsts: Scratch: the first token in each copy that the query attends to.
        valid_ends: Scratch: the token after the last one, 0 for what is not copied.
        partial_copies: Scratch: the copies with a token that the query does not attend to.
        counts: Scratch, int32 [buffers, 2]: how many copies of each step are started, and how many of all are partial.
        arrived: A semaphore per buffer.
    """

    blocks: Ref
    end_keys: Ref
    first_keys: Ref = None
    page_table: Ref = None
    query: Ref
    keys: Ref
    values: Ref
    output: Ref
    lse: Ref
    key_buffer: Ref
    value_buffer: Ref
    row_max: Ref
    row_sum: Ref
    acc: Ref
    valid_firsts: Ref
    valid_ends: Ref
    partial_copies: Ref
    counts: Ref
    arrived: Ref
