"""An operation of Acme's own, whole: `scale * sum_n weights_n x_bn`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.ops import (
    ArgumentRecord,
    BaseOperationConfig,
    Case,
    ConfigSpace,
    Family,
    Implementation,
    Op,
    Pullback,
    Requires,
    document_options,
    run_operation,
    tolerances,
)

NAME = "acme_scaled_sum"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledSumConfig(BaseOperationConfig):
    """How `scaled_sum` is computed.

    Attributes:
        pieces: Partial sums a row.
    """

    pieces: int | None = None


@document_options
def scaled_sum(
    x: Float[Array, "b n"],
    weights: Float[Array, " n"] | None = None,
    /,
    *,
    scale: float = 1.0,
    platform: str | None = None,
    cfg: ScaledSumConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, " b"]:
    """Sums rows.

    Args:
        x: [B, N] floating.
        weights: [N], dtype of x.
        scale: Factor on the sums.

    Returns:
        [B], dtype of x.

    Raises:
        ValueError: x is not a matrix, or the weights do not fit its rows.
    """
    return run_operation(OP, locals())


class ScaledSumArguments(ArgumentRecord, of=scaled_sum):
    """The arguments of a call of `scaled_sum`; no backend needs another form of them."""


def validate(args: ScaledSumArguments) -> None:
    """Raises ValueError for a call that is wrong on every backend."""
    if args.x.ndim != 2:
        raise ValueError(f"x: got shape {args.x.shape}, wants [B, N]")
    if args.weights is not None and args.weights.shape != args.x.shape[1:]:
        raise ValueError(f"weights: got shape {args.weights.shape}, wants [N={args.x.shape[1]}]")


def reference(args: ScaledSumArguments) -> jax.Array:
    """The operation's meaning."""
    weighted = args.x if args.weights is None else args.x * args.weights
    return args.scale * jnp.sum(weighted, axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumPieces:
    """The kernels' own configuration: what the store and tables hold.

    Attributes:
        num_pieces: Partial sums a row.
    """

    num_pieces: int


def forward(record: ScaledSumArguments, config: SumPieces) -> tuple[jax.Array, None]:
    """The sums, as `config.num_pieces` partial sums; nothing is left for the backward pass."""
    rows, length = record.x.shape
    weighted = record.x if record.weights is None else record.x * record.weights
    pieces = config.num_pieces
    padded = jnp.pad(weighted, ((0, 0), (0, -length % pieces)))
    return record.scale * padded.reshape(rows, pieces, -1).sum(axis=2).sum(axis=1), None


def backward(pullback: Pullback, config: SumPieces) -> dict[str, jax.Array]:
    """`dx_bn = scale dy_b weights_n` and `dweights_n = scale sum_b dy_b x_bn`."""
    record, rows = pullback.record, pullback.record.scale * pullback.cotangent[:, None]
    weights = jnp.ones_like(record.x[0]) if record.weights is None else record.weights
    gradients = {"x": rows * weights, "weights": jnp.sum(rows * record.x, axis=0)}
    return {name: gradients[name] for name in pullback.grad_fields}


def _rule(record: ScaledSumArguments, device: Any, direction: Any) -> SumPieces:
    return SumPieces(num_pieces=4)


def _candidates(record: ScaledSumArguments, device: Any, direction: Any) -> tuple[SumPieces, ...]:
    # The backward pass has nothing to choose.
    return tuple(SumPieces(num_pieces=n) for n in (1, 4, 8)) if direction == "forward" else ()


def _case(name: str, rows: int, weighted: bool, scale: float, *exercises: str) -> Case:
    def make(key: jax.Array) -> ScaledSumArguments:
        keys = jax.random.split(key)
        weights = jax.random.normal(keys[1], (63,), jnp.float32) if weighted else None
        return ScaledSumArguments(x=jax.random.normal(keys[0], (rows, 63), jnp.float32), weights=weights, scale=scale)

    return Case(name=name, make=make, exercises=frozenset(exercises))


FAMILY = Family(
    name="scaled sum",
    record=ScaledSumArguments,
    differentiable=("x", "weights"),
    axes={"x": "b n", "weights": "n", "output": "b"},
    shardable="b",
    reference=lambda record: (reference(record), None),
)

OP = Op(
    name=NAME,
    arguments=ScaledSumArguments,
    family=FAMILY,
    validate=validate,
    lower=lambda args: args,
    cases=(
        _case("plain", 5, False, 1.0),
        _case("one row", 1, True, 1.0, "weights"),
        _case("scaled", 4, True, -2.5, "weights", "scale"),
    ),
    tolerance=tolerances(float32=1e-5, float64=1e-12),
)

IMPLEMENTATION = Implementation(
    family=FAMILY.name,
    name="acme",
    platform="acme",
    forward="ejkernel_acme.scaled_sum:forward",
    backward="ejkernel_acme.scaled_sum:backward",
    gradients=frozenset({"x", "weights"}),
    requires=Requires(
        devices=frozenset({"cpu", "gpu", "tpu"}),
        dtypes=frozenset({"float32", "float64"}),
        handles=frozenset({"weights", "scale"}),
    ),
    config=ConfigSpace(
        heuristic=_rule, candidates=_candidates, forward=SumPieces, public_fields={"pieces": "num_pieces"}
    ),
)
