"""Both passes of gather-reduce in Triton."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.gather_reduce import GatherReduce, named
from ejkernel.types.pullback import Pullback
from ejkernel_triton.gather_reduce.config import GatherTiles, is_copy
from ejkernel_triton.launch import Shape, launch

UNROLLED = 16
"""Terms of a sum up to which its loop is unrolled, so that all loads begin before the first is waited for."""
EMPTY_T = 256
"""Tokens among which a program looks for those that name no row."""
EMPTY_STEP = 16
"""Tokens that such a program writes together."""


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
        EMPTY_T: Tokens of a program of `copies_kernel` that looks for those that name no row.
        EMPTY_STEP: Tokens that it writes at a time.
        EMPTY_BLOCKS: Such programs that share the tokens.
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
    EMPTY_T: int
    EMPTY_STEP: int
    EMPTY_BLOCKS: int


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
        EMPTY_T=EMPTY_T,
        EMPTY_STEP=EMPTY_STEP,
        EMPTY_BLOCKS=-(-tokens // EMPTY_T),
    )


def forward(record: GatherReduce, config: GatherTiles) -> tuple[jax.Array, tuple[()]]:
    """Sums of a record.

    Args:
        record: The canonical arguments.
        config: Tiles and warps.

    Returns:
        [T, D] in the rows' dtype. There are no residuals.

    Raises:
        ValueError: The configuration asks for copies where tokens are sums.
    """
    if config.scatter:
        return _copies(record, config), ()
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


def _copies(record: GatherReduce, config: GatherTiles) -> jax.Array:
    """The output of a record whose tokens are copies of rows."""
    from ejkernel_triton.gather_reduce.gather_kernels import copies_kernel

    if not is_copy(record):
        raise ValueError("cfg: got scatter=True, wants one index a token, several pairs a row and no weights")
    rows, terms = record.inverse.shape
    spec = spec_of(record, config, sums=rows, terms=terms)
    (output,) = launch(
        copies_kernel,
        (record.rows[None], record.indices[None], record.inverse[None]),
        (Shape((1, spec.T, spec.D), record.rows.dtype),),
        batch=1,
        grid=(spec.BLOCKS + spec.EMPTY_BLOCKS) * spec.TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    return output[0]


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
