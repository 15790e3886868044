"""Collective matmul in Mosaic GPU, lowered for CUDA without a GPU; and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.collective_matmul import config, refusal_reasons, spec
from ejkernel_pallas.gpu.collective_matmul.backward import backward
from ejkernel_pallas.gpu.collective_matmul.forward import forward

SHAPE = jax.ShapeDtypeStruct


def record_of(x, y, collective, transpose_y=False):
    return CollectiveMatmul(x=x, y=y, collective=collective, axis_name="tp", transpose_y=transpose_y, collective_id=0)


def lowered(collective, devices, params):
    """A call of [256 P, 256] times [256, 384 P] and its gradients; of the other collective, the transposed call."""
    gathers = collective == "all_gather"
    rows, columns = P("tp"), P(None, "tp")
    specs = (rows, columns) if gathers else (columns, columns)

    def run(x, y):
        record = record_of(x, y, collective, transpose_y=not gathers)
        output, _ = forward(record, params)
        requested = frozenset({"x", "y"})
        saved = Pullback(record=record, residuals=(), output=output, cotangent=output, grad_fields=requested)
        gradients = backward(saved, params)
        return output, gradients["x"], gradients["y"]

    mesh = jax.make_mesh((devices,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:devices])
    out_specs = (columns if gathers else rows, *specs)
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False))
    shapes = (256 * devices, 256), (256, 384 * devices)
    arrays = [SHAPE(shape, jnp.bfloat16) for shape in shapes]
    if not gathers:
        arrays = [SHAPE((256 * devices, 384 * devices), jnp.bfloat16), SHAPE((256, 384 * devices), jnp.bfloat16)]
    traced = mapped.trace(*arrays)
    for array, gradient in zip(arrays, traced.out_info[1:], strict=True):
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_call_and_its_gradients_lower(collective, devices):
    """No collective of XLA is left: a kernel per product with x or y, and one that gathers rows where none has."""
    text = lowered(collective, devices, config.CANDIDATES[0])
    gathers_rows_apart = collective == "all_gather" and devices > 1
    assert text.count("@mosaic_gpu") == 2 + gathers_rows_apart
    assert text.count("uses_xla_collective_metadata = true") == (2 + gathers_rows_apart if devices > 1 else 0)
    for name in ("collective_permute", '"stablehlo.all_gather"', '"stablehlo.reduce_scatter"'):
        assert name not in text


@pytest.mark.parametrize("params", config.CANDIDATES, ids=str)
def test_candidates_fit_into_shared_memory(params):
    assert spec.shared_memory_bytes(params) <= spec.SHARED_MEMORY_BYTES - spec.RESERVED_SMEM_BYTES


@pytest.mark.parametrize(
    ("name", "value"), [("block_n", 192), ("stages", 1), ("stages", 9), ("group_m", 0), ("output_buffers", 0)]
)
def test_invalid_tile_fields_are_errors(name, value):
    params = dataclasses.replace(config.CANDIDATES[0], **{name: value})
    record = record_of(SHAPE((256, 256), jnp.bfloat16), SHAPE((256, 384), jnp.bfloat16), "all_gather")
    with pytest.raises(ValueError, match=f"{name}={value}"):
        spec.make_spec(record, params, record.x, 0, gathers=True)


NO_CAPTURES = "--xla_gpu_enable_command_buffer=-CUSTOM_CALL"


def reasons(collective, x, y, devices=2, other_devices=1):
    """Why the kernels refuse a product of a device's x and y over the axis "tp"."""
    found = []

    def body(x, y):
        found.extend(refusal_reasons(record_of(x, y, collective)))
        return x

    axes, kinds = ("dp", "tp"), (AxisType.Auto,) * 2
    mesh = jax.make_mesh((other_devices, devices), axes, kinds, devices=jax.devices()[: devices * other_devices])
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.eval_shape(mapped, SHAPE(x, jnp.bfloat16), SHAPE(y, jnp.bfloat16))
    return found


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("all_gather", (128, 128), (128, 256)), []),
        (("all_gather", (96, 128), (128, 256)), ["96 rows"]),
        (("reduce_scatter", (192, 128), (128, 256)), ["96 rows"]),
        (("all_gather", (128, 64), (64, 256)), ["contracted axis of x has 64"]),
        (("all_gather", (128, 128), (128, 192)), ["output axis of y has 192"]),
        (("all_gather", (128, 128), (128, 256), 2, 2), ["has 2 of the mesh's 4 devices"]),
    ],
    ids=str,
)
def test_unsupported_calls_are_refused_with_a_reason(call, words, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", NO_CAPTURES)
    found = reasons(*call)
    assert len(found) == len(words), found
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ("", True),
        ("--xla_gpu_enable_command_buffer=+WHILE", True),
        ("--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL", True),
        ("--xla_gpu_enable_command_buffer=", False),
        ("--xla_gpu_enable_command_buffer=FUSION --xla_cpu_enable_fast_math=false", False),
        (NO_CAPTURES, False),
    ],
)
def test_calls_that_xla_captures_into_cuda_graphs_are_refused(flags, is_refused, monkeypatch):
    """Graphs keep other devices' addresses. A call on one device has none of them."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert [("CUDA graph" in x) for x in reasons("all_gather", (128, 128), (128, 256))] == [True] * is_refused
    assert not reasons("all_gather", (128, 128), (128, 256), devices=1)
