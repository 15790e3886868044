"""Values of scalar operands: found in a program, and laid out as in scalar memory."""

import jax
import jax.numpy as jnp
import numpy as np
import profiled_kernels
import pytest
from jax.experimental import pallas as pl  # noqa: TID251
from jax.experimental.pallas import tpu as pltpu  # noqa: TID251
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel_pallas.tpu.profile.scalars import pack_words, pallas_calls


def calls(function, *args):
    """The calls of a program, where arrays are known and shapes are not."""
    leaves = jax.tree.leaves(args)
    values = [None if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf) for leaf in leaves]
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    return pallas_calls(function, abstract, values)


def pages_of(lengths, table, memory):
    return profiled_kernels.pages(lengths, table).function(lengths, table, memory)


MEMORY = jax.ShapeDtypeStruct((8, 16, 128), jnp.float32)
LENGTHS, TABLE = profiled_kernels.LENGTHS, profiled_kernels.TABLE
SHAPE = jax.ShapeDtypeStruct((4,), jnp.int32)


def test_concrete_scalar_operands_are_found():
    ((call),) = calls(pages_of, LENGTHS, TABLE, MEMORY)
    assert (call.name, call.grid) == ("pages_kernel", (4,))
    np.testing.assert_array_equal(call.scalar_operands[0], LENGTHS)
    np.testing.assert_array_equal(call.scalar_operands[1], TABLE)


def test_operands_computed_from_known_values_are_evaluated():
    @jax.jit
    def program(starts, memory):
        lengths = jax.lax.cond(starts[0] == 0, lambda s: s[1:] - s[:-1], lambda s: s[:-1], starts)
        table = jax.lax.fori_loop(0, 3, lambda k, t: t + k, jnp.zeros((4, 5), jnp.int32))
        return pages_of(lengths, table, memory)

    ((call),) = calls(program, np.array([0, 3, 3, 8, 9], np.int32), MEMORY)
    np.testing.assert_array_equal(call.scalar_operands[0], LENGTHS)
    np.testing.assert_array_equal(call.scalar_operands[1], np.full((4, 5), 3))


def test_calls_with_a_custom_batching_rule_are_traversed():
    program = jax.custom_batching.sequential_vmap(lambda *args: pages_of(*args))
    ((call),) = calls(program, LENGTHS, TABLE, MEMORY)
    np.testing.assert_array_equal(call.scalar_operands[0], LENGTHS)


def test_inputs_whose_blocks_are_in_scalar_memory_are_evaluated():
    def program(lists, memory):
        return pl.pallas_call(
            lambda lists, memory, out: None,
            grid=(2,),
            in_specs=[
                pl.BlockSpec((1, 128), lambda i: (0, i), memory_space=pltpu.SMEM),
                pl.BlockSpec((8, 128), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        )(lists + 1, memory)

    lists, memory = np.arange(256, dtype=np.int32)[None], np.zeros((8, 128), np.float32)
    ((call),) = calls(program, lists, memory)
    np.testing.assert_array_equal(call.scalar_operands[0], lists + 1)
    assert call.scalar_operands[1] is None


def test_operands_computed_from_unknown_values_are_unknown():
    ((call),) = calls(lambda n, t, m: pages_of(n * 2, t + 1, m), SHAPE, TABLE, MEMORY)
    assert call.scalar_operands[0] is None
    np.testing.assert_array_equal(call.scalar_operands[1], TABLE + 1)


def test_unknown_values_are_evaluated_once():
    """Without a memory of failures this takes 2 to the power of 60 steps."""

    def program(lengths, memory):
        for _ in range(60):
            lengths = lengths + lengths
        return pages_of(lengths, TABLE, memory)

    assert calls(program, SHAPE, MEMORY)[0].scalar_operands[0] is None


def test_results_of_a_kernel_are_unknown_operands():
    def program(lengths, memory):
        sums = pages_of(lengths, TABLE, memory)
        return pages_of(sums[:4, 0].astype(jnp.int32), TABLE, memory)

    first, second = calls(program, LENGTHS, MEMORY)
    assert first.scalar_operands[0] is not None
    assert second.scalar_operands[0] is None


def test_operands_are_those_of_the_first_device_of_a_mesh():
    """It knows its index and its part of an array, and nothing that another has."""
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])

    def part(lengths, memory):
        here = lengths + jax.lax.axis_index("x")
        pages_of(here, jnp.zeros((4, 5), jnp.int32) + here[0], memory)
        theirs = jax.lax.ppermute(lengths, "x", [(0, 1), (1, 0)])
        return pages_of(theirs, TABLE, memory)

    program = jax.shard_map(part, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    near, far = calls(program, np.concatenate([LENGTHS, LENGTHS + 1]), MEMORY)
    np.testing.assert_array_equal(near.scalar_operands[0], LENGTHS)
    np.testing.assert_array_equal(near.scalar_operands[1], np.full((4, 5), LENGTHS[0]))
    assert far.scalar_operands[0] is None


def test_32_bit_vectors_are_packed_unchanged():
    assert pack_words(np.array([1, -2, 3], np.int32)) == [1, -2, 3]
    assert pack_words(np.array([1, 2**31], np.uint32)) == [1, 2**31]


def test_scalars_and_booleans_are_packed_as_words():
    assert pack_words(np.int32(-7)) == [-7]
    assert pack_words(np.array([True, False])) == [1, 0]


def test_narrow_integers_share_words():
    assert pack_words(np.array([1, 2, -1], np.int8)) == [1 | 2 << 8 | 0xFF << 16]
    assert pack_words(np.array([1, -1, 5], np.int16)) == [(1 | 0xFFFF << 16) - (1 << 32), 5]


@pytest.mark.parametrize(("rows", "tile"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 8)])
def test_matrices_are_packed_in_tiles(rows, tile):
    table = np.arange(rows * 200, dtype=np.int32).reshape(rows, 200)
    words = pack_words(table)
    assert len(words) == -(-rows // tile) * tile * 256
    for row, column in ((0, 0), (rows - 1, 127), (rows - 1, 199), (0, 128)):
        place = (row // tile * 2 + column // 128) * tile * 128 + row % tile * 128 + column % 128
        assert words[place] == table[row, column]


def test_rows_of_narrow_integers_share_words():
    table = np.arange(8 * 128, dtype=np.int16).reshape(8, 128)
    words = pack_words(table)
    assert words[:128] == [int(table[0, c]) | int(table[1, c]) << 16 for c in range(128)]


def test_leading_dimensions_are_packed_as_separate_tiles():
    table = np.arange(3 * 2 * 128, dtype=np.int32).reshape(3, 2, 128)
    assert pack_words(table) == table.reshape(-1).tolist()
