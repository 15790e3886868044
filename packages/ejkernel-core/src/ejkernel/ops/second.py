"""Second derivatives: derivatives of the two passes.

Kernels are not differentiated. In a `second_derivatives()` block both passes have the derivatives of the family's
reference: plain jnp, which can be differentiated any number of times. Outside of such a block, a second derivative
raises an error that names the operation, with one exception: XLA's passes have forward-mode derivatives of their own,
so `jax.hessian` needs no block there.

The block is not the rule because its passes have to keep all of their inputs, of which most kernels read a part.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.contract import Family
from ejkernel.ops.model import Implementation
from ejkernel.promotion import with_standard_promotion
from ejkernel.types.block_policy import BlockPolicy
from ejkernel.types.pullback import ForwardResults, Pullback

Run = Callable[[Any], Any]

_policy = BlockPolicy()


def second_derivatives() -> AbstractContextManager[None]:
    """Lets gradients of the calls traced inside of the block be differentiated again, in any mode, as often as wanted.

    First derivatives are those of the chosen kernels. Those of gradients are of the reference of the operation's
    family, and take its time and memory: that of all pairs, [B, H, T, S], for softmax attention.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import flash_attention
        from ejkernel.ops import second_derivatives

        x = jax.random.normal(jax.random.key(0), (1, 4, 1, 8))

        def loss(x):
            return jnp.sum(flash_attention(x, x, x, causal=True) ** 2)

        with second_derivatives():
            curvature = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)
        assert curvature.shape == x.shape
        ```
    """
    return _policy.block()


def second_derivatives_enabled() -> bool:
    """Returns whether a `second_derivatives` block is around."""
    return _policy.is_on


def run_refusing_derivatives(op: str, implementation: Implementation, run: Run, argument: Any) -> Any:
    """Returns `run(argument)`, a pass of a kernel. Differentiating the result raises an error that names the operation.

    Passes that XLA compiles can be differentiated in forward mode.

    Raises:
        NotImplementedError: The result is differentiated.
    """
    wants = "make the call under `ejkernel.ops.second_derivatives()`"
    message = f"{op} has no second derivative by {implementation.name}: {wants}"
    if implementation.platform == "xla":
        return jax.tree.map(functools.partial(_guard_floating, _refuse_reverse_mode, message), run(argument))
    # Leaf by leaf, so that what the kernel does not read is not kept for it.
    return run(jax.tree.map(functools.partial(_guard_floating, _identity_refusing_derivatives, message), argument))


def _guard_floating(guard_function: Callable[[str, Any], Any], message: str, x: Any) -> Any:
    return guard_function(message, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity_refusing_derivatives(message: str, x: jax.Array) -> jax.Array:
    """Returns x, so that differentiating it is an error."""
    return x


@_identity_refusing_derivatives.defjvp
def _refuse_tangent(message: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(message)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refuse_reverse_mode(message: str, x: jax.Array) -> jax.Array:
    """Returns x, so that differentiating it in reverse mode is an error."""
    return x


@_refuse_reverse_mode.defjvp
def _refuse_reverse_mode_jvp(message: str, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return _refuse_reverse_mode(message, *primals), _untransposable_primitive().bind(*tangents, message=message)


@functools.cache
def _untransposable_primitive() -> Any:
    """Returns a primitive that hands on a tangent, and cannot be transposed; `linear_call` of JAX cannot be batched."""
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    primitive: Any = Primitive("ejkernel_forwards_only")
    primitive.def_impl(lambda x, *, message: x)
    primitive.def_abstract_eval(lambda x, *, message: x)

    def refuse_transpose(cotangent: Any, x: Any, *, message: str) -> Any:
        raise NotImplementedError(message)

    ad.deflinear2(primitive, refuse_transpose)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda _, x, *, message: [x])
    return primitive


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def forward_pass(family: Family, run: Run, record: Any) -> ForwardResults:
    """Returns `run(record)`, a forward pass, with the reference's derivatives.

    Args:
        family: What `run` is an implementation of.
        run: record -> Results.
        record: The family record.
    """
    return run(record)


@forward_pass.defjvp
@with_standard_promotion
def _forward_tangent(
    family: Family, run: Run, primals: tuple[Any], tangents: tuple[Any]
) -> tuple[ForwardResults, ForwardResults]:
    results = forward_pass(family, run, *primals)
    _, (output, residuals) = jax.jvp(family.reference, primals, tangents)
    return results, ForwardResults(output, residuals, jax.tree.map(_zero_tangent, results.private_residuals))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def backward_pass(family: Family, run: Run, pullback: Pullback) -> dict[str, Any]:
    """Returns `run(pullback)`, a backward pass, with the derivatives of the reference's backward pass.

    Args:
        family: What `run` is an implementation of.
        run: Pullback -> the requested gradients, and no others.
        pullback: The pieces. Residuals, private residuals and output follow from the record.
    """
    return run(pullback)


@backward_pass.defjvp
@with_standard_promotion
def _backward_tangent(
    family: Family, run: Run, primals: tuple[Pullback], tangents: tuple[Pullback]
) -> tuple[dict[str, Any], dict[str, Any]]:
    (pullback,), (moved,) = primals, tangents
    gradients = functools.partial(_reference_gradients, family, pullback.grad_fields)
    at, along = ((each.record, each.cotangent, each.lse_cotangent) for each in (pullback, moved))
    return backward_pass(family, run, pullback), jax.jvp(gradients, at, along)[1]


def _reference_gradients(
    family: Family, grad_fields: frozenset[str], record: Any, cotangent: Any, lse_cotangent: Any
) -> dict[str, Any]:
    def value(fields: dict[str, Any]) -> Any:
        output, residuals = family.reference(dataclasses.replace(record, **fields))
        return output if lse_cotangent is None else (output, residuals.lse)

    _, pull = jax.vjp(value, {name: getattr(record, name) for name in sorted(grad_fields)})
    gradients = pull(cotangent if lse_cotangent is None else (cotangent, lse_cotangent))[0]
    # As in the backward passes, the integer arrays of a function of pairs have no gradient.
    return jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, gradients)


def _zero_tangent(x: jax.Array) -> Any:
    """Returns no tangent: only the same kernel's backward pass reads private residuals."""
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
