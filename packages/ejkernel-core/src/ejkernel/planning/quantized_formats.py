"""Formats of quantised weights: what a code means, how scales are stored, and how codes lie in 32-bit words.

A matrix of R rows and C columns is quantised in groups of `group_size` neighbours of a row:

    mode      code                                       value of a code q
    affine    unsigned integer of 1 to 8 bits            (q - zero) * scale        scale, zero: see below
    symmetric unsigned integer of 2 to 8 bits            (q - 2 ** (bits - 1)) * scale   scale: see below
    fp8       e4m3                                       e4m3(q) * scale           scale: see below
    nf4       index into the table of NormalFloat        table[q] * scale          scale float32, the largest magnitude
    mxfp4     e2m1                                       e2m1(q) * e8m0(scale)     scale a uint8 that holds an e8m0
    mxfp8     e4m3                                       e4m3(q) * e8m0(scale)     the same
    nvfp4     e2m1                                       e2m1(q) * e4m3(scale) t   scale a uint8 that holds an e4m3
    nvfp8     e4m3                                       e4m3(q) * e4m3(scale) t   the same

Byte b of an e8m0 is 2 ** (b - 127), and 255 is NaN. t is the tensor scale, one float32 for a matrix. Scales of
affine and symmetric codes and of fp8 are float16, bfloat16 or float32, zeros too.

Code i of a row is bits `i * bits` to `i * bits + bits - 1` of the row's words, counted from the least significant bit
of the first uint32: a row has `ceil(C * bits / 32)` of them.

Sources: Dettmers et al. 2023, arXiv:2305.14314 (NormalFloat and its table); OCP Microscaling Formats 1.0, 2023 (e2m1,
e4m3, e8m0); NVIDIA 2025, arXiv:2509.25149 (the tensor scale of nvfp4).
"""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.arithmetic import cdiv

Mode = Literal["affine", "nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8", "symmetric", "fp8"]
MODES: tuple[str, ...] = get_args(Mode)

WORD_BITS = 32
"""Bits of a word."""
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1; its highest bit is the sign."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
MAX_E4M3, MAX_E2M1 = 448.0, 6.0
EXPONENT_BIAS, MIN_EXPONENT, MAX_EXPONENT = 127, -126, 127
"""The exponents of e8m0. `quantize` never writes -127, since 2 ** -127 is subnormal in float32."""
SMALLEST_E4M3 = 2.0**-9
MIN_NORMAL, MAX_FLOAT32 = 2.0**-126, 2.0**128 - 2.0**104
"""Smallest normal float32, devices may flush what is smaller to zero; and the largest."""
MAX_ZERO_POINTS = {"float16": 2.0**11, "bfloat16": 2.0**8, "float32": 2.0**22}
"""For each dtype, the largest zero point that is stored with a rounding error of at most a half. The bound of float32
is lower, because the sum of code and zero is rounded too."""
GROUP_SIZES, WHOLE_ROW = (16, 32, 64, 128, 256, 512, 1024), -1
DEFAULT_GROUP_SIZES = {
    **{"affine": 64, "symmetric": 64, "fp8": 128, "nf4": 64},
    **{"mxfp4": 32, "mxfp8": 32, "nvfp4": 16, "nvfp8": 16},
}
BITS_BY_MODE = {"fp8": 8, "nf4": 4, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4, "nvfp8": 8}
"""Bits of a code, where the mode says how many."""


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of a quantised matrix.

    Attributes:
        mode: One of `MODES`.
        bits: Bits per code.
        group_size: Neighbours that share a scale.
    """

    mode: str
    bits: int
    group_size: int

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """Returns the dtypes that scales may be stored in, the usual one first."""
        floating = {"affine": tuple(MAX_ZERO_POINTS), "symmetric": tuple(MAX_ZERO_POINTS), "nf4": ("float32",)}
        return {**floating, "fp8": ("float32", "bfloat16", "float16")}.get(self.mode, ("uint8",))

    @property
    def scale_dtype(self) -> Any:
        """Returns the usual dtype of scales."""
        return jnp.dtype(self.scale_dtypes[0])

    @property
    def integers(self) -> bool:
        """Returns whether codes are integers."""
        return self.mode in ("affine", "symmetric")

    @property
    def symmetric_zero_point(self) -> int | None:
        """Returns the zero point of symmetric codes, which all share; None for other codes."""
        return 2 ** (self.bits - 1) if self.mode == "symmetric" else None

    @property
    def has_power_of_two_scales(self) -> bool:
        """Returns whether scales are e8m0: powers of two."""
        return self.mode.startswith("mx")

    @property
    def has_tensor_scale(self) -> bool:
        """Returns whether there may be a second scale, one for the whole matrix."""
        return self.mode.startswith("nv")

    def words_per_row(self, columns: int) -> int:
        """Returns words of a row of that many columns."""
        return cdiv(columns * self.bits, WORD_BITS)


def make_format(mode: Any = "affine", bits: Any = None, group_size: Any = None) -> Format:
    """Returns the format that arguments describe.

    Args:
        mode: One of `MODES`.
        bits: Of a code; None for 4 of affine, and for what another mode has.
        group_size: A power of two from 16 to 1024, -1 for whole rows, None for the mode's own.

    Raises:
        ValueError: The arguments describe no format.
    """
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, wants one of {', '.join(MODES)}")
    num_bits = BITS_BY_MODE.get(mode, 4) if bits is None else bits
    accepted = {"affine": range(1, 9), "symmetric": range(2, 9)}.get(mode, (BITS_BY_MODE.get(mode),))
    if not isinstance(num_bits, int) or num_bits not in accepted:
        wants = f"{accepted[0]} to 8" if len(accepted) > 1 else str(BITS_BY_MODE[mode])
        raise ValueError(f"bits: got {bits!r}, wants {wants} for {mode}")
    group = DEFAULT_GROUP_SIZES[mode] if group_size is None else group_size
    if not isinstance(group, int) or group not in (WHOLE_ROW, *GROUP_SIZES):
        raise ValueError(f"group_size: got {group_size!r}, wants a power of two from 16 to 1024, or -1 for whole rows")
    return Format(mode, num_bits, group)


class EncodedMatrix(NamedTuple):
    """A quantised matrix [..., R, C] before its codes are packed.

    Attributes:
        codes: uint8 [..., R, C].
        scales: [..., R, C / group_size], as they are stored.
        zeros: Of the scales' shape and dtype, of affine codes; None of others.
        tensor_scale: float32 [...], of nvfp4 and nvfp8; None of others.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None
    tensor_scale: jax.Array | None = None


def with_row_group_size(quantized_format: Format, columns: int) -> Format:
    """Returns the format; if a group is a whole row, with the number of columns as group size.

    Raises:
        ValueError: Rows with this number of columns cannot be one group.
    """
    if quantized_format.group_size != WHOLE_ROW:
        return quantized_format
    if columns % WORD_BITS:
        raise ValueError(f"group_size: got -1 with rows of {columns} codes, wants rows in multiples of {WORD_BITS}")
    return dataclasses.replace(quantized_format, group_size=columns)


def split_row_groups(
    scales: jax.Array, zeros: jax.Array | None, quantized_format: Format
) -> tuple[jax.Array, jax.Array | None, Format]:
    """Returns scales, zeros and format with groups that kernels take: those of whole rows are repeated for parts of
    them.
    """
    if quantized_format.group_size in GROUP_SIZES:
        return scales, zeros, quantized_format
    group = next(group for group in reversed(GROUP_SIZES) if quantized_format.group_size % group == 0)
    count = quantized_format.group_size // group
    zeros = None if zeros is None else jnp.repeat(zeros, count, axis=-1)
    return jnp.repeat(scales, count, axis=-1), zeros, dataclasses.replace(quantized_format, group_size=group)


def encode(weights: jax.Array, quantized_format: Format, scale_dtype: Any = jnp.float16) -> EncodedMatrix:
    """Quantises a matrix [..., R, C]; `scale_dtype` is that of affine codes' scales and zeros."""
    groups = weights.astype(jnp.float32).reshape(*weights.shape[:-1], -1, quantized_format.group_size)
    if quantized_format.integers:
        return _encode_integers(groups, quantized_format, scale_dtype)
    tensor_scale = None
    if quantized_format.has_tensor_scale:
        tensor_scale = _tensor_scale(groups, quantized_format)
        groups = _divide_by_normal(groups, tensor_scale[..., None, None, None])
    scales = _stored_scales(jnp.max(jnp.abs(groups), axis=-1), quantized_format, scale_dtype)
    scaled = _divide_by_normal(groups, scale_values(scales, quantized_format)[..., None])
    if quantized_format.mode == "nf4":
        codes = _nearest_indices(scaled, NF4)
    elif quantized_format.bits == 4:
        codes = _nearest_indices(jnp.abs(scaled), E2M1_MAGNITUDES) | (jnp.signbit(scaled).astype(jnp.uint8) << 3)
    else:
        clipped = jnp.clip(scaled, -MAX_E4M3, MAX_E4M3)
        codes = lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)
    if quantized_format.mode != "nf4":
        # The next code towards zero, where rounding up left the range of float32.
        values = code_values(codes, quantized_format) * scale_values(scales, quantized_format)[..., None]
        values = values if tensor_scale is None else values * tensor_scale[..., None, None, None]
        codes -= jnp.isinf(values).astype(jnp.uint8)
    return EncodedMatrix(codes.reshape(weights.shape), scales, tensor_scale=tensor_scale)


def integer_scales(groups: jax.Array, quantized_format: Format, scale_dtype: Any) -> jax.Array:
    """Returns the scales that groups of integer codes need, float32 and not yet rounded; 0 for groups of zeros.

    A group far from zero has a zero point that needs more digits than its dtype has. Its scale is then larger, so that
    the zero point is as exact as the codes are: the error is that of rounding the weights to about that many digits.
    """
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    farthest = jnp.maximum(jnp.abs(low), jnp.abs(high))
    if quantized_format.symmetric_zero_point is not None:
        steps = jnp.maximum(
            -low / quantized_format.symmetric_zero_point, high / (quantized_format.symmetric_zero_point - 1)
        )
    else:
        # Half of each, because the difference of two finite numbers may be infinite.
        between = (high * 0.5 - low * 0.5) / (2**quantized_format.bits - 1) * 2
        steps = jnp.maximum(between, farthest / MAX_ZERO_POINTS[jnp.dtype(scale_dtype).name])
    return jnp.where(farthest == 0, 0, jnp.maximum(steps, MIN_NORMAL))


def _encode_integers(groups: jax.Array, quantized_format: Format, scale_dtype: Any) -> EncodedMatrix:
    # The zero point of weights at the end of float32 is rounded, too, and must not leave its range.
    end = MAX_FLOAT32 * (1 - 1 / MAX_ZERO_POINTS[jnp.dtype(scale_dtype).name])
    groups = jnp.clip(groups, -end, end)
    steps = integer_scales(groups, quantized_format, scale_dtype)
    scales = jnp.where(steps == 0, 1, _round_up_to_dtype(steps, scale_dtype))
    # Zeros and codes are computed from the scale as it is stored, so that its rounding adds no error.
    exact = scales.astype(jnp.float32)
    zeros = None
    if quantized_format.symmetric_zero_point is None:
        zeros = _round_to_dtype(_divide_by_normal(-groups.min(axis=-1), exact), scale_dtype)
    offset: Any = quantized_format.symmetric_zero_point if zeros is None else zeros.astype(jnp.float32)[..., None]
    codes = jnp.round(_divide_by_normal(groups, exact[..., None]) + offset)
    codes = jnp.clip(codes, 0, 2**quantized_format.bits - 1)
    # The next code towards zero, where rounding up left the range of float32.
    values = (codes - offset) * exact[..., None]
    codes = (codes - jnp.where(jnp.isinf(values), jnp.sign(values), 0)).astype(jnp.uint8)
    return EncodedMatrix(codes.reshape(*codes.shape[:-2], -1), scales, zeros)


def _round_up_to_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns the least number of a floating dtype that is not below x, which is positive; infinity
    past the largest.
    """
    nearest = _round_to_dtype(x, dtype)
    if nearest.dtype.itemsize != 2:
        return nearest
    bits = lax.bitcast_convert_type(nearest, jnp.uint16)
    bits += (nearest.astype(jnp.float32) < x).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, dtype)


def _divide_by_normal(x: jax.Array, by: jax.Array) -> jax.Array:
    """Returns x / by, where by is normal. XLA may multiply by 1 / by, which must not be subnormal: devices flush it to
    zero.
    """
    divisor_scale = jnp.where(by > 2.0**64, 2.0**-64, 1)
    return x * divisor_scale / (by * divisor_scale)


def _round_to_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns x in a narrower dtype, in a way that XLA does not undo: it may leave out a conversion there and back."""
    return lax.optimization_barrier(x.astype(dtype))


def _tensor_scale(groups: jax.Array, quantized_format: Format) -> jax.Array:
    """Returns the tensor scale that gives the group with the largest magnitude the largest e4m3 for a scale."""
    largest = jnp.max(jnp.abs(groups), axis=(-3, -2, -1), initial=0)
    return jnp.where(largest == 0, 1, jnp.maximum(largest / (MAX_E4M3 * _largest_code(quantized_format)), MIN_NORMAL))


def _largest_code(quantized_format: Format) -> float:
    """Returns the largest magnitude of a floating code."""
    return MAX_E2M1 if quantized_format.bits == 4 else MAX_E4M3


def _stored_scales(largest_magnitudes: jax.Array, quantized_format: Format, scale_dtype: Any) -> jax.Array:
    """Returns the scales, as they are stored, for groups with these largest magnitudes; 1 for groups of zeros."""
    if quantized_format.mode == "nf4":
        return jnp.where(largest_magnitudes > 0, largest_magnitudes, 1)
    needed = jnp.where(largest_magnitudes > 0, largest_magnitudes / _largest_code(quantized_format), 1)
    if quantized_format.mode == "fp8":
        return _round_up_to_dtype(jnp.maximum(needed, MIN_NORMAL), scale_dtype)
    if quantized_format.has_power_of_two_scales:
        # log2 rounded up: the exponent field of a float32, plus 1 if the mantissa is not 0.
        bits = lax.bitcast_convert_type(needed, jnp.int32)
        scale_exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        return jnp.clip(scale_exponents, MIN_EXPONENT + EXPONENT_BIAS, MAX_EXPONENT + EXPONENT_BIAS).astype(jnp.uint8)
    nearest = _round_to_dtype(jnp.clip(needed, SMALLEST_E4M3, MAX_E4M3), jnp.float8_e4m3fn)
    codes = lax.bitcast_convert_type(nearest, jnp.uint8)
    # Takes the next larger scale if rounding made it smaller, so that the largest weight is in range.
    return codes + (nearest.astype(jnp.float32) < jnp.minimum(needed, MAX_E4M3)).astype(jnp.uint8)


def _nearest_indices(x: jax.Array, table: tuple[float, ...]) -> jax.Array:
    """Returns the indices of the nearest entries of an ascending table."""
    between = np.add(table[1:], table[:-1]) / 2
    return jnp.searchsorted(jnp.asarray(between, jnp.float32), x, method="compare_all").astype(jnp.uint8)


def scale_values(scales: jax.Array, quantized_format: Format) -> jax.Array:
    """Returns scales as float32 factors; 2 ** -127 of e8m0 is 2 ** -126 here, see `decode`."""
    if quantized_format.has_power_of_two_scales:
        # The byte is the exponent field of a float32; 255 stands for infinity there.
        bits = jnp.maximum(scales, 1).astype(jnp.int32) << 23
        return jnp.where(scales == 255, jnp.nan, lax.bitcast_convert_type(bits, jnp.float32))
    if quantized_format.mode.startswith("nv"):
        return lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
    return scales.astype(jnp.float32)


def code_values(codes: jax.Array, quantized_format: Format) -> jax.Array:
    """Returns codes as float32, before zeros and scales."""
    if quantized_format.integers:
        return codes.astype(jnp.float32)
    if quantized_format.bits == 8:
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    table = NF4 if quantized_format.mode == "nf4" else (*E2M1_MAGNITUDES, *(-x for x in E2M1_MAGNITUDES))
    return jnp.asarray(table, jnp.float32)[codes]


def decode(
    packed: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    quantized_format: Format,
    tensor_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns the matrix [..., R, C] float32 of its words [..., R, words].

    Args:
        packed: Words.
        scales: [..., R, C / group_size], as they are stored.
        zeros: Of the scales' shape; None of codes without.
        quantized_format: The format.
        tensor_scale: float32 [...]; None for 1.
    """
    columns = scales.shape[-1] * quantized_format.group_size
    values = code_values(unpack(packed, quantized_format.bits, columns), quantized_format)
    groups = values.reshape(*values.shape[:-1], -1, quantized_format.group_size)
    if zeros is not None:
        groups = groups - zeros.astype(jnp.float32)[..., None]
    elif quantized_format.symmetric_zero_point is not None:
        groups = groups - quantized_format.symmetric_zero_point
    groups = groups * scale_values(scales, quantized_format)[..., None]
    if quantized_format.has_power_of_two_scales:
        # 2 ** -127 in two steps: it is subnormal in float32, and devices may flush it to zero.
        groups = groups * jnp.where(scales == 0, 0.5, 1)[..., None]
    if tensor_scale is not None:
        groups = groups * tensor_scale.astype(jnp.float32)[..., None, None, None]
    return groups.reshape(values.shape)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Returns words uint32 [..., words] of codes [..., C]."""
    stream = (codes[..., None] >> jnp.arange(bits, dtype=jnp.uint8)) & jnp.uint8(1)
    stream = stream.reshape(*codes.shape[:-1], -1)
    padding = -stream.shape[-1] % WORD_BITS
    stream = jnp.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, padding)])
    words = stream.reshape(*stream.shape[:-1], -1, WORD_BITS).astype(jnp.uint32) << jnp.arange(
        WORD_BITS, dtype=jnp.uint32
    )
    return words.sum(axis=-1, dtype=jnp.uint32)


def unpack(packed: jax.Array, bits: int, columns: int) -> jax.Array:
    """Returns codes uint8 [..., columns] of words."""
    mask = jnp.uint32(2**bits - 1)
    if WORD_BITS % bits == 0:
        shifts = jnp.arange(0, WORD_BITS, bits, dtype=jnp.uint32)
        codes = (packed[..., None] >> shifts) & mask
        return codes.reshape(*packed.shape[:-1], -1)[..., :columns].astype(jnp.uint8)
    # A code may be split over two words. One more word is added at the end for the last code.
    first = np.arange(columns) * bits
    word, shift = first // WORD_BITS, jnp.asarray(first % WORD_BITS, jnp.uint32)
    longer = jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, 1)])
    low = longer[..., word] >> shift
    high = jnp.where(shift == 0, 0, longer[..., word + 1] << ((WORD_BITS - shift) % WORD_BITS))
    return ((low | high) & mask).astype(jnp.uint8)
