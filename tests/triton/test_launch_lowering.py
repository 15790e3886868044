"""What jax-triton and jaxlib make of launches that write over an input: which parameter gets which buffer."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import gated_delta_rule, state_space_v1
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_triton import _compat

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)


def array(*shape, dtype=jnp.float32):
    """An array of a shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


def scan_step(x, decay, write, skip, slots, bounds, indices):
    options = {"initial_state": slots, "cu_seqlens": bounds, "state_indices": indices, "platform": "triton"}
    return state_space_v1(x, decay, write, write, skip, x, **options)


def delta_step(query, gate, state):
    options = {"initial_state": state, "return_state": True, "platform": "triton"}
    return gated_delta_rule(query, query, query, gate, gate, **options)


CALLS = {
    "scan_step": (
        scan_step,
        [
            *(array(1, 4, 64), array(64, 5), array(1, 4, 5), array(64), array(1, 64, 5)),
            *(array(2, dtype=jnp.int32), array(1, dtype=jnp.int32)),
        ],
    ),
    "delta_step": (delta_step, [array(2, 1, 4, 64), array(2, 1, 4), array(2, 4, 64, 64)]),
}


def kernel_calls(jaxpr):
    """The equations that call Triton kernels, within all others."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "triton_kernel_call":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from kernel_calls(inner)


@pytest.mark.parametrize("name", CALLS)
def test_parameters_are_in_the_order_of_operands_and_then_results(name):
    function, shapes = CALLS[name]
    with target_device(H200):
        traced = jax.jit(function).trace(*shapes)
        traced.lower(lowering_platforms=("cuda",))
    calls = list(kernel_calls(traced.jaxpr.jaxpr))
    aliased = [x for x in calls if dict(x.params["input_output_aliases"])]
    assert aliased
    for equation in aliased:
        outputs, aliases = equation.params["out_shapes"], equation.params["input_output_aliases"]
        if (
            _compat.output_shape_keyword() == "out_shape"
        ):  # jax-triton 0.3 itself lists all operands and then all results
            continue
        # jaxlib hands out buffers in the order of the call: results of aliases come last, where no parameter is left.
        assert sorted(aliases.values()) == list(range(len(outputs) - len(aliases), len(outputs)))
        parameters = equation.params["in_tree"].unflatten(range(len(equation.invars)))
        numbers = [x if isinstance(x, int) else len(equation.invars) + x.ordinal for x in parameters]
        assert numbers == list(range(len(parameters)))


def test_kernels_are_compiled_with_fusion_and_without_a_warning(recwarn):
    """Triton 3.9 warns where nobody says whether products and sums are fused."""
    function, shapes = CALLS["delta_step"]
    with target_device(H200):
        traced = jax.jit(lambda *arrays: function(*arrays)).trace(*shapes)
        traced.lower(lowering_platforms=("cuda",))
    (call,) = kernel_calls(traced.jaxpr.jaxpr)
    options = call.params.get("backend_options", call.params)
    assert options["enable_fp_fusion"] is True
    assert not [x for x in recwarn if "fusion" in str(x.message)]
