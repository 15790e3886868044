# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""One tile of the score matrix, in Triton: loading its operands, its scores, what the masks allow, and dropout.

Queries and keys of a tile are each described by a tuple of vectors (index, whether it is there and no padding, segment
id, position, dropout's number). Everything elementwise broadcasts, so that a tile may have queries along either axis:
`across` and `down` turn a description into columns [1, n] and rows [n, 1].

A side of a product of rows is a tuple (tile, where its array's rows begin, the tile's first row, which rows are kept,
stride of rows): the tile, or where to load it from piece by piece, in which case the compiler drops the tile.
"""

import triton
import triton.language as tl

from ejkernel_triton.tiled_attention import spec

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(spec.LOWEST)


@triton.jit
def load_tile(
    base,
    start,
    keep,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[ROWS, COLUMNS] from row `start` on; 0 in columns from WIDTH on and, if MASKED, in rows that are not kept."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    # 64 bits for where the tile begins, 32 for where an element is in it.
    at = base + tl.cast(start, tl.int64) * STRIDE + (rows[:, None] * STRIDE + columns[None, :])
    if MASKED:
        if COLUMNS != WIDTH:
            return tl.load(at, mask=keep[:, None] & (columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at, mask=keep[:, None], other=0.0)
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
    keep = (start + rows < LENGTH)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=keep)


@triton.jit
def product(a, b, spec: tl.constexpr):
    """a b, in float32."""
    if spec.WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=spec.PRECISION)
    else:
        return tl.dot(a, b, input_precision=spec.PRECISION)


@triton.jit
def add_product(sum, a, b, spec: tl.constexpr):
    """sum + a b, in float32."""
    if spec.WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sum, input_precision=spec.PRECISION)
    else:
        return tl.dot(a, b, sum, input_precision=spec.PRECISION)


@triton.jit
def add_rows(sum, a, b, WIDTH: tl.constexpr, spec: tl.constexpr):
    """sum + a b^T of two sides, in float32."""
    a_tile, _, _, _, _ = a
    b_tile, _, _, _, _ = b
    if spec.PIECE is None:
        return add_product(sum, a_tile, tl.trans(b_tile), spec)
    else:
        for column in tl.range(0, WIDTH, spec.PIECE):
            left, right = load_piece(a, column, WIDTH, spec), load_piece(b, column, WIDTH, spec)
            sum = add_product(sum, left, tl.trans(right), spec)
        return sum


@triton.jit
def product_of_rows(a, b, WIDTH: tl.constexpr, spec: tl.constexpr):
    """a b^T of two sides, in float32."""
    a_tile, _, _, _, _ = a
    b_tile, _, _, _, _ = b
    return add_rows(tl.zeros([a_tile.shape[0], b_tile.shape[0]], tl.float32), a, b, WIDTH, spec)


@triton.jit
def load_piece(side, column, WIDTH: tl.constexpr, spec: tl.constexpr):
    """[ROWS, PIECE] of a side from a column on; 0 from column WIDTH on and in rows that are not kept."""
    tile, base, start, keep, STRIDE = side
    rows = tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, spec.PIECE)
    at = base + tl.cast(start, tl.int64) * STRIDE + (rows[:, None] * STRIDE + columns[None, :])
    return tl.load(at, mask=keep[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def load_vector(base, index, keep, MASKED: tl.constexpr):
    """What is at the indices; 0 where it is not kept, if MASKED."""
    if MASKED:
        return tl.load(base + index, mask=keep, other=0)
    else:
        return tl.load(base + index)


@triton.jit
def within(index, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Which indices of a tile are below LENGTH: by construction all, where tiles end with it."""
    if LENGTH % BLOCK == 0:
        return tl.full([BLOCK], True, tl.int1)
    else:
        return index < LENGTH


@triton.jit
def queries_at(
    start,
    batch,
    head,
    ids,
    positions,
    numbers,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Describes the queries `start` to `start + BLOCK`; all are there unless MASKED."""
    index = start + tl.arange(0, BLOCK)
    real = within(index, spec.T, BLOCK)
    id = index
    position = index
    number = index
    if spec.DROPOUT:
        row = tl.cast(batch // per.DROPPED_ROWS, tl.int64) * spec.H + head
        number = load_vector(numbers + row * spec.T, index, real, MASKED)
    if spec.Q_POSITIONS:
        position = tl.load(positions + (batch // per.Q_POSITIONS) * spec.T + index, mask=real, other=0)
    if spec.SEGMENTS:
        id = tl.load(ids + tl.cast(batch // per.Q_IDS, tl.int64) * spec.T + index, mask=real, other=-1)
        real = real & (id >= 0)
        id = tl.where(real, id, -1)
    return index, real, id, position, number


@triton.jit
def keys_at(
    start,
    batch,
    ids,
    positions,
    numbers,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Describes the keys `start` to `start + BLOCK`; all are there unless MASKED."""
    index = start + tl.arange(0, BLOCK)
    real = within(index, spec.S, BLOCK)
    id = index
    position = index
    number = index
    if spec.DROPOUT:
        number = load_vector(numbers + (batch // per.DROPPED_COLUMNS) * spec.S, index, real, MASKED)
    if spec.K_POSITIONS:
        position = tl.load(positions + (batch // per.K_POSITIONS) * spec.S + index, mask=real, other=0)
    if spec.SEGMENTS:
        id = tl.load(ids + tl.cast(batch // per.K_IDS, tl.int64) * spec.S + index, mask=real, other=-1)
        real = real & (id >= 0)
        id = tl.where(real, id, -2)  # equals no query's, padding or not
    return index, real, id, position, number


@triton.jit
def down(described):
    """A description along the first axis of a tile, [n, 1] each."""
    index, real, id, position, counter = described
    return index[:, None], real[:, None], id[:, None], position[:, None], counter[:, None]


@triton.jit
def across(described):
    """A description along the second axis of a tile, [1, n] each."""
    index, real, id, position, counter = described
    return index[None, :], real[None, :], id[None, :], position[None, :], counter[None, :]


@triton.jit
def allowed(queries, keys, mask, spec: tl.constexpr):
    """Which pairs attend; `mask` points at this batch row and head."""
    q, q_real, q_id, q_position, _ = queries
    k, k_real, k_id, k_position, _ = keys
    pairs = q_real & k_real
    if spec.SEGMENTS:  # which differ for what is not there
        pairs = q_id == k_id
    if spec.LEFT is not None:
        pairs = pairs & (k_position >= q_position - spec.LEFT)
    if spec.RIGHT is not None:
        pairs = pairs & (k_position <= q_position + spec.RIGHT)
    if spec.MASK is not None:
        at = mask + place_of(q, k, spec.MASK[2], spec.MASK[3], spec)
        pairs = pairs & (tl.load(at, mask=pairs, other=0) != 0)
    return pairs


@triton.jit
def place_of(q, k, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, spec: tl.constexpr):
    """Where a pair is in what a head has of the bias or the mask; in 64 bits, which take registers, only if it must."""
    if spec.T * spec.S < 2**31:
        return q * Q_STRIDE + k * K_STRIDE
    else:
        return tl.cast(q, tl.int64) * Q_STRIDE + k * K_STRIDE


@triton.jit
def of_head(bias, mask, batch, head, spec: tl.constexpr, per: tl.constexpr):
    """Where a head of a batch row begins in the bias and in the mask; the pointers themselves without them."""
    if spec.BIAS is not None:
        bias = bias + tl.cast(batch // per.BIAS, tl.int64) * spec.BIAS[0] + tl.cast(head, tl.int64) * spec.BIAS[1]
    if spec.MASK is not None:
        mask = mask + tl.cast(batch // per.MASK, tl.int64) * spec.MASK[0] + tl.cast(head, tl.int64) * spec.MASK[1]
    return bias, mask


@triton.jit
def of_keys(key, value, batch, head, spec: tl.constexpr, per: tl.constexpr):
    """Where a KV head of a batch row begins in the keys and in the values."""
    k = key + (tl.cast(batch // per.KEY, tl.int64) * spec.S * spec.HK + head) * spec.D
    v = value + (tl.cast(batch // per.VALUE, tl.int64) * spec.S * spec.HK + head) * spec.DV
    return k, v


@triton.jit
def visits_of(visits, batch, tile, per: tl.constexpr, TILES: tl.constexpr):
    """What a tile visits: first, clear, unclear and last, as `visits._runs` says."""
    table = visits + ((batch // per.VISITS) * TILES + tile) * 4
    return tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)


@triton.jit
def transform(scores, queries, keys, bias, spec: tl.constexpr):
    """From products of queries and keys to what is times FACTOR a power of two; and the derivative of the soft cap."""
    slope = 1.0
    if spec.PLAIN:
        return scores, slope
    else:
        scores = scores * spec.SCALE
        if spec.BIAS is not None:
            q, q_real, _, _, _ = queries
            k, k_real, _, _, _ = keys
            at = bias + place_of(q, k, spec.BIAS[2], spec.BIAS[3], spec)
            scores += tl.load(at, mask=q_real & k_real, other=0.0).to(tl.float32)
        if spec.CAP is not None:
            bounded = _tanh(scores * (1.0 / spec.CAP), spec.FAST_TANH)
            slope = 1.0 - bounded * bounded
            scores = bounded * spec.CAP
        if spec.ROUND == "bfloat16":
            # To the nearest, ties to even, which not every way of running Triton does on its own.
            bits = scores.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            scores = bits.to(tl.float32, bitcast=True)
        if spec.ROUND == "float16":
            scores = scores.to(tl.float16).to(tl.float32)
        return scores, slope


@triton.jit
def powers(scores, spec: tl.constexpr):
    """Scores as powers of two; -inf stays what it is."""
    if spec.BIASED:
        return tl.where(scores == float("-inf"), scores, tl.maximum(scores * spec.FACTOR, LOWEST))
    else:
        return scores * spec.FACTOR


@triton.jit
def drop(weights, queries, keys, spec: tl.constexpr):
    """Weights with those that are dropped at 0; the others are not scaled up."""
    if spec.DROPOUT:
        _, _, _, _, row = queries
        _, _, _, _, column = keys
        return tl.where(row * column >= spec.THRESHOLD, weights, 0.0)
    else:
        return weights


@triton.jit
def finite(x):
    """x with 0 for -inf: rows that have seen nothing keep weights of exp2(-inf - 0) = 0 instead of NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
