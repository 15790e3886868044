"""Both passes of gather-reduce in Triton."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.gather_reduce import GatherReduce, named
from ejkernel.ops.pullback import Pullback
from ejkernel_triton.gather_reduce.config import GatherTiles
from ejkernel_triton.launch import Shape, launch

UNROLLED = 16
"""Terms of a sum up to which its loop is unrolled, so that all loads begin before the first is waited for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherSpec:
    """Constants of both kernels.

    Attributes:
        R: Rows.
        T: Tokens.
        K: Indices a token.
        M: Pairs a row.
        D: Channels.
        WEIGHTS: Whether there are weights.
        DOTS: Whether the weights' gradient is wanted.
        UNROLL: Whether the loop over terms is unrolled.
        BLOCK_T: Sums of a program.
        BLOCKS: Programs that share the sums.
        BLOCK_D: Channels of a program.
        TILES: Programs that share the channels.
    """

    R: int
    T: int
    K: int
    M: int
    D: int
    WEIGHTS: bool
    DOTS: bool
    UNROLL: bool
    BLOCK_T: int
    BLOCKS: int
    BLOCK_D: int
    TILES: int


def spec_of(record: GatherReduce, config: GatherTiles, *, sums: int, terms: int, dots: bool = False) -> GatherSpec:
    """The constants of a kernel that makes `sums` sums of `terms` terms."""
    (rows, channels), (tokens, count) = record.rows.shape, record.indices.shape
    return GatherSpec(
        R=rows,
        T=tokens,
        K=count,
        M=record.inverse.shape[1],
        D=channels,
        WEIGHTS=record.weights is not None,
        DOTS=dots,
        UNROLL=terms <= UNROLLED,
        BLOCK_T=config.block_t,
        BLOCKS=-(-sums // config.block_t),
        BLOCK_D=config.block_d,
        TILES=-(-channels // config.block_d),
    )


def forward(record: GatherReduce, config: GatherTiles) -> tuple[jax.Array, tuple[()]]:
    """Sums of a record.

    Args:
        record: The canonical arguments.
        config: Tiles and warps.

    Returns:
        [T, D] in the rows' dtype. There are no residuals.
    """
    from ejkernel_triton.gather_reduce.gather_kernels import sums_kernel

    tokens, count = record.indices.shape
    spec = spec_of(record, config, sums=tokens, terms=count)
    (output,) = launch(
        sums_kernel,
        (record.rows[None], record.indices[None], _batched(record.weights)),
        (Shape((1, tokens, spec.D), record.rows.dtype),),
        batch=1,
        grid=spec.BLOCKS * spec.TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    return output[0], ()


def backward(pullback: Pullback, config: GatherTiles) -> dict[str, jax.Array]:
    """Gradients of the rows and of the weights, which one kernel makes.

    Args:
        pullback: Record and cotangent [T, D].
        config: Tiles and warps.

    Returns:
        `{"rows": [R, D], "weights": [T, K]}`, what is wanted of them, in the dtypes of the fields.
    """
    from ejkernel_triton.gather_reduce.gather_kernels import gradients_kernel

    record: GatherReduce = pullback.record
    rows, terms = record.inverse.shape
    dots = "weights" in pullback.wanted
    spec = spec_of(record, config, sums=rows, terms=terms, dots=dots)
    pairs = spec.T * spec.K
    made, shares = launch(
        gradients_kernel,
        (pullback.cotangent[None], record.inverse[None], _batched(record.weights), record.rows[None] if dots else None),
        (
            Shape((1, rows, spec.D), record.rows.dtype),
            Shape((1, spec.TILES, pairs if dots else 1), jnp.float32),
        ),
        batch=1,
        grid=spec.BLOCKS * spec.TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    gradients = {"rows": made[0]}
    if dots:
        assert record.weights is not None  # a gradient of it is wanted
        # No row lists a pair that names none, so nothing was written for it.
        valid = named(record.indices, spec.R)
        total = jnp.where(valid, jnp.sum(shares[0].reshape(spec.TILES, spec.T, spec.K), axis=0), 0)
        gradients["weights"] = total.astype(record.weights.dtype)
    return {name: gradients[name] for name in pullback.wanted}


def _batched(array: jax.Array | None) -> jax.Array | None:
    return None if array is None else array[None]
