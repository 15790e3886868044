"""The scalar operations of `score_mod` and `mask_mod`, against the functions themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention.mask_bounds import values_of_nodes
from ejkernel.planning.scalar_operations import compute_node
from ejkernel.planning.scalar_programs import loaded_arrays, scalar_program
from ejkernel.types.pair_functions import mask_function, score_function

TABLE = jax.random.normal(jax.random.key(0), (4, 9))
BIAS = jax.random.normal(jax.random.key(1), (2, 4, 6), jnp.bfloat16)
WORDS = jnp.arange(6, dtype=jnp.int32) * 7
INDICES = [jnp.arange(n, dtype=jnp.int32) for n in (2, 4, 6, 5)]


def swish(score, b, h, q_idx, k_idx):
    return jax.nn.silu(score) + score**3 - jnp.exp2(-jnp.abs(score)) * jnp.where(h > 1, 2.0, jnp.sign(score))


def tables(score, b, h, q_idx, k_idx):
    bucket = jnp.clip(k_idx - q_idx, -4, 4) + 4
    return 3 * jnp.tanh(score / 3) + TABLE[h, bucket] + (2 * BIAS)[b][h, q_idx].astype(jnp.float32) + TABLE[0, 0]


def distances(score, b, h, q_idx, k_idx):
    return score * 2.0 ** (-h) - jnp.log1p(jnp.abs(q_idx - k_idx) * 0.5) + jnp.maximum(score, -1) + (k_idx - q_idx)


@pytest.mark.parametrize("function", [swish, tables, distances])
def test_score_programs_match_functions_and_their_derivatives(function):
    traced = score_function("score_mod", function, jnp.float32)
    program, arrays = scalar_program(traced), loaded_arrays(traced)
    assert not program.refusals
    grid = jnp.meshgrid(*INDICES, indexing="ij")
    score = jax.random.normal(jax.random.key(2), grid[0].shape)
    expected = jnp.vectorize(jax.value_and_grad(function))(score, *grid)
    indices = dict(zip(("b", "h", "q_idx", "k_idx"), grid, strict=True)) | {"score": score}
    values = {}
    for n, node in enumerate(program.nodes):
        operands = [values[x] for x in node.operands]
        if node.operation == "load":
            values[n] = arrays[node.value][tuple(operands)] if operands else arrays[node.value]
        elif node.operation == "constant":
            values[n] = jnp.full(score.shape, node.value, node.dtype)
        else:
            values[n] = indices[node.operation] if node.operation in indices else compute_node(node, operands)
    for found, result in zip((program.result, program.slope), expected, strict=True):
        np.testing.assert_allclose(values[found].astype(jnp.float32), result, rtol=2e-5, atol=2e-5)


def test_mask_programs_match_functions():
    def mask(b, h, q_idx, k_idx):
        is_set = (WORDS[q_idx] >> k_idx) & 1 == 1
        return (is_set ^ (k_idx // 3 == q_idx // 3)) & ~((q_idx + k_idx) % 4 == h) | (b > q_idx)

    traced = mask_function("mask_mod", mask)
    program = scalar_program(traced)
    assert not program.refusals
    shaped = [x.reshape([-1 if n == axis else 1 for n in range(4)]) for axis, x in enumerate(INDICES)]
    values = values_of_nodes(program, program.live_nodes(program.result), shaped, loaded_arrays(traced))
    expected = jnp.vectorize(mask)(*jnp.meshgrid(*INDICES, indexing="ij"))
    np.testing.assert_array_equal(jnp.broadcast_to(values[program.result], expected.shape), expected)


def test_equal_functions_have_equal_programs():
    programs = [scalar_program(score_function("score_mod", lambda s, b, h, q, k: s + q, jnp.float32)) for _ in range(2)]
    assert programs[0] == programs[1]
    assert programs[0].has_constant_slope
    assert not scalar_program(score_function("score_mod", swish, jnp.float32)).has_constant_slope


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, b, h, q, k: jnp.sin(s), "operation sin"),
        (lambda s, b, h, q, k: s + jnp.sum(TABLE[h]), "computes with all of an array|operation reduce_sum"),
        (lambda s, b, h, q, k: s + (BIAS[0, h, q] * k).astype(jnp.float32), "int32 to bfloat16"),
        (lambda s, b, h, q, k: s + WORDS.astype(jnp.uint8)[q], "reads an array of uint8"),
    ],
)
def test_what_kernels_cannot_compute_is_refused_by_name(function, words):
    (refusal, *_) = scalar_program(score_function("score_mod", function, jnp.float32)).refusals
    assert any(word in refusal for word in words.split("|")), refusal


def test_an_index_is_compared_with_the_first_array():
    """The number of that array is 0, as is what JAX compares an index with before it counts from an array's end."""
    traced = mask_function("mask_mod", lambda b, h, q_idx, k_idx: k_idx < WORDS[b])
    assert scalar_program(traced).inputs_read == {"b", "k_idx"}


@pytest.mark.parametrize("shape", [(4, 4), (2, 8), (16, 1)])
def test_a_part_of_an_array_is_not_reshaped(shape):
    blocks = jnp.zeros((2, 4, 4), jnp.int32)

    def mask(b, h, q_idx, k_idx):
        return blocks[b].reshape(shape)[q_idx % 4, 0] > 0

    (refusal,) = scalar_program(mask_function("mask_mod", mask)).refusals or (None,)
    assert refusal == (None if shape == (4, 4) else "has the operation reshape, which the kernels do not have")
