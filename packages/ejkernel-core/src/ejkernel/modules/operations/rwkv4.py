"""RWKV-4: an average of earlier values whose weights decay, channel by channel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.families import wkv
from ejkernel.modules.operations.cases import rwkv4 as rwkv4_cases
from ejkernel.modules.operations.configs import RWKV4Config
from ejkernel.modules.operations.shared.recurrences import TOLERANCE, check_floating, to_float32_or_wider
from ejkernel.modules.operations.shared.shapes import (
    as_flag,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


@document_options
def rwkv4(
    w: Float[Array, " i"],
    u: Float[Array, " i"],
    k: Float[Array, "b t i"],
    v: Float[Array, "b t i"],
    state: Float[Array, "b c i"] | None = None,
    *,
    return_state: bool = False,
    platform: str | None = None,
    cfg: RWKV4Config | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t i"] | tuple[Float[Array, "b t i"], Float[Array, "b c i"]]:
    """Computes the time mixing of RWKV-4, its WKV operator (Peng et al. 2023, arXiv:2305.13048).

    Every channel averages the values of its earlier tokens with weights exp(k), which decay by `exp(-exp(w))` per
    token, and of the current token with the weight exp(u + k):

        o_t = (a + exp(u + k_t) v_t) / (b + exp(u + k_t))
        a   = exp(-exp(w)) a + exp(k_t) v_t
        b   = exp(-exp(w)) b + exp(k_t)

    Both sums are held over the exponential of a running maximum, so that no key overflows.

    Over devices, batch and channels can be split.

    Args:
        w: [C] floating, log of the negative log decay; above 60, a channel forgets at once. Differentiable, as are all
            floating arguments.
        u: [C] floating, the bonus of the current token's key.
        k: [B, T, C] float16, bfloat16, float32 or float64.
        v: [B, T, C], dtype of k.
        state: [B, 3, C] floating, before the first token: a and b over the exponential of the running maximum, and that
            maximum; None is 0, 0 and -1e30.
        return_state: Also return the state after the last token.

    Returns:
        [B, T, C] in v's dtype; with `return_state` also the state, [B, 3, C] float32 (float64 for float64 values).

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import rwkv4

        k, v = jax.random.normal(jax.random.key(0), (2, 1, 128, 64))
        output, state = rwkv4(jnp.zeros(64), jnp.ones(64), k, v, return_state=True)
        assert output.shape == (1, 128, 64) and state.shape == (1, 3, 64)
        ```
    """
    return run_operation(OP, locals())


class RWKV4Arguments(ArgumentRecord, of=rwkv4):
    """The arguments of a call of `rwkv4`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "return_state", as_flag("return_state", self.return_state))


def validate(args: RWKV4Arguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name in ("k", "v"):
        check_shape(name, getattr(args, name), "B T C", sizes)
        check_not_empty(name, getattr(args, name), "B T C", "T C")
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_same_dtype({"k": args.k, "v": args.v})
    for name in ("w", "u"):
        if getattr(args, name) is None:
            raise ValueError(f"{name}: got None, wants [C={sizes['C']}]")
        check_floating(name, getattr(args, name), "C", sizes)
    check_floating("state", args.state, "B 3 C", {**sizes, "3": 3})


def lower(args: RWKV4Arguments) -> wkv.WKV:
    """Returns the family's record of a call."""
    # exp(-exp(60)) is 0 in every dtype; an infinite decay would have a gradient of NaN.
    decay = -jnp.exp(jnp.minimum(to_float32_or_wider(args.w), 60.0))
    return wkv.WKV(decay=decay, bonus=args.u, key=args.k, value=args.v, initial_state=args.state)


def finish(args: RWKV4Arguments, output: tuple[jax.Array, jax.Array]) -> Any:
    """Returns the public result: with the state if asked for."""
    return output if args.return_state else output[0]


class RWKV4(Kernel[RWKV4Config, Array]):
    """Wraps `rwkv4` in an object that an `Executor` can call."""


OP = Op(
    arguments=RWKV4Arguments,
    family=wkv.FAMILY,
    validate=validate,
    lower=lower,
    cases=rwkv4_cases.cases(RWKV4Arguments),
    tolerance=TOLERANCE,
    finish=finish,
)
RWKV4.op = OP
