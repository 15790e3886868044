"""Device helpers for the kernels of all families: loads and stores of tiles, products, program ids, powers of two, and
the sequences and states of decode steps.

`spec` is the constants of a kernel, a frozen dataclass of which these helpers read `PRECISION` and `WIDEN_TO_FLOAT32`
(see `dot`), and `COLUMNS_PER_SLICE` (see `dot_transposed`).

A `RowTile` is an operand of `dot_transposed`, a tuple (tile, base, start, valid, STRIDE): the rows from `start` on of
the array at `base`, whose rows are STRIDE apart. It has both the loaded tile and the address to load it from piece by
piece; the compiler drops the one that is not used. It is a plain tuple because Triton unpacks those at compile time.
"""

import triton
import triton.language as tl

from ejkernel.arithmetic import LN2 as LN2_VALUE
from ejkernel.arithmetic import LOG2E as LOG2E_VALUE

LOG2E = tl.constexpr(LOG2E_VALUE)
LN2 = tl.constexpr(LN2_VALUE)


@triton.jit
def swizzled_tile_index(program, NUM_TILE_ROWS, NUM_TILE_COLUMNS: tl.constexpr, TILE_ROWS_PER_GROUP: tl.constexpr):
    """Returns (row, column) of a program in a grid of tiles that is traversed in groups of TILE_ROWS_PER_GROUP rows.

    A group's tiles are ordered column by column, so that programs that run together share the columns' operand in L2.
    """
    tiles_per_group = TILE_ROWS_PER_GROUP * NUM_TILE_COLUMNS
    first_tile_row = (program // tiles_per_group) * TILE_ROWS_PER_GROUP
    group_tile_rows = tl.minimum(
        NUM_TILE_ROWS - first_tile_row, TILE_ROWS_PER_GROUP
    )  # the last group may have fewer rows
    within_group = program % tiles_per_group
    return first_tile_row + within_group % group_tile_rows, within_group // group_tile_rows


@triton.jit
def convert_to_dtype(x, DTYPE: tl.constexpr):
    """Returns a tile in the floating dtype of a name: "float32", "bfloat16" or "float16"."""
    if DTYPE == "float32":
        return x.to(tl.float32)
    elif DTYPE == "bfloat16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float16)


@triton.jit
def load_tile(
    base,
    start,
    valid,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Loads [ROWS, COLUMNS] from row `start` on; 0 in columns from WIDTH on and, if IS_MASKED, in rows that are not
    valid.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    # The tile's address has 64 bits, offsets within it 32: 64-bit offsets of elements take registers.
    at = base + tl.cast(start, tl.int64) * STRIDE + (rows[:, None] * STRIDE + columns[None, :])
    # A mask costs time even if it is always true, so there are four loads instead of one with constant masks.
    if IS_MASKED:
        if COLUMNS != WIDTH:
            return tl.load(at, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at, mask=valid[:, None], other=0.0)
    else:
        if COLUMNS != WIDTH:
            return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def store_tile(
    base,
    start,
    tile,
    STRIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes [ROWS, COLUMNS] to rows `start` to LENGTH and columns to WIDTH."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    at = base + tl.cast(start, tl.int64) * STRIDE + (rows[:, None] * STRIDE + columns[None, :])
    # Stores always have a mask: they are few compared with loads.
    valid = (start + rows < LENGTH)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=valid)


@triton.jit
def load_vector(base, index, valid, IS_MASKED: tl.constexpr):
    """Loads the elements at `index`; 0 for those that are not valid, if IS_MASKED."""
    if IS_MASKED:
        return tl.load(base + index, mask=valid, other=0)
    else:
        return tl.load(base + index)


@triton.jit
def bounds_mask(index, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns which indices of a tile are below LENGTH: a constant if tiles end with it."""
    if LENGTH % BLOCK == 0:
        return tl.full([BLOCK], True, tl.int1)
    else:
        return index < LENGTH


@triton.jit
def dot(a, b, spec: tl.constexpr):
    """Returns a b, in float32 at the spec's precision."""
    if spec.WIDEN_TO_FLOAT32:  # Triton's interpreter multiplies the bits of bfloat16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=spec.PRECISION)
    else:
        return tl.dot(a, b, input_precision=spec.PRECISION)


@triton.jit
def add_dot(acc, a, b, spec: tl.constexpr):
    """Returns acc + a b in float32. The matrix unit adds to the accumulator in place, which saves a second set of
    registers.
    """
    if spec.WIDEN_TO_FLOAT32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=spec.PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=spec.PRECISION)


@triton.jit
def load_column_slice(row_tile, column, WIDTH: tl.constexpr, spec: tl.constexpr):
    """Loads [ROWS, COLUMNS_PER_SLICE] of a RowTile from `column` on; 0 from column WIDTH on and in rows that are not
    valid.
    """
    tile, base, start, valid, STRIDE = row_tile
    rows = tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, spec.COLUMNS_PER_SLICE)
    at = base + tl.cast(start, tl.int64) * STRIDE + (rows[:, None] * STRIDE + columns[None, :])
    return tl.load(at, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def add_dot_transposed(acc, a, b, WIDTH: tl.constexpr, spec: tl.constexpr):
    """Returns acc + a b^T of two RowTiles, in float32; COLUMNS_PER_SLICE columns at a time if whole rows would
    spill.
    """
    a_tile, _, _, _, _ = a
    b_tile, _, _, _, _ = b
    # Each product reloads its pieces from the caches, which needs few registers. A backward pass with whole rows of 256
    # float32 spills and takes 282 ms on an H200, with pieces 31.6 (docs/lab/triton_flash_attention.md).
    if spec.COLUMNS_PER_SLICE is None:
        return add_dot(acc, a_tile, tl.trans(b_tile), spec)
    else:
        for column in tl.range(0, WIDTH, spec.COLUMNS_PER_SLICE):
            a_piece, b_piece = load_column_slice(a, column, WIDTH, spec), load_column_slice(b, column, WIDTH, spec)
            acc = add_dot(acc, a_piece, tl.trans(b_piece), spec)
        return acc


@triton.jit
def dot_transposed(a, b, WIDTH: tl.constexpr, spec: tl.constexpr):
    """Returns a b^T of two RowTiles, in float32."""
    a_tile, _, _, _, _ = a
    b_tile, _, _, _, _ = b
    return add_dot_transposed(tl.zeros([a_tile.shape[0], b_tile.shape[0]], tl.float32), a, b, WIDTH, spec)


@triton.jit
def minus_inf_to_zero(x):
    """Replaces -inf by 0, so that rows without any key yet get weights exp2(-inf - 0) = 0 instead of NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def round_bfloat16(x):
    """Rounds float32 x to bfloat16's precision, to nearest with ties to even; Triton's cast does not in all
    environments.
    """
    bits = x.to(tl.uint32, bitcast=True)
    # Adds just under half a unit of the last kept digit, plus one if that digit is odd, so that ties go to even.
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Returns tanh; if FAST, by NVIDIA's approximate instruction, whose 11 bits suffice for 16-bit operands."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        # Correct in both limits: exp2 is inf or 0, and the result 1 or -1.
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def power(x, y):
    """Returns `x` to the power of `y`, float32; NaN if `x` is negative and `y` is no integer."""
    magnitude = tl.where(y == 0.0, 1.0, tl.exp2(y * tl.log2(tl.abs(x))))
    is_odd = tl.floor(y * 0.5) * 2.0 != y
    of_negative = tl.where(tl.floor(y) == y, tl.where(is_odd, -magnitude, magnitude), float("nan"))
    return tl.where(x < 0.0, of_negative, magnitude)


@triton.jit
def batch_row_address(array, batch, PER: tl.constexpr, ELEMENTS_PER_ENTRY: tl.constexpr):
    """Returns the address of a batch row in an array in which PER rows share one entry, in 64 bits: arrays may be
    large.
    """
    # The product has 64 bits because `batch` has: callers cast it.
    return array + (batch // PER) * ELEMENTS_PER_ENTRY


@triton.jit
def load_token_range(cu_seqlens, sequence):
    """Returns (first token, end) of a packed sequence in 64 bits: a token's index times its stride may need more
    than 31 bits.
    """
    # Evicted last from the L1 cache, through which states stream: later programs of a multiprocessor read them too, and
    # with slots the load of the state depends on them.
    first_token = tl.load(cu_seqlens + sequence, eviction_policy="evict_last").to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1, eviction_policy="evict_last").to(tl.int64)
    return first_token, end


@triton.jit
def load_state_slot(slots, sequence, first_token, end, NUM_SLOTS: tl.constexpr):
    """Returns (slot of a sequence with the tokens first to end, 1 if its state is loaded and stored there, else 0)."""
    slot = tl.load(slots + sequence, eviction_policy="evict_last").to(tl.int64)
    # A sequence without tokens does not touch its slot, which may belong to another sequence too.
    return slot, tl.cast((slot >= 0) & (slot < NUM_SLOTS) & (end > first_token), tl.int32)


@triton.jit
def zero_padding_outputs(
    output,
    cu_seqlens,
    sequence,
    columns,
    NUM_SEQUENCES: tl.constexpr,
    T: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes 0 to a sequence's share of the outputs of padding tokens, in columns below WIDTH.

    The output's memory is not initialised. The programs of all sequences share the padding tokens, which are before the
    first sequence and after the last; rows of the output are STRIDE apart.
    """
    zeros = tl.zeros_like(columns).to(output.dtype.element_ty)
    sequences_start, sequences_end = tl.load(cu_seqlens).to(tl.int64), tl.load(cu_seqlens + NUM_SEQUENCES).to(tl.int64)
    for token in tl.range(tl.cast(sequence, tl.int64), sequences_start, NUM_SEQUENCES):
        tl.store(output + token * STRIDE + columns, zeros, mask=columns < WIDTH)
    for token in tl.range(sequences_end + sequence, sequences_end * 0 + T, NUM_SEQUENCES):
        tl.store(output + token * STRIDE + columns, zeros, mask=columns < WIDTH)
