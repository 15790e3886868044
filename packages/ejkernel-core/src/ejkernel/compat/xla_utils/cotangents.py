"""Functions that change or check the gradient of an array in the backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from ejkernel.modules.operations.shared.shapes import as_float_dtype
from ejkernel.planning.precision import rounded
from ejkernel.promotion import with_standard_promotion


def identity_dtype_convert(dtype: DTypeLike) -> Callable[[Any], Any]:
    """Makes a function that returns its argument, and whose gradient is rounded to `dtype`.

    JAX wants the gradient of an array in that array's own dtype: what `dtype` cannot represent is lost on the way, and
    the result comes back in the dtype of the argument.

    Args:
        dtype: Floating dtype to round to.

    Returns:
        Function of one pytree of floating arrays.

    Raises:
        ValueError: `dtype` is no floating dtype.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.xla_utils import identity_dtype_convert

        rounded = identity_dtype_convert(jnp.bfloat16)
        assert jax.grad(lambda x: rounded(x) * 1.001)(1.0) == 1.0
        ```
    """
    narrow = as_float_dtype("dtype", dtype)

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    def forward(x: Any) -> tuple[Any, None]:
        return x, None

    @with_standard_promotion
    def backward(_: None, cotangent: Any) -> tuple[Any]:
        return (jax.tree.map(lambda g: rounded(g, narrow), cotangent),)

    identity.defvjp(forward, backward)
    return identity
