"""The Triton kernels in programs that JAX lowers for CUDA, through jax-triton, on a machine without a GPU.

It wants jax-triton and JAX's CUDA plugin, whose compiler needs no driver: `nox -s triton_lowering` brings both.
"""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules import flash_attention, ragged_gated_delta_rule, recurrent_attention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_triton import _compat, launch
from ejkernel_triton.tiled_attention import config
from ejkernel_triton.tiled_attention.forward import forward

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
ARRAY = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)


def attention(query, key, value):
    return flash_attention(query, key, value, causal=True, platform="triton")


def loss(query, key, value):
    return attention(query, key, value).astype(jnp.float32).sum()


def scanned(query, key, value):
    return jax.lax.scan(lambda q, _: (attention(q, key, value), None), query, None, length=2)[0].sum()


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (attention, 1),
        (jax.grad(loss, (0, 1, 2)), 3),
        (jax.grad(jax.checkpoint(loss), (0, 1, 2)), 3),
        (lambda q, k, v: jax.vmap(lambda q: attention(q, k, v))(jnp.stack([q, q])), 1),
        (scanned, 1),
    ],
    ids=["forward", "gradients", "checkpoint", "vmap", "scan"],
)
def test_a_lowered_program_contains_the_kernel_calls(function, kernels):
    with target_device(H200):
        program = jax.jit(function).trace(ARRAY, ARRAY, ARRAY).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("custom_call @triton_kernel_call") == kernels


def test_a_decode_step_updates_a_donated_state_in_place():
    """Nothing but the kernel stands between the state that comes in and the one that goes out."""
    tokens = jax.ShapeDtypeStruct((4, 1, 8, 128), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((4, 8, 128, 128), jnp.float32)

    def step(state, query, gate):
        options = {"gv": gate, "initial_state": state, "return_state": True, "platform": "triton"}
        return recurrent_attention(query, query, query, **options)

    with target_device(H200):
        lowered = jax.jit(step, donate_argnums=0).trace(state, tokens, tokens).lower(lowering_platforms=("cuda",))
    program = lowered.as_text()
    assert "%arg0: tensor<4x8x128x128xf32> {tf.aliasing_output = 1" in program
    # jax-triton 0.3 has the state as an input, 0.4 as the output's own parameter; its result is the last there.
    result, operand = (0, 12) if _compat.output_shape_keyword() == "out_shape" else (1, 13)
    assert f"output_operand_alias<output_tuple_indices = [{result}], operand_index = {operand}" in program
    # The barriers keep XLA from fusing the kernel with slices, and move nothing.
    barrier = "optimization_barrier"
    assert re.findall(r"= stablehlo\.(\w+)", program) == [barrier, "custom_call", barrier]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_decode_step_updates_donated_slots_in_place(dtype):
    """No state is gathered before the kernel, nor stored behind it."""
    tokens = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    slots = jax.ShapeDtypeStruct((100, 8, 128, 128), dtype)
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (5, 4)]

    def step(slots, x, gate, starts, indices):
        options = {"use_qk_l2norm": False, "platform": "triton"}
        return ragged_gated_delta_rule(x, x, x, gate, gate, slots, starts, indices, **options)

    with target_device(H200):
        lowered = jax.jit(step, donate_argnums=0).trace(slots, tokens, gate, *ints).lower(lowering_platforms=("cuda",))
    program = lowered.as_text()
    name = "f32" if dtype == jnp.float32 else "bf16"
    assert f"%arg0: tensor<100x8x128x128x{name}> {{tf.aliasing_output = 1" in program
    result, operand = (0, 12) if _compat.output_shape_keyword() == "out_shape" else (1, 13)
    assert f"output_operand_alias<output_tuple_indices = [{result}], operand_index = {operand}" in program
    # Axes of size 1 come and go around the kernel; nothing else touches the slots, and there are no gathered states.
    shaped = re.findall(rf"= stablehlo\.(\w+).*tensor<(?:\d+x)*8x128x128x{name}>", program)
    assert set(shaped) <= {"custom_call", "optimization_barrier", "broadcast_in_dim", "reshape"}
    assert "tensor<4x8x128x128x" not in program


def test_dead_code_elimination_goes_through_a_kernel(monkeypatch):
    """As JAX's own transformations do it, on a launch that nothing wraps."""
    partial_eval = importlib.import_module("jax._src.interpreters.partial_eval")
    monkeypatch.setattr(launch.custom_batching, "custom_vmap", lambda run: _Unwrapped(run))
    _compat.triton_call()
    record = TiledAttention(query=ARRAY, key=ARRAY, value=ARRAY, softmax_scale=0.125)
    with target_device(H200):
        run = functools.partial(forward, params=config.heuristic(record, H200, "forward"))
        traced = jax.make_jaxpr(lambda record: run(record)[0])(record)
    assert any(equation.primitive.name == "triton_kernel_call" for equation in traced.jaxpr.eqns)
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    assert used == [True, True, True]


class _Unwrapped:
    """A function in the clothes of `custom_vmap`."""

    def __init__(self, run):
        self.run = run

    def __call__(self, *arrays):
        return self.run(*arrays)

    def def_vmap(self, rule):
        """Nothing is mapped."""
