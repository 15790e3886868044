"""The step sizes of state space layers: a bias, a softplus and limits, which `state_space_v1` and `_v2` apply."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.shared.recurrences import check_floating, to_float32_or_wider
from ejkernel.modules.operations.shared.shapes import got
from ejkernel.ops.invariant_rows import compute_rows


def as_step_size_limits(limits: Any) -> tuple[float, float] | None:
    """Returns the limits of step sizes as two floats; the upper one may be infinite.

    Raises:
        ValueError: The limits are not two numbers with 0 <= lower < upper.
    """
    if limits is None:
        return None
    wrong = ValueError(f"dt_limit: got {got(limits)}, wants (lower, upper) with 0 <= lower < upper")
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        raise wrong
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in limits):
        raise wrong
    lower, upper = float(limits[0]), float(limits[1])
    if not (0 <= lower < upper and math.isfinite(lower)):
        raise wrong
    return lower, upper


def check_step_size_bias(args: Any, axis: str, sizes: dict[str, int]) -> None:
    """Checks `dt_bias`, which has one value per channel or head.

    Raises:
        ValueError: `dt_bias` has another shape or no floating dtype.
    """
    check_floating("dt_bias", args.dt_bias, axis, sizes)


def step_sizes(args: Any) -> jax.Array:
    """Returns the step sizes that the recurrence takes: `clip(softplus(dt + dt_bias))`, as far as the call asks for it.

    A call that asks for nothing keeps its dt. Tokens of no packed sequence count as 0: a NaN in them would otherwise
    reach the gradient of the bias.

    Args:
        args: Record with dt [B, T, ...], dt_bias, dt_softplus, dt_limit and cu_seqlens.
    """
    if args.dt_bias is None and not args.dt_softplus and args.dt_limit is None:
        return args.dt
    dt = to_float32_or_wider(args.dt)
    if args.cu_seqlens is not None:
        token = jnp.arange(dt.shape[1])
        real = (token >= args.cu_seqlens[0]) & (token < args.cu_seqlens[-1])
        dt = jnp.where(real[None, :, None], dt, 0)
    bias = () if args.dt_bias is None else (args.dt_bias.astype(dt.dtype),)
    transform = functools.partial(_biased_and_limited, has_softplus=args.dt_softplus, limits=args.dt_limit)
    return compute_rows(transform, (dt,), bias, axes=2)


def _biased_and_limited(
    dt: jax.Array, *bias: jax.Array, has_softplus: bool, limits: tuple[float, float] | None
) -> jax.Array:
    dt = dt + bias[0] if bias else dt
    if has_softplus:
        dt = jax.nn.softplus(dt)
    return dt if limits is None else jnp.clip(dt, *limits)
