"""Device helpers that any family's kernels use: tiles in and out of memory, products, program ids, powers of two, and
where decode steps have their sequences and states.

`spec` is the constants of a kernel, a frozen dataclass of which these helpers read `PRECISION` and `WIDEN` (see
`dot`), and `PIECE` (see `dot_rows`).

A `RowTile` of a product of rows is a tuple (tile, base, start, valid, STRIDE): rows `start` on of the array at `base`,
whose rows are STRIDE apart. It is the tile itself, or where to load it from piece by piece: the compiler drops what is
not used. It is a plain tuple because Triton unpacks those at compile time.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def grouped_tile(program, ROWS, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Returns (row, column) of a program in a grid of tiles that goes down GROUP rows before the next column.

    Programs that run together then share the columns' operand in L2, instead of reading all of it once per row.
    """
    per_group = GROUP * COLUMNS
    first = (program // per_group) * GROUP
    height = tl.minimum(ROWS - first, GROUP)  # the last group may be lower
    within_group = program % per_group
    return first + within_group % height, within_group // height


@triton.jit
def load_tile(
    base,
    start,
    valid,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[ROWS, COLUMNS] from row `start` on; 0 in columns from WIDTH on and, if MASKED, in rows that are not valid."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    # 64 bits for where the tile begins, 32 for where an element is in it: 64-bit offsets of elements take registers.
    at = base + tl.cast(start, tl.int64) * STRIDE + (rows[:, None] * STRIDE + columns[None, :])
    # A predicate that is always true still costs: there are four loads, not one with a mask of constants.
    if MASKED:
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
    # Always with a predicate: stores are few next to loads.
    valid = (start + rows < LENGTH)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=valid)


@triton.jit
def load_vector(base, index, valid, MASKED: tl.constexpr):
    """Returns what is at the indices; 0 where it is not valid, if MASKED."""
    if MASKED:
        return tl.load(base + index, mask=valid, other=0)
    else:
        return tl.load(base + index)


@triton.jit
def within(index, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns which indices of a tile are below LENGTH: by construction all, where tiles end with it."""
    if LENGTH % BLOCK == 0:
        return tl.full([BLOCK], True, tl.int1)
    else:
        return index < LENGTH


@triton.jit
def dot(a, b, spec: tl.constexpr):
    """Returns a b, in float32 at the spec's precision."""
    if spec.WIDEN:  # Triton's interpreter multiplies bfloat16 as the integers that hold its bits
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=spec.PRECISION)
    else:
        return tl.dot(a, b, input_precision=spec.PRECISION)


@triton.jit
def add_dot(acc, a, b, spec: tl.constexpr):
    """acc + a b, in float32: the matrix unit adds to the accumulator, so it needs no second set of registers."""
    if spec.WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=spec.PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=spec.PRECISION)


@triton.jit
def load_piece(rows_of, column, WIDTH: tl.constexpr, spec: tl.constexpr):
    """Returns [ROWS, PIECE] of a RowTile from a column on; 0 from column WIDTH on and in rows that are not valid."""
    tile, base, start, valid, STRIDE = rows_of
    rows = tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, spec.PIECE)
    at = base + tl.cast(start, tl.int64) * STRIDE + (rows[:, None] * STRIDE + columns[None, :])
    return tl.load(at, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def add_dot_rows(acc, a, b, WIDTH: tl.constexpr, spec: tl.constexpr):
    """acc + a b^T of two RowTiles, in float32; PIECE columns at a time where registers do not hold whole rows."""
    a_tile, _, _, _, _ = a
    b_tile, _, _, _, _ = b
    # Pieces are read from the caches again by each product, and hold few registers. A backward pass with whole rows
    # of 256 float32 spills and takes 282 ms on an H200, with pieces 31.6 (docs/lab/triton_flash_attention.md).
    if spec.PIECE is None:
        return add_dot(acc, a_tile, tl.trans(b_tile), spec)
    else:
        for column in tl.range(0, WIDTH, spec.PIECE):
            left, right = load_piece(a, column, WIDTH, spec), load_piece(b, column, WIDTH, spec)
            acc = add_dot(acc, left, tl.trans(right), spec)
        return acc


@triton.jit
def dot_rows(a, b, WIDTH: tl.constexpr, spec: tl.constexpr):
    """Returns a b^T of two RowTiles, in float32."""
    a_tile, _, _, _, _ = a
    b_tile, _, _, _, _ = b
    return add_dot_rows(tl.zeros([a_tile.shape[0], b_tile.shape[0]], tl.float32), a, b, WIDTH, spec)


@triton.jit
def finite(x):
    """Returns x with 0 for -inf: rows that have seen nothing keep weights of exp2(-inf - 0) = 0 instead of NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def round_bfloat16(x):
    """float32 x with bfloat16's digits: to nearest, ties to even, which not every way of running Triton's cast does."""
    bits = x.to(tl.uint32, bitcast=True)
    # Half a unit of the last digit that stays, less one, and one more where that digit is odd: ties go to even.
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Returns tanh, by NVIDIA's approximate instruction if FAST: 11 bits, enough next to operands of 16 bits."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        # Right at both ends: exp2 is inf or 0 there, and the result 1 or -1.
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def at_batch(array, batch, PER: tl.constexpr, ELEMENTS: tl.constexpr):
    """Returns where a batch row's part of an array begins; PER rows share one. 64 bits: arrays may be large."""
    # The product has 64 bits because `batch` has: callers cast it.
    return array + (batch // PER) * ELEMENTS


@triton.jit
def tokens_of(bounds, sequence):
    """(first token, end) of a packed sequence, in 64 bits: a token's number times its stride may have more than 31."""
    # Kept in the L1 cache, through which states run: later programs of a multiprocessor read them too, and with slots
    # the state waits for them.
    first = tl.load(bounds + sequence, eviction_policy="evict_last").to(tl.int64)
    end = tl.load(bounds + sequence + 1, eviction_policy="evict_last").to(tl.int64)
    return first, end


@triton.jit
def slot_of(slots, sequence, first, end, SLOTS: tl.constexpr):
    """Returns (slot of a sequence with the tokens first to end, 1 if its state is read and kept there, else 0)."""
    slot = tl.load(slots + sequence, eviction_policy="evict_last").to(tl.int64)
    # A sequence without tokens leaves its slot alone, which may be another's too.
    return slot, tl.cast((slot >= 0) & (slot < SLOTS) & (end > first), tl.int32)


@triton.jit
def zero_outputs(
    output,
    bounds,
    sequence,
    columns,
    SEQUENCES: tl.constexpr,
    T: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes 0 to a sequence's share of the outputs of padding tokens, in columns below WIDTH.

    The output's memory is not initialised. The programs of all sequences share those tokens, which lie before the first
    sequence and after the last; rows of the output are STRIDE apart.
    """
    zeros = tl.zeros_like(columns).to(output.dtype.element_ty)
    before, behind = tl.load(bounds).to(tl.int64), tl.load(bounds + SEQUENCES).to(tl.int64)
    for token in tl.range(tl.cast(sequence, tl.int64), before, SEQUENCES):
        tl.store(output + token * STRIDE + columns, zeros, mask=columns < WIDTH)
    for token in tl.range(behind + sequence, behind * 0 + T, SEQUENCES):
        tl.store(output + token * STRIDE + columns, zeros, mask=columns < WIDTH)
