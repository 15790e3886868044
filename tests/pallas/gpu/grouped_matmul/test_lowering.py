"""Grouped matmul in Mosaic GPU, lowered for CUDA without a GPU; and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.grouped_matmul import _plain_implementation, config, refusal_reasons, spec
from ejkernel_pallas.gpu.grouped_matmul.backward import backward
from ejkernel_pallas.gpu.grouped_matmul.forward import forward
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY_BYTES

SHAPE = jax.ShapeDtypeStruct


def make(rows=520, depth=128, width=320, transposed=False, out=jnp.bfloat16, dtype=jnp.bfloat16):
    matrices = (5, width, depth) if transposed else (5, depth, width)
    return GroupedMatmul(
        lhs=SHAPE((rows, depth), dtype),
        rhs=SHAPE(matrices, dtype),
        group_sizes=SHAPE((5,), jnp.int32),
        out_dtype=jnp.dtype(out),
        transpose_rhs=transposed,
        left_over="zero",
    )


def lowered(record, of_rows, of_matrices):
    """A call and its gradients."""
    width = record.rhs.shape[1 if record.transpose_rhs else 2]

    def run(record, cotangent):
        output, _ = forward(record, of_rows)
        wanted = frozenset({"lhs", "rhs"})
        saved = Pullback(record=record, residuals=(), output=output, cotangent=cotangent, grad_fields=wanted)
        return output, backward(saved, of_matrices)

    cotangent = SHAPE((record.lhs.shape[0], width), record.out_dtype)
    traced = jax.jit(run).trace(record, cotangent)
    return traced.lower(lowering_platforms=("cuda",)).as_text(), traced.out_info


FORWARD, BACKWARD = (config.candidates(make(), None, direction) for direction in ("forward", "backward"))
HALVED = {"half_columns": True, "overlap": False, "block_n": 256, "stages": 4, "output_buffers": 2}
CLUSTERS = [
    (
        dataclasses.replace(FORWARD[0], **fields),
        dataclasses.replace(BACKWARD[0], **fields, **{f"rhs_{name}": value for name, value in fields.items()}),
    )
    for fields in ({"cluster_m": 2, "cluster_n": 1}, {"cluster_m": 1, "cluster_n": 2})
]
HALVES = [(dataclasses.replace(FORWARD[0], **HALVED), dataclasses.replace(BACKWARD[0], **HALVED))]


@pytest.mark.parametrize("params", [(FORWARD[0], BACKWARD[0]), *CLUSTERS, *HALVES], ids=str)
@pytest.mark.parametrize("fields", [{}, {"transposed": True, "dtype": jnp.float16}, {"out": jnp.float32}], ids=str)
def test_a_call_and_its_gradients_lower(fields, params):
    record = make(**fields)
    text, (output, gradients) = lowered(record, *params)
    assert text.count("@mosaic_gpu") == 3
    assert (output.shape, output.dtype) == ((520, 320), record.out_dtype)
    for name in ("lhs", "rhs"):
        assert (gradients[name].shape, gradients[name].dtype) == (getattr(record, name).shape, record.lhs.dtype)


@pytest.mark.parametrize("params", [*FORWARD, *(params.rhs_gradient_config for params in BACKWARD)], ids=str)
def test_candidates_fit_into_shared_memory(params):
    assert spec.shared_memory_bytes(params) <= SHARED_MEMORY_BYTES - spec.RESERVED_SMEM_BYTES


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_n", 100), ("stages", 1), ("stages", 9), ("group_m", 0), ("output_buffers", 0), ("cluster_m", 3)],
)
def test_invalid_tile_fields_are_errors(name, value):
    params = dataclasses.replace(FORWARD[0], **{name: value})
    with pytest.raises(ValueError, match=f"{name}={value}"):
        spec.make_spec(make(), params, jnp.bfloat16)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (make(), []),
        (make(rows=513), []),
        (make(rows=1), []),
        (make(depth=100), ["contracted axis of lhs has 100"]),
        (make(width=100), ["output axis of rhs has 100"]),
        (dataclasses.replace(make(), rhs=SHAPE((5, 128, 320), jnp.int8)), ["int8"]),
    ],
)
def test_unsupported_records_are_refused_with_a_reason(record, words):
    found = refusal_reasons(record)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@pytest.mark.parametrize("rows", [0, 1, 63, 513])
def test_rows_that_are_no_whole_tiles_are_padded_in_both_passes(rows):
    text, (output, gradients) = lowered(make(rows=rows), FORWARD[0], BACKWARD[0])
    assert text.count("@mosaic_gpu") == 3
    assert (output.shape, gradients["lhs"].shape) == ((rows, 320), (rows, 128))


def test_only_whole_tiles_come_first_outside_of_a_batch_invariant_block():
    implementation = _plain_implementation()
    assert [implementation.priority(make(rows=rows), None, "forward") for rows in (1, 56, 64, 100, 104)] == [
        *(-1, -1, 20, -1, 20)
    ]
    assert implementation.invariant_priority == 20


@pytest.mark.parametrize("rows", [1, 64, 100_000])
def test_only_tiles_with_equal_sums_depend_on_the_rows_of_a_batch_invariant_call(rows):
    """The step of contracted elements is the same in all of them."""
    part = config.batch_invariant(make(rows=rows), None, "forward")
    padded = make(rows=max(rows, 64))
    assert spec.make_spec(padded, part, jnp.bfloat16).contracted_per_step == spec.CONTRACTED_PER_STEP_16_BIT
