"""Forward pass of gather-reduce in Triton."""

import jax

from ejkernel.families.gather_reduce import GatherReduce
from ejkernel_triton.gather_reduce.config import GatherTiles, is_row_copy
from ejkernel_triton.gather_reduce.spec import make_spec
from ejkernel_triton.launch import ShapeDtype, launch


def forward(record: GatherReduce, config: GatherTiles) -> tuple[jax.Array, tuple[()]]:
    """Returns the sums of a record.

    Args:
        record: The canonical arguments.
        config: Tiles and warps.

    Returns:
        [T, D] in the rows' dtype. There are no residuals.

    Raises:
        ValueError: The configuration has `scatter`, but tokens are not copies of rows.
    """
    if config.scatter:
        return _scatter_row_copies(record, config), ()
    from ejkernel_triton.gather_reduce.kernels.gather_sum import gather_sum_kernel

    tokens, count = record.indices.shape
    spec = make_spec(record, config, num_sums=tokens, num_terms=count)
    (output,) = launch(
        gather_sum_kernel,
        (record.rows[None], record.indices[None], with_batch_axis(record.weights)),
        (ShapeDtype((1, tokens, spec.D), record.rows.dtype),),
        batch=1,
        grid=spec.NUM_BLOCKS * spec.NUM_CHANNEL_TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    return output[0], ()


def _scatter_row_copies(record: GatherReduce, config: GatherTiles) -> jax.Array:
    """Returns the output of a record whose tokens are copies of rows."""
    from ejkernel_triton.gather_reduce.kernels.scatter_copies import scatter_copies_kernel

    if not is_row_copy(record):
        raise ValueError("cfg: got scatter=True, wants one index a token, several pairs a row and no weights")
    rows, num_terms = record.inverse.shape
    spec = make_spec(record, config, num_sums=rows, num_terms=num_terms)
    (output,) = launch(
        scatter_copies_kernel,
        (record.rows[None], record.indices[None], record.inverse[None]),
        (ShapeDtype((1, spec.T, spec.D), record.rows.dtype),),
        batch=1,
        grid=(spec.NUM_BLOCKS + spec.NUM_ZERO_FILL_BLOCKS) * spec.NUM_CHANNEL_TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    return output[0]


def with_batch_axis(array: jax.Array | None) -> jax.Array | None:
    return None if array is None else array[None]
