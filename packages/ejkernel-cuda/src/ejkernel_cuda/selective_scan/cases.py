"""Conformance cases of the selective scan in CUDA C++: enough blocks for its backward pass, and its dtypes."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.state_space_v1 import make_inputs
from ejkernel.modules.operations.cases.tables import tagged_case
from ejkernel.modules.operations.state_space_v1 import OP, StateSpaceV1Arguments
from ejkernel.ops.model import Case

# Name, (rows, tokens, channels, state dimension), dtype of x and others, dtype of dt, whether with initial states.
_CASE_SIZES = (
    ("many rows, bfloat16", (128, 70, 24, 16), jnp.bfloat16, jnp.bfloat16, False),
    ("many rows, dt float32", (64, 67, 136, 13), jnp.bfloat16, jnp.float32, True),
    ("many rows, float16", (128, 129, 16, 16), jnp.float16, jnp.float16, True),
    ("many rows, float32", (128, 64, 40, 9), jnp.float32, jnp.float32, True),
    ("many rows, dt float16", (128, 9, 8, 11), jnp.bfloat16, jnp.float16, False),
)


def _make_case(name: str, sizes: tuple[int, int, int, int], dtype: Any, dt_dtype: Any, has_initial_state: bool) -> Case:
    rows, tokens, channels, state_dim = sizes
    shape = jax.ShapeDtypeStruct
    token, pair = shape((rows, tokens, channels), dtype), shape((rows, tokens, state_dim), dtype)
    decay, skip = shape((channels, state_dim), jnp.float32), shape((channels,), jnp.float32)
    required_arrays = (token, decay, pair, pair, skip, shape(token.shape, dt_dtype))
    arguments_by_name: dict[str, Any] = dict(zip(OP.signature.parameters, required_arrays, strict=False))
    if has_initial_state:
        arguments_by_name["initial_state"] = shape((rows, channels, state_dim), jnp.float32)
    arguments = StateSpaceV1Arguments(**arguments_by_name)
    return tagged_case(
        name, lambda key: make_inputs(arguments, key), ("initial_state",) if has_initial_state else (), ()
    )


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {"state_space_v1": tuple(_make_case(*row) for row in _CASE_SIZES)}
