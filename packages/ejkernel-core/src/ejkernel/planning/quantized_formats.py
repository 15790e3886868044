"""Formats of quantised weights: what a code means, how scales are stored, and how codes lie in 32-bit words.

A matrix of R rows and C columns is quantised in groups of `group_size` neighbours of a row:

    mode      code                                       value of a code q
    affine    unsigned integer of 1 to 8 bits            (q - zero) * scale       scale, zero float16
    nf4       place in the table of NormalFloat          table[q] * scale         scale float32, the largest magnitude
    mxfp4     e2m1                                       e2m1(q) * 2 ** exponent  exponent int8, its bits in a uint8
    mxfp8     e4m3                                       e4m3(q) * 2 ** exponent  likewise
    nvfp4     e2m1                                       e2m1(q) * e4m3(scale)    scale a uint8 that holds an e4m3
    nvfp8     e4m3                                       e4m3(q) * e4m3(scale)    likewise

Code i of a row is bits `i * bits` to `i * bits + bits - 1` of the row's words, counted from the least significant bit
of the first uint32: a row has `ceil(C * bits / 32)` of them.

Sources: Dettmers et al. 2023, arXiv:2305.14314 (NormalFloat and its table); OCP Microscaling Formats 1.0, 2023 (e2m1,
e4m3, shared exponents).
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Mode = Literal["affine", "nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8"]
MODES: tuple[str, ...] = get_args(Mode)

WORD = 32
"""Bits of a word."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
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
E4M3_MOST, E2M1_MOST = 448.0, 6.0
LEAST_EXPONENT, MOST_EXPONENT = -126, 127
SMALLEST_E4M3 = 2.0**-9
DEFAULT_GROUPS = {"affine": 64, "nf4": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16, "nvfp8": 16}
BITS = {"nf4": 4, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4, "nvfp8": 8}
"""Bits of a code, where the mode says how many."""


@dataclasses.dataclass(frozen=True)
class Format:
    """How a matrix is quantised.

    Attributes:
        mode: One of `MODES`.
        bits: Of a code.
        group_size: Neighbours that share a scale.
    """

    mode: str
    bits: int
    group_size: int

    @property
    def scale_dtype(self) -> Any:
        """Dtype that scales are stored in."""
        return {"affine": jnp.float16, "nf4": jnp.float32}.get(self.mode, jnp.uint8)

    def words(self, columns: int) -> int:
        """Words of a row of that many columns."""
        return -(-columns * self.bits // WORD)


def make_format(mode: Any = "affine", bits: Any = None, group_size: Any = None) -> Format:
    """The format that arguments describe.

    Args:
        mode: One of `MODES`.
        bits: Of a code; None for 4 of affine, and for what another mode has.
        group_size: A power of two from 16 to 1024; None for the mode's own.

    Raises:
        ValueError: They describe none.
    """
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, wants one of {', '.join(MODES)}")
    wanted = BITS.get(mode, 4) if bits is None else bits
    if not isinstance(wanted, int) or wanted not in (range(1, 9) if mode == "affine" else (BITS[mode],)):
        wants = "1 to 8" if mode == "affine" else str(BITS[mode])
        raise ValueError(f"bits: got {bits!r}, wants {wants} for {mode}")
    group = DEFAULT_GROUPS[mode] if group_size is None else group_size
    if not isinstance(group, int) or group not in (16, 32, 64, 128, 256, 512, 1024):
        raise ValueError(f"group_size: got {group_size!r}, wants a power of two from 16 to 1024")
    return Format(mode, wanted, group)


def encode(weights: jax.Array, form: Format) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Codes uint8 [..., C] of a matrix, its scales [..., C / group_size] and, of affine codes, its zeros."""
    groups = weights.astype(jnp.float32).reshape(*weights.shape[:-1], -1, form.group_size)
    if form.mode == "affine":
        return _encode_affine(groups, form)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scales = _stored_scales(largest, form)
    scaled = groups / scale_values(scales, form)[..., None]
    if form.mode == "nf4":
        codes = _nearest(scaled, NF4)
    elif form.bits == 4:
        codes = _nearest(jnp.abs(scaled), E2M1) | (jnp.signbit(scaled).astype(jnp.uint8) << 3)
    else:
        clipped = jnp.clip(scaled, -E4M3_MOST, E4M3_MOST)
        codes = lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)
    return codes.reshape(weights.shape), scales, None


def _encode_affine(groups: jax.Array, form: Format) -> tuple[jax.Array, jax.Array, jax.Array]:
    low, high, most = groups.min(axis=-1), groups.max(axis=-1), 2**form.bits - 1
    scales = ((high - low) / most).astype(jnp.float16)
    scales = jnp.where(scales == 0, jnp.ones_like(scales), scales)
    # Zeros and codes are those of the scale that is stored, so that its rounding is no error of theirs.
    exact = scales.astype(jnp.float32)
    zeros = (-low / exact).astype(jnp.float16)
    codes = jnp.round(groups / exact[..., None] + zeros.astype(jnp.float32)[..., None])
    codes = jnp.clip(codes, 0, most).astype(jnp.uint8)
    return codes.reshape(*codes.shape[:-2], -1), scales, zeros


def _stored_scales(largest: jax.Array, form: Format) -> jax.Array:
    """Scales for groups with these largest magnitudes, as they are stored; 1 for groups of zeros."""
    if form.mode == "nf4":
        return jnp.where(largest > 0, largest, 1)
    most = E2M1_MOST if form.bits == 4 else E4M3_MOST
    wanted = jnp.where(largest > 0, largest / most, 1)
    if form.mode.startswith("mx"):
        exponent = jnp.clip(jnp.ceil(jnp.log2(wanted)), LEAST_EXPONENT, MOST_EXPONENT).astype(jnp.int8)
        return lax.bitcast_convert_type(exponent, jnp.uint8)
    nearest = jnp.clip(wanted, SMALLEST_E4M3, E4M3_MOST).astype(jnp.float8_e4m3fn)
    codes = lax.bitcast_convert_type(nearest, jnp.uint8)
    # The next one up where it was rounded down, so that the largest of the group is in range.
    return codes + (nearest.astype(jnp.float32) < jnp.minimum(wanted, E4M3_MOST)).astype(jnp.uint8)


def _nearest(x: jax.Array, table: tuple[float, ...]) -> jax.Array:
    """Places of the nearest entries of an ascending table."""
    between = np.add(table[1:], table[:-1]) / 2
    return jnp.searchsorted(jnp.asarray(between, jnp.float32), x, method="compare_all").astype(jnp.uint8)


def scale_values(scales: jax.Array, form: Format) -> jax.Array:
    """Scales as float32 factors."""
    if form.mode.startswith("mx"):
        return jnp.exp2(lax.bitcast_convert_type(scales, jnp.int8).astype(jnp.float32))
    if form.mode.startswith("nv"):
        return lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
    return scales.astype(jnp.float32)


def code_values(codes: jax.Array, form: Format) -> jax.Array:
    """Codes as float32, before zeros and scales."""
    if form.mode == "affine":
        return codes.astype(jnp.float32)
    if form.bits == 8:
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    table = NF4 if form.mode == "nf4" else (*E2M1, *(-x for x in E2M1))
    return jnp.asarray(table, jnp.float32)[codes]


def decode(packed: jax.Array, scales: jax.Array, zeros: jax.Array | None, form: Format) -> jax.Array:
    """The matrix [..., C] float32 of words [..., words], scales [..., C / group_size] and zeros likewise."""
    columns = scales.shape[-1] * form.group_size
    values = code_values(unpack(packed, form.bits, columns), form)
    groups = values.reshape(*values.shape[:-1], -1, form.group_size)
    if zeros is not None:
        groups = groups - zeros.astype(jnp.float32)[..., None]
    return (groups * scale_values(scales, form)[..., None]).reshape(values.shape)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Words uint32 [..., words] of codes [..., C]."""
    stream = (codes[..., None] >> jnp.arange(bits, dtype=jnp.uint8)) & jnp.uint8(1)
    stream = stream.reshape(*codes.shape[:-1], -1)
    padding = -stream.shape[-1] % WORD
    stream = jnp.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, padding)])
    words = stream.reshape(*stream.shape[:-1], -1, WORD).astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)
    return words.sum(axis=-1, dtype=jnp.uint32)


def unpack(packed: jax.Array, bits: int, columns: int) -> jax.Array:
    """Codes uint8 [..., columns] of words."""
    mask = jnp.uint32(2**bits - 1)
    if WORD % bits == 0:
        shifts = jnp.arange(0, WORD, bits, dtype=jnp.uint32)
        codes = (packed[..., None] >> shifts) & mask
        return codes.reshape(*packed.shape[:-1], -1)[..., :columns].astype(jnp.uint8)
    # A code may lie in two words; one more at the end is there for the last.
    first = np.arange(columns) * bits
    word, shift = first // WORD, jnp.asarray(first % WORD, jnp.uint32)
    longer = jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, 1)])
    low = longer[..., word] >> shift
    high = jnp.where(shift == 0, 0, longer[..., word + 1] << ((WORD - shift) % WORD))
    return ((low | high) & mask).astype(jnp.uint8)
