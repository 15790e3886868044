"""What products of a grouped matmul are summed in."""

import jax.numpy as jnp
import pytest

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.families.grouped_matmul.record import accumulator


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_sums_are_in_float32(dtype):
    record = GroupedMatmul(
        lhs=jnp.zeros((4, 2), dtype),
        rhs=jnp.zeros((1, 2, 3), dtype),
        group_sizes=jnp.ones(1, int),
        out_dtype=dtype,
        left_over="zero",
    )
    assert accumulator(record) == jnp.float32
