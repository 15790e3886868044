"""The compile-time constants of the tiled-attention kernels."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.ops.device import current_device
from ejkernel.planning import dropout
from ejkernel.planning.scalar_programs import derivatives_by_loads, loaded_arrays, scalar_program
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.scalar_functions import pack_arrays, triton_function
from ejkernel_triton.sizes import AttentionSizes, pad_to_dot_size

LOWEST_LOG2_SCORE = -3e38
"""The lowest score in base 2: scores that a bias sets to the lowest float must stay finite."""

NUM_ORIGIN_WORDS = 4
"""The words before the arrays of `score_mod` and `mask_mod`."""

Strides = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledSpec(AttentionSizes):
    """Constants of a kernel; the letters are those of the record.

    Attributes:
        SCALE: Factor on the scores.
        SCORES_ARE_ONLY_SCALED: Whether a score is a product times a positive factor, which is then part of
            `LOG2_SCORE_FACTOR`.
        LOG2_SCORE_FACTOR: Converts scores to base 2.
        SCORES_MAY_BE_MINUS_INF: Whether scores may be as low as the lowest float, or -inf.
        WINDOW_LEFT: Band: `-WINDOW_LEFT <= k - q`; None is open.
        WINDOW_RIGHT: Band: `k - q <= WINDOW_RIGHT`; None is open.
        HAS_Q_POSITIONS: Whether there are query positions.
        HAS_K_POSITIONS: Whether there are key positions.
        HAS_SEGMENTS: Whether there are segment ids.
        BIAS_STRIDES: Strides of the bias over its rows, heads, queries and keys, 0 where it broadcasts; None without
            it.
        MASK_STRIDES: Strides of the mask, in the same form; None without it.
        PATTERN_TILE_SHAPE: Queries and keys of a tile mask of the pattern; None without one.
        SOFT_CAP: Soft cap, or None.
        FAST_TANH: Whether the device has an approximate tanh, and it is precise enough.
        SCORE_ROUNDING_DTYPE: "bfloat16" or "float16", the dtype that scores are rounded to; None for neither.
        HAS_DROPOUT: Whether weights are dropped: where the row's key times the column's is below DROPOUT_THRESHOLD.
        DROPOUT_THRESHOLD: Dropout probability times 2 ** 32.
        KEPT_WEIGHT_SCALE: Factor on the weights that are not dropped.
        NORMALIZE: Whether outputs are normalised.
        HAS_SINKS: Whether there are sinks.
        COLUMNS_PER_SLICE: Columns per product, for rows too long for registers; None for all.
        PRECISION: How Triton multiplies float32 tiles.
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
        SCORE_MOD: The `triton.jit` function of `score_mod`, or None.
        MASK_MOD: That of `mask_mod`, or None.
        FUNCTION_WORDS: Words of the buffer with what these functions read, from `pair_function_words`; None without
            them.
        BATCH: Batch rows of the call with these functions; None without them.
        DIFFERENTIATES_LOAD: Whether `SCORE_MOD` returns the derivative by an element that it loads instead of by the
            score.
    """

    SCALE: float
    SCORES_ARE_ONLY_SCALED: bool
    LOG2_SCORE_FACTOR: float
    SCORES_MAY_BE_MINUS_INF: bool
    WINDOW_LEFT: int | None
    WINDOW_RIGHT: int | None
    HAS_Q_POSITIONS: bool
    HAS_K_POSITIONS: bool
    HAS_SEGMENTS: bool
    BIAS_STRIDES: Strides | None
    MASK_STRIDES: Strides | None
    PATTERN_TILE_SHAPE: tuple[int, int] | None
    SOFT_CAP: float | None
    FAST_TANH: bool
    SCORE_ROUNDING_DTYPE: str | None
    HAS_DROPOUT: bool
    DROPOUT_THRESHOLD: int
    KEPT_WEIGHT_SCALE: float
    NORMALIZE: bool
    HAS_SINKS: bool
    COLUMNS_PER_SLICE: int | None
    PRECISION: str
    WIDEN_TO_FLOAT32: bool
    SCORE_MOD: Any = None
    MASK_MOD: Any = None
    FUNCTION_WORDS: int | None = None
    BATCH: int | None = None
    DIFFERENTIATES_LOAD: bool = False


class SharedMemoryCopies(NamedTuple):
    """How many copies shared memory holds of the rows that a program keeps, and of those of a stage that it streams."""

    copies_of_stationary_row: int
    copies_of_streamed_row: int


HALF_PRECISION_COPIES = {
    "forward": SharedMemoryCopies(1, 2),
    "keys": SharedMemoryCopies(2, 2),
    "queries": SharedMemoryCopies(2, 2),
}
FLOAT32_COPIES = {
    "forward": SharedMemoryCopies(2, 1),
    "keys": SharedMemoryCopies(4, 2),
    "queries": SharedMemoryCopies(4, 2),
}
"""For float32, whose split operands pass through shared memory."""
SLICED_ROW_COPIES = {
    "forward": SharedMemoryCopies(2, 1),
    "keys": SharedMemoryCopies(0, 1),
    "queries": SharedMemoryCopies(0, 1),
}
"""For float32 with rows that the backward kernels multiply in pieces."""


def make_spec(record: TiledAttention, block_q: int, block_kv: int, *, slice_rows: bool) -> TiledSpec:
    """Returns the constants of a record's kernels on the device in use, for tiles of a size.

    Args:
        record: The record in the kernels' dtypes.
        block_q: Queries per tile.
        block_kv: Keys per tile.
        slice_rows: The result of `slices_rows` for the tiles.
    """
    (_, t, h, d), (_, s, hk, dv) = record.query.shape, record.value.shape
    (left, right), vendor = causal_window_bounds(record), current_device().vendor
    rounding_dtype = None if record.logits_dtype == jnp.float32 else jnp.dtype(record.logits_dtype).name
    is_scaled_product = _is_scaled_product(record)
    return TiledSpec(
        T=t,
        S=s,
        H=h,
        HK=hk,
        G=h // hk,
        D=d,
        DV=dv,
        BD=pad_to_dot_size(d),
        BV=pad_to_dot_size(dv),
        SCALE=record.softmax_scale,
        SCORES_ARE_ONLY_SCALED=is_scaled_product,
        LOG2_SCORE_FACTOR=record.softmax_scale * LOG2E if is_scaled_product else LOG2E,
        SCORES_MAY_BE_MINUS_INF=record.bias is not None or record.score_mod is not None,
        WINDOW_LEFT=left,
        WINDOW_RIGHT=right,
        HAS_Q_POSITIONS=record.q_positions is not None,
        HAS_K_POSITIONS=record.kv_positions is not None,
        HAS_SEGMENTS=record.q_segment_ids is not None,
        BIAS_STRIDES=_broadcast_strides(record.bias),
        MASK_STRIDES=_broadcast_strides(record.mask),
        PATTERN_TILE_SHAPE=None if record.pattern is None else (block_q, block_kv),
        SOFT_CAP=record.logits_soft_cap,
        FAST_TANH=vendor == "nvidia" and record.query.dtype != jnp.float32 and not is_interpreting(),
        SCORE_ROUNDING_DTYPE=rounding_dtype,
        HAS_DROPOUT=record.dropout_prob > 0.0,
        DROPOUT_THRESHOLD=dropout.dropout_threshold(record.dropout_prob),
        KEPT_WEIGHT_SCALE=1.0 / (1.0 - record.dropout_prob),
        NORMALIZE=record.normalize_output,
        HAS_SINKS=record.softmax_aux is not None,
        COLUMNS_PER_SLICE=64 if slice_rows else None,
        PRECISION=_precision(record, vendor),
        WIDEN_TO_FLOAT32=is_interpreting() and record.query.dtype == jnp.bfloat16,
        **_pair_functions(record),
    )


def _pair_functions(record: TiledAttention) -> dict[str, Any]:
    """Returns the constants of the caller's functions, and the words of their arrays."""
    if not has_pair_functions(record):
        return {}
    constants: dict[str, Any] = {}
    num_words = NUM_ORIGIN_WORDS
    for name in ("score_mod", "mask_mod"):
        function = getattr(record, name)
        if function is not None:
            shapes = tuple(x.shape for x in jax.eval_shape(loaded_arrays, function))
            constants[name.upper()] = triton_function(name, scalar_program(function), shapes, num_words)
            num_words += sum(map(math.prod, shapes))
    return {**constants, "FUNCTION_WORDS": num_words, "BATCH": record.query.shape[0]}


def specs_of_loads(record: TiledAttention, spec: TiledSpec) -> dict[int, TiledSpec]:
    """Returns the constants of the kernels of gradients of `score_mod`'s elements, by the node of a load."""
    function = record.score_mod
    assert function is not None  # the gradient of its arrays is requested
    program, derivatives = derivatives_by_loads(scalar_program(function))
    shapes = tuple(x.shape for x in jax.eval_shape(loaded_arrays, function))
    return {
        load: dataclasses.replace(
            spec,
            SCORE_MOD=triton_function("score_mod_of_load", program, shapes, NUM_ORIGIN_WORDS, derivative),
            DIFFERENTIATES_LOAD=True,
        )
        for load, derivative in derivatives.items()
    }


def pair_function_words(record: TiledAttention) -> jax.Array:
    """Returns what the caller's functions read, int32 [1, words]: the index in the whole call of the first batch row,
    head, query and key, and then the arrays.
    """
    origin = jnp.zeros(NUM_ORIGIN_WORDS, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    functions = [x for x in (record.score_mod, record.mask_mod) if x is not None]
    return pack_arrays([origin.astype(jnp.int32), *(array for x in functions for array in loaded_arrays(x))])


def _is_scaled_product(record: TiledAttention) -> bool:
    """Returns whether a score is a product times a positive factor, with nothing else applied."""
    terms = (record.bias, record.logits_soft_cap, record.score_mod)
    has_other_terms = any(x is not None for x in terms)
    return not has_other_terms and record.logits_dtype == jnp.float32 and record.softmax_scale > 0


def has_pair_functions(record: TiledAttention) -> bool:
    """Returns whether the caller gives `score_mod` or `mask_mod`."""
    return record.score_mod is not None or record.mask_mod is not None


def has_modified_scores(record: TiledAttention) -> bool:
    """Returns whether scores are more than scaled products of queries and keys."""
    arrays = (record.bias, record.mask, record.pattern, record.logits_soft_cap, record.score_mod, record.mask_mod)
    return any(x is not None for x in arrays) or record.dropout_prob > 0


def has_segments_or_positions(record: TiledAttention) -> bool:
    """Returns whether segments or positions are in use: they mask few tiles, but take registers in all."""
    return any(x is not None for x in (record.q_segment_ids, record.q_positions, record.kv_positions))


def attends_to_everything(record: TiledAttention) -> bool:
    """Returns whether every query attends to every key."""
    return causal_window_bounds(record) == (None, None) and record.pattern is None and record.mask_mod is None


def longest_padded_row(record: TiledAttention) -> int:
    """Returns the padded elements of the longest row, of queries or of values."""
    return max(pad_to_dot_size(record.query.shape[3]), pad_to_dot_size(record.value.shape[3]))


def splits_key_value_gradients(record: TiledAttention) -> bool:
    """Returns whether two kernels compute the gradients of keys and of values: rows are too long for the registers
    of one.
    """
    return longest_padded_row(record) > 128


def slices_rows(record: TiledAttention, stationary_rows: int, streamed_rows: int) -> bool:
    """Returns whether the kernels multiply rows piece by piece: float32 rows that are too long for registers.

    Then the warps of a program share the rows that it streams, which are more than it keeps. Tiles that keep more rows
    hold them whole: on an H200 those are faster with head dimension 128, although registers spill.
    """
    return record.query.dtype == jnp.float32 and longest_padded_row(record) > 64 and streamed_rows > stationary_rows


def query_tile_constants(record: TiledAttention, tile: Any) -> dict[str, Any]:
    """Returns the constants of the kernels whose programs keep the queries of a `Tile` and stream its keys."""
    sizes = tile.stationary_rows, tile.streamed_rows
    spec = make_spec(record, *sizes, slice_rows=slices_rows(record, *sizes))
    return {"spec": spec, "BLOCK_Q": tile.stationary_rows, "BLOCK_KV": tile.streamed_rows}


def _precision(record: TiledAttention, vendor: str) -> str:
    """Returns the precision of float32 products: three on tensor cores keep all digits; HIGHEST avoids tensor cores."""
    return "tf32x3" if vendor == "nvidia" and record.precision != lax.Precision.HIGHEST else "ieee"


def _broadcast_strides(pair_array: Any) -> Strides | None:
    """Returns the strides of an array [B|1, H|1, T|1, S|1], with 0 for the heads, queries and keys that broadcast."""
    if pair_array is None:
        return None
    _, h, t, s = pair_array.shape
    return h * t * s, t * s if h > 1 else 0, s if t > 1 else 0, 1 if s > 1 else 0


def shared_memory_row_bytes(record: TiledAttention, pass_name: str, tile: Any) -> int:
    """Returns the bytes of the rows of a `Tile` in a pass: "forward", "keys" or "queries"."""
    itemsize = jnp.dtype(record.query.dtype).itemsize
    slice_rows = slices_rows(record, tile.stationary_rows, tile.streamed_rows)
    row_copies = (SLICED_ROW_COPIES if slice_rows else FLOAT32_COPIES if itemsize > 2 else HALF_PRECISION_COPIES)[
        pass_name
    ]
    rows = (
        row_copies.copies_of_stationary_row * tile.stationary_rows
        + row_copies.copies_of_streamed_row * tile.stages * tile.streamed_rows
    )
    return rows * itemsize * longest_padded_row(record)


def shared_memory_pair_bytes(record: TiledAttention, tile: Any) -> int:
    """Returns the bytes of pairwise operands: tiles of a bias are prefetched as those of keys are, a mask's are not."""
    bytes_per_pair = 0 if record.bias is None else (tile.stages - 1) * record.bias.dtype.itemsize
    return (bytes_per_pair + (record.mask is not None)) * tile.stationary_rows * tile.streamed_rows
