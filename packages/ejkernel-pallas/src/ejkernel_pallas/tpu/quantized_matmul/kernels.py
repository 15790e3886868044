"""Products with a packed matrix [R, C], whose rows are W words of several codes each.

    HBM packed [R, W] ── double buffer ──► VMEM words [block_r, block_w]
                                             │ shift, mask, zero, scale: code n of all words, in registers
                                             ▼
    over rows    acc[n] [block_m, block_w] += x [block_m, block_r] · numbers_n       out[:, codes j + n] = acc[n][:, j]
    over words   acc    [block_m, block_r] += x_n [block_m, block_w] · numbers_n^T   x_n[:, j] = x[:, codes j + n]

The grid is (tiles of x's rows, tiles of columns, tiles of contracted elements). A tile of words becomes numbers once
for each tile of x's rows. Every product takes few rows of words, so that their numbers stay in registers on the way to
the matrix unit. A group is never as long as a product of one code: its scale goes to the numbers, not to the sums.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, Ref, launch, resident, vmem_limit
from ejkernel_pallas.tpu.mosaic.vectors import LANES, product, zero_outside
from ejkernel_pallas.tpu.quantized_matmul.numbers import Factors, numbers, scale_values, spread, table
from ejkernel_pallas.tpu.quantized_matmul.spec import QuantizedSpec, scale_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedRefs:
    """Refs of both kernels; a field that is None is not needed.

    Attributes:
        x: [block_m, block_r], or over words [codes, block_m, block_w].
        words: int32 [block_r, block_w].
        scales: As they are stored, [block_r, 128].
        zeros: Likewise, of affine codes.
        table: float32 [1, 128], of codes that are places in one.
        output: [codes, block_m, block_w], or over words [block_m, block_r].
        acc: Scratch, float32, as the output.
    """

    x: Ref
    words: Ref
    scales: Ref
    output: Ref
    acc: Ref
    zeros: Ref = None
    table: Ref = None


def over_rows(record: QuantizedMatmul, x: jax.Array, spec: QuantizedSpec) -> jax.Array:
    """x [M, R] times the packed matrix, [M, C] in `spec.output`."""
    m, r, w = spec.blocks.block_m, spec.blocks.block_r, spec.blocks.block_w
    made = _launch(
        record,
        spec,
        _over_rows,
        x=Operand(x, (m, r), lambda i, j, k: (i, k)),
        output=Operand(
            jax.ShapeDtypeStruct((spec.codes, spec.rows, spec.words), spec.output),
            (spec.codes, m, w),
            lambda i, j, k: (0, i, j),
        ),
        packed=lambda i, j, k: (k, j),
        steps=-(-spec.packed_rows // r),
    )
    return jnp.moveaxis(made, 0, 2).reshape(spec.rows, spec.words * spec.codes)


def over_words(record: QuantizedMatmul, x: jax.Array, spec: QuantizedSpec) -> jax.Array:
    """x [M, C] times the transposed packed matrix, [M, R] in `spec.output`."""
    m, r, w = spec.blocks.block_m, spec.blocks.block_r, spec.blocks.block_w
    output = jax.ShapeDtypeStruct((spec.rows, spec.packed_rows), spec.output)
    # x is rearranged once by XLA, so that code n of neighbouring words meets neighbouring columns: no number moves
    # between lanes in the kernel.
    by_code = jnp.moveaxis(x.reshape(spec.rows, spec.words, spec.codes), 2, 0)
    return _launch(
        record,
        spec,
        _over_words,
        x=Operand(by_code, (spec.codes, m, w), lambda i, j, k: (0, i, k)),
        output=Operand(output, (m, r), lambda i, j, k: (i, j)),
        packed=lambda i, j, k: (j, k),
        steps=-(-spec.words // w),
    )


def _launch(
    record: QuantizedMatmul,
    spec: QuantizedSpec,
    kernel: Callable[..., None],
    *,
    x: Operand,
    output: Operand,
    packed: Callable[..., tuple[Any, Any]],
    steps: int,
) -> jax.Array:
    """Runs one of the kernels; `packed` gives the tile of the packed matrix of a grid step."""
    block = (spec.blocks.block_r, spec.blocks.block_w)

    def scale_place(*step: Any) -> tuple[Any, Any]:
        row, word = packed(*step)
        return row, divide(word, spec.scale_tiles)

    inputs = {"x": x, "words": Operand(lax.bitcast_convert_type(record.packed, jnp.int32), block, packed)}
    for label, stored in (("scales", record.scales), ("zeros", record.zeros)):
        if stored is not None:
            inputs[label] = Operand(scale_bits(stored), (block[0], LANES), scale_place)
    places = table(spec.format)
    if places is not None:
        inputs["table"] = resident(places)
    shape: Any = output.block
    scratch = {"acc": pltpu.VMEM(shape, jnp.float32)}
    made = launch(
        KernelCall(
            name=f"ejkernel_quantized_matmul{kernel.__name__}",
            kernel=functools.partial(kernel, spec=spec, steps=steps),
            refs=QuantizedRefs,
            grid=(-(-spec.rows // spec.blocks.block_m), -(-output.array.shape[-1] // shape[-1]), steps),
            # Rows and columns; contracted tiles follow each other, as they add to one accumulator.
            parallel=2,
            tables={},
            inputs=inputs,
            outputs={"output": output},
            scratch=scratch,
            vmem_limit=vmem_limit((*inputs.values(), output), scratch),
        )
    )
    return made["output"]


class Part(NamedTuple):
    """Some rows and words of a tile: those of one product."""

    row: int
    rows: int
    word: int
    words: int


def _parts(spec: QuantizedSpec, row: int, rows: int) -> list[Part]:
    """The parts of a tile that have the given rows."""
    width, size = spec.blocks.block_w, spec.piece
    return [Part(row, rows, word, min(size, width - word)) for word in range(0, width, size)]


def _over_rows(refs: QuantizedRefs, *, spec: QuantizedSpec, steps: int) -> None:
    """One tile of the packed matrix, whose rows are contracted."""
    k, tile = pl.program_id(2), pl.program_id(1)
    left = spec.packed_rows - k * spec.blocks.block_r
    _zero(refs, k)
    # Pieces, not the tile: what a product takes is unpacked just before it, and stays in registers.
    for row in range(0, spec.blocks.block_r, spec.piece):
        size = min(spec.piece, spec.blocks.block_r - row)
        x, factors = refs.x[:, row : row + size], _group_factors(refs, row, size, spec)
        if spec.packed_rows % spec.blocks.block_r:
            # Both operands: past the end of either, memory may hold NaN, which 0 in the other does not stop.
            x, factors = zero_outside(x, 0, left - row, 1), _zero_from(factors, left - row, 0)
        for part in _parts(spec, row, size):
            unpack = _unpacker(refs, factors, part, tile, spec)
            for n in range(spec.codes):
                refs.acc[n, :, part.word : part.word + part.words] += product(x, unpack(n), (1, 0), spec.precision)
    _write(refs, k == steps - 1)


def _over_words(refs: QuantizedRefs, *, spec: QuantizedSpec, steps: int) -> None:
    """One tile of the packed matrix, of which what the words hold is contracted."""
    k, ragged = pl.program_id(2), spec.words % spec.blocks.block_w != 0
    left = spec.words - k * spec.blocks.block_w
    _zero(refs, k)
    for row in range(0, spec.blocks.block_r, spec.piece):
        size = min(spec.piece, spec.blocks.block_r - row)
        factors = _group_factors(refs, row, size, spec)
        if ragged:
            factors = _zero_from(factors, spec.groups - divide(k, spec.scale_tiles) * LANES, 1)
        for part in _parts(spec, row, size):
            unpack = _unpacker(refs, factors, part, k, spec)
            # The codes of a word add up in registers before they go to VMEM.
            total = jnp.zeros((spec.blocks.block_m, size), jnp.float32)
            for n in range(spec.codes):
                x = refs.x[n, :, part.word : part.word + part.words]
                x = zero_outside(x, 0, left - part.word, 1) if ragged else x
                total += product(x, unpack(n), (1, 1), spec.precision)
            refs.acc[:, row : row + size] += total
    _write(refs, k == steps - 1)


def _zero(refs: QuantizedRefs, k: Any) -> None:
    """Zeroes the sums before the first tile of contracted elements."""

    @pl.when(k == 0)
    def _() -> None:
        refs.acc[...] = jnp.zeros_like(refs.acc)


def _write(refs: QuantizedRefs, last: Any) -> None:
    """Writes the sums after the last tile of contracted elements."""

    @pl.when(last)
    def _() -> None:
        refs.output[...] = refs.acc[...].astype(refs.output.dtype)


def _group_factors(refs: QuantizedRefs, row: int, size: int, spec: QuantizedSpec) -> Factors:
    """Scales and zeros of some rows' groups, of which a block has 128."""
    some = slice(row, row + size)
    zeros = None if refs.zeros is None else scale_values(refs.zeros[some, :], spec.format)
    return Factors(scale_values(refs.scales[some, :], spec.format), zeros)


def _zero_from(factors: Factors, first: Any, axis: int) -> Factors:
    """Factors with 0 from an index on: memory beyond an array may hold anything, NaN too."""
    zeros = None if factors.zeros is None else zero_outside(factors.zeros, 0, first, axis)
    return Factors(zero_outside(factors.scales, 0, first, axis), zeros)


def _unpacker(
    refs: QuantizedRefs, factors: Factors, part: Part, tile: Any, spec: QuantizedSpec
) -> Callable[[int], jax.Array]:
    """From n to the numbers of code n of a part's words; its factors are spread once, for all codes of a word."""
    # A block of 128 groups serves `scale_tiles` tiles of words, a power of two.
    first = (tile & (spec.scale_tiles - 1)) * spec.blocks.block_w + part.word
    places = None if refs.table is None else jnp.broadcast_to(refs.table[...], (part.rows, LANES))
    groups: list[tuple[jax.Array, Factors]] = []
    for lane in range(0, part.words, LANES):
        scales = spread(factors.scales, first + lane, spec)
        zeros = None if factors.zeros is None else spread(factors.zeros, first + lane, spec)
        at = part.word + lane
        groups.append((refs.words[part.row : part.row + part.rows, at : at + LANES], Factors(scales, zeros)))
    return lambda n: jnp.concatenate([numbers(words, n, mine, places, spec) for words, mine in groups], axis=1)
