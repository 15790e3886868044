"""Both passes of the quantised matmul in Triton."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.quantized_matmul import QuantizedMatmul, finished
from ejkernel.ops.device import current_device
from ejkernel.planning.quantized_formats import NF4, WORD
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.quantized_matmul.config import QuantizedTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedSpec:
    """Constants of the kernels.

    Attributes:
        M: Rows of x.
        R: Rows of the packed matrix.
        W: Words of such a row.
        GROUPS: Scales of such a row.
        GROUP: Codes that share a scale.
        PER: Codes of a word: 4 or 8.
        BITS: Bits of a code.
        AFFINE: Whether codes are integers.
        CENTER: The zero that all codes share; 0 where each group has its own.
        TABLE: Whether codes are indices into a table.
        EXPONENT: Whether scales are e8m0 in 8 bits.
        SCALE8: Whether scales are e4m3 in 8 bits.
        BLOCK_M: Rows of x a tile.
        BLOCK_R: Rows of the packed matrix a tile.
        BLOCK_W: Words a tile.
        SPLITS: Split-K: parts of the contracted axis.
        OPERAND: Dtype of the product's operands.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN: Whether operands become float32 first: the interpreter multiplies the bits of bfloat16.
    """

    M: int
    R: int
    W: int
    GROUPS: int
    GROUP: int
    PER: int
    BITS: int
    AFFINE: bool
    CENTER: int
    TABLE: bool
    EXPONENT: bool
    SCALE8: bool
    BLOCK_M: int
    BLOCK_R: int
    BLOCK_W: int
    SPLITS: int
    OPERAND: str
    PRECISION: str
    WIDEN: bool


def make_spec(record: QuantizedMatmul, config: QuantizedTiles) -> QuantizedSpec:
    """The constants of a record's kernels on the device in use."""
    form, (rows, words) = record.format, record.packed.shape
    return QuantizedSpec(
        M=record.x.shape[0],
        R=rows,
        W=words,
        GROUPS=record.scales.shape[1],
        GROUP=form.group_size,
        PER=WORD // form.bits,
        BITS=form.bits,
        AFFINE=form.integers,
        CENTER=form.center or 0,
        TABLE=form.mode == "nf4",
        EXPONENT=form.exponents,
        SCALE8=form.mode.startswith("nv"),
        BLOCK_M=config.block_m,
        BLOCK_R=config.block_r,
        BLOCK_W=config.block_w,
        SPLITS=config.splits,
        OPERAND=record.x.dtype.name,
        PRECISION="tf32x3" if current_device().vendor == "nvidia" else "ieee",
        WIDEN=interpreting(),
    )


def forward(record: QuantizedMatmul, config: QuantizedTiles) -> tuple[jax.Array, tuple[()]]:
    """The output of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, splits, warps and stages.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    run = _over_words if record.transpose else _over_rows
    return run(record, record.x, config), ()


def backward(pullback: Pullback, config: QuantizedTiles) -> dict[str, jax.Array]:
    """The gradient of x: the cotangent times the transposed matrix, by the kernel of the other layout.

    Args:
        pullback: Record, cotangent [M, N], and the wanted names.
        config: Tiles, splits, warps and stages.

    Returns:
        [M, K] in x's dtype, if it is wanted.
    """
    record: QuantizedMatmul = pullback.record
    run = _over_rows if record.transpose else _over_words
    return {name: run(record, pullback.cotangent, config) for name in sorted(pullback.wanted)}


def _over_rows(record: QuantizedMatmul, left: jax.Array, config: QuantizedTiles) -> jax.Array:
    """left [M, R] times the packed matrix, [M, columns]."""
    from ejkernel_triton.quantized_matmul.quantized_kernels import over_rows_kernel

    spec = make_spec(record, config)
    made = _launched(over_rows_kernel, record, left, spec, config, (spec.PER, spec.M, spec.W), spec.W, config.block_w)
    # Column `word * PER + n` is code n of the word.
    return finished(record, jnp.moveaxis(made, 0, 2).reshape(spec.M, -1))


def _over_words(record: QuantizedMatmul, left: jax.Array, config: QuantizedTiles) -> jax.Array:
    """left [M, columns] times the transposed packed matrix, [M, R]."""
    from ejkernel_triton.quantized_matmul.quantized_kernels import over_words_kernel

    spec = make_spec(record, config)
    # x is small beside the matrix, so it is put in the order of codes, not the weights.
    by_code = jnp.moveaxis(left.reshape(spec.M, spec.W, spec.PER), 2, 0)
    shape = (1, spec.M, spec.R)
    made = _launched(over_words_kernel, record, by_code, spec, config, shape, spec.R, config.block_r)
    return finished(record, made[0])


def _launched(
    kernel: object,
    record: QuantizedMatmul,
    left: jax.Array,
    spec: QuantizedSpec,
    config: QuantizedTiles,
    shape: tuple[int, ...],
    extent: int,
    block: int,
) -> jax.Array:
    """The sum of all splits' outputs, float32 of the given shape; `extent` is cut into blocks, one a program."""
    zeros = None if record.zeros is None else record.zeros[None]
    table = jnp.asarray(NF4, jnp.float32)[None] if spec.TABLE else None
    (parts,) = launch(
        kernel,
        (left.astype(record.x.dtype)[None], record.packed[None], record.scales[None], zeros, table),
        (Shape((1, spec.SPLITS, *shape), jnp.float32),),
        batch=1,
        grid=-(-extent // block) * -(-spec.M // spec.BLOCK_M) * spec.SPLITS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    # Split-K: a sum in a fixed order, so every run gives the same bits, where atomic additions would not.
    return parts[0].sum(axis=0)
