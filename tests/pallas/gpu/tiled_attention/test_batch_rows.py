"""Batch rows of the Mosaic GPU kernels under `jax.vmap`: one launch, on more rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.planning.batch_rows import run_with_batch_rows
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.tiled_attention.backward import backward
from ejkernel_pallas.gpu.tiled_attention.config import HopperBackward, HopperForward
from ejkernel_pallas.gpu.tiled_attention.forward import forward


def sums(batch, calls):
    """Adds rows of `x` and `y`, which has one row for all or one for each, as kernels do: they know rows alone."""

    def run(operands, rows):
        calls.append(rows)
        assert all(len(x) in (1, rows) for x in operands.values())
        x, y = ([x[b % len(x)] for b in range(rows)] for x in operands.values())
        return (jnp.stack(x) + jnp.stack(y),)

    return lambda x, y: run_with_batch_rows(run, {"x": x, "y": y}, batch)[0]


@pytest.mark.parametrize(("batch", "shared"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmapped_and_shared_operands_are_paired_by_batch_row(batch, shared, axes):
    x, y = (jax.random.normal(jax.random.key(n), (4, rows, 5)) for n, rows in enumerate((batch, shared)))
    x, y = (z if axis == 0 else z[0] for z, axis in zip((x, y), axes, strict=True))
    calls = []

    made = jax.vmap(sums(batch, calls), in_axes=axes)(x, y)

    np.testing.assert_array_equal(made, jax.vmap(lambda x, y: x + y, in_axes=axes)(x, y))
    assert calls[-1] == 4 * batch


def test_nested_vmaps_are_one_launch():
    x, calls = jax.random.normal(jax.random.key(0), (2, 3, 4, 5)), []

    made = jax.vmap(jax.vmap(sums(4, calls), in_axes=(0, None)), in_axes=(0, None))(x, x[0, 0, :1])

    np.testing.assert_array_equal(made, x + x[0, 0, :1])
    assert calls[-1] == 24


@pytest.mark.parametrize("shared", ["nothing", "keys"])
def test_a_vmapped_forward_pass_is_one_kernel(shared):
    query = jax.ShapeDtypeStruct((3, 2, 256, 4, 128), jnp.bfloat16)
    key = query if shared == "nothing" else jax.ShapeDtypeStruct(query.shape[1:], query.dtype)
    sinks = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    params = HopperForward(block_q=128, block_kv=128, stages=2)

    def call(q, k, s):
        return forward(TiledAttention(query=q, key=k, value=k, softmax_scale=0.1, softmax_aux=s), params)

    mapped = jax.jit(jax.vmap(call, in_axes=(0, 0 if shared == "nothing" else None, 0))).trace(query, key, sinks)
    text = mapped.lower(lowering_platforms=("cuda",)).as_text()

    assert text.count("custom_call @mosaic_gpu") == 1
    assert mapped.out_info[0].shape == query.shape


@pytest.mark.parametrize("shared", ["nothing", "keys"])
def test_a_vmapped_backward_pass_is_one_kernel(shared):
    query = jax.ShapeDtypeStruct((3, 1, 256, 4, 128), jnp.bfloat16)
    key = query if shared == "nothing" else jax.ShapeDtypeStruct(query.shape[1:], query.dtype)
    lse = jax.ShapeDtypeStruct((3, 1, 4, 256), jnp.float32)
    params = HopperBackward(block_kv=128, block_q=64, stages=3)

    def call(q, k, lse):
        record = TiledAttention(query=q, key=k, value=k, softmax_scale=0.1, causal=True)
        residuals = SoftmaxResiduals(lse=lse)
        saved = Pullback(
            record=record, residuals=residuals, output=q, cotangent=q, grad_fields=frozenset({"query", "key"})
        )
        return backward(saved, params)

    mapped = jax.jit(jax.vmap(call, in_axes=(0, 0 if shared == "nothing" else None, 0))).trace(query, key, lse)
    text = mapped.lower(lowering_platforms=("cuda",)).as_text()

    assert text.count("custom_call @mosaic_gpu") == 1
    assert {name: x.shape for name, x in mapped.out_info.items()} == {"query": query.shape, "key": query.shape}
