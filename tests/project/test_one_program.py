"""Operations of one family that mean the same are one program on Hopper: no name of an operation costs time."""

import jax
import jax.numpy as jnp
import machine_code
import pytest

from ejkernel.modules import attention, flash_attention, scaled_dot_product_attention
from ejkernel.ops.device import target_device

ARRAY = jax.ShapeDtypeStruct((4, 8192, 16, 128), jnp.bfloat16)
EQUIVALENT_CALLS = {
    "scaled_dot_product_attention": lambda q, k, v: scaled_dot_product_attention(q, k, v, causal=True),
    "attention": lambda q, k, v: attention(q, k, v, causal=True, return_weights=False)[0],
}


def mosaic_modules_of(call):
    """The Mosaic modules of a call and its gradients on an H200, and everything around them."""

    def call_and_gradients(arrays):
        output, pull = jax.vjp(call, *arrays)
        return output, pull(output)

    with target_device(machine_code.CHIPS["h200"]):
        return machine_code.mosaic_kernels(call_and_gradients, (ARRAY, ARRAY, ARRAY), "h200")


@pytest.mark.parametrize("name", EQUIVALENT_CALLS)
def test_equivalent_operations_lower_to_the_kernels_of_flash_attention(name):
    found = mosaic_modules_of(lambda q, k, v: flash_attention(q, k, v, causal=True))
    assert len(found) >= 2
    assert mosaic_modules_of(EQUIVALENT_CALLS[name]) == found
