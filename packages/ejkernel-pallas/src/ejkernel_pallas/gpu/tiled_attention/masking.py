"""Masks of one tile of scores: a range of columns for every row, and equal segment ids."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel_pallas.gpu.tiled_attention.spec import Spec
from ejkernel_pallas.gpu.tiled_attention.warpgroups import scalar

ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
FAR = 2**30


def key_range(spec: Spec, rows: int, query: Any, key: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """First and last column, as int32 [rows], that every row of a tile may attend to; None where all columns may.

    Args:
        spec: The kernel's constants.
        rows: Queries of the tile, its rows.
        query: Index of its first query.
        key: Index of its first key.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROWS) + (query - key)
    low = None if spec.left is None else row - spec.left
    last = spec.keys - 1 - key
    return low, jnp.full((rows,), last, jnp.int32) if spec.right is None else jnp.minimum(row + spec.right, last)


def query_range(spec: Spec, rows: int, query: Any, key: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """Likewise where keys are the rows of a tile and queries its columns."""
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROWS) + (key - query)
    low = jnp.full((rows,), 0, jnp.int32) if spec.right is None else row - spec.right
    low = jnp.where(row < spec.keys - query, low, FAR)
    return low, None if spec.left is None else row + spec.left


def within(scores: jax.Array, low: jax.Array | None, high: jax.Array | None) -> jax.Array:
    """Scores with -inf in columns before `low` and after `high`, both int32 for every row.

    Columns are constants of the instructions that compare. As arrays they would be the same in all turns of a loop,
    and stay in registers that there are not enough of.
    """
    if low is None and high is None:
        return scores
    limits = [plgpu.layout_cast(limit, ROWS) for limit in (low, high) if limit is not None]
    tests = [test for test, limit in (("le", low), ("ge", high)) if limit is not None]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *(ROWS for _ in limits)),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=plgpu.Layout.WGMMA),
    )
    def select(_: Any, tile: Any, *bounds: Any) -> Any:
        return _select(tile, bounds, tests)

    return select(scores, *limits)


def same_ids(scores: jax.Array, row_ids: jax.Array, column_ids: jax.Array) -> jax.Array:
    """Scores with -inf where the ids of row and column differ."""
    row_ids, column_ids = (lax.broadcast_in_dim(ids, scores.shape, [n]) for n, ids in enumerate((row_ids, column_ids)))
    return jnp.where(row_ids == column_ids, scores, -jnp.inf)


def _select(tile: Any, bounds: tuple[Any, ...], tests: list[str]) -> Any:
    """Every thread has two rows, and of each eight columns the two that its place among four threads says."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    constant = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
    place = arith.muli(arith.andi(mgpu.utils.thread_idx(), constant(3)), constant(2))
    limits = [[arith.subi(scalar(bound.registers.flat[half]), place) for half in (0, 1)] for bound in bounds]
    code = "{ .reg .pred p; " + _test(0, tests[0], "p")
    code += f"{_test(1, tests[1], 'p', ', p')} " if len(tests) > 1 else ""
    code += "selp.f32 $0, $1, 0fFF800000, p; }"
    registers = tile.registers.copy()
    for place, register in enumerate(tile.registers.flat):
        eight, half = divmod(place, 2)
        made = register
        for n in (0, 1):
            position = ir.DenseI64ArrayAttr.get([n])
            score = vector.extract(register, dynamic_position=[], static_position=position)
            operands = [score, constant(eight * 8 + n), *(limit[half] for limit in limits)]
            constraints = "=f,f,n" + ",r" * len(limits)
            kept: Any = llvm.inline_asm(f32, operands, code, constraints, has_side_effects=False)
            made = vector.insert(kept, made, dynamic_position=[], static_position=position)
        registers.flat[place] = made
    return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)


def _test(number: int, comparison: str, predicate: str, also: str = "") -> str:
    """PTX that compares a limit with a column."""
    suffix = ".and" if also else ""
    return f"setp.{comparison}{suffix}.s32 {predicate}, ${number + 3}, $2{also}; "
