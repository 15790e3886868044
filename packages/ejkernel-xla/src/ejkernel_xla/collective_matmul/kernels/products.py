"""The products of collective matmul on one device, of all rows at once or of one device's rows per ring step."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.collective_matmul import CollectiveMatmul, accumulator
from ejkernel.families.ring_attention import axis_size
from ejkernel.planning.precision import product_precision
from ejkernel_xla.collective_matmul.config import CollectiveSchedule
from ejkernel_xla.collective_matmul.kernels.rings import run_gather_ring, run_scatter_ring


def product(record: CollectiveMatmul, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Returns the product of two arrays over one axis of each, in the dtype of sums.

    Args:
        record: The record, for the precision.
        a: [., .] in x's dtype.
        b: [., .] in x's dtype.
        a_axis: The contracted axis of a.
        b_axis: The contracted axis of b.
    """
    return lax.dot_general(
        a.astype(record.x.dtype),
        b.astype(record.x.dtype),
        (((a_axis,), (b_axis,)), ((), ())),
        precision=product_precision(record.x.dtype, record.precision),
        preferred_element_type=accumulator(record),
    )


def gathered_product(record: CollectiveMatmul, rows: jax.Array, y_axis: int, schedule: CollectiveSchedule) -> jax.Array:
    """Returns the rows of all devices times the device's y, over an axis of y: [P M, .] in x's dtype."""
    if axis_size(record.axis_name) == 1:
        return product(record, rows, record.y, 1, y_axis).astype(record.x.dtype)
    axis_name = str(record.axis_name)
    if not schedule.overlap:
        gathered = lax.all_gather(rows, axis_name, axis=0, tiled=True)
        return product(record, gathered, record.y, 1, y_axis).astype(record.x.dtype)

    def use_rows(source: jax.Array, rows: jax.Array, output: jax.Array) -> jax.Array:
        part = product(record, rows, record.y, 1, y_axis).astype(record.x.dtype)
        return lax.dynamic_update_slice_in_dim(output, part, source * rows.shape[0], axis=0)

    shape = rows.shape[0] * lax.axis_size(axis_name), record.y.shape[1 - y_axis]
    return run_gather_ring(rows, axis_name, use_rows, jnp.zeros(shape, record.x.dtype))


def scattered_product(
    record: CollectiveMatmul, rows: jax.Array, y_axis: int, schedule: CollectiveSchedule
) -> jax.Array:
    """Returns the device's rows of the sum of all devices' rows times y, over an axis of y: [M / P, .] in x's dtype."""
    if axis_size(record.axis_name) == 1:
        return product(record, rows, record.y, 1, y_axis).astype(record.x.dtype)
    axis_name = str(record.axis_name)
    if not schedule.overlap:
        whole = product(record, rows, record.y, 1, y_axis)
        return lax.psum_scatter(whole, axis_name, scatter_dimension=0, tiled=True).astype(record.x.dtype)
    length = rows.shape[0] // lax.axis_size(axis_name)

    def compute_part(target: jax.Array) -> jax.Array:
        rows_of_target = lax.dynamic_slice_in_dim(rows, target * length, length, axis=0)
        return product(record, rows_of_target, record.y, 1, y_axis)

    return run_scatter_ring(axis_name, compute_part).astype(record.x.dtype)


def weight_gradient(
    record: CollectiveMatmul, local_rows: jax.Array, all_rows: jax.Array, schedule: CollectiveSchedule
) -> jax.Array:
    """Returns `gathered(local_rows)^T all_rows` in the dtype of sums, [columns of local_rows, columns of all_rows].

    Args:
        record: The record.
        local_rows: The device's rows of an array that is gathered.
        all_rows: The device's array of all rows.
        schedule: The configuration.
    """
    if axis_size(record.axis_name) == 1:
        return product(record, local_rows, all_rows, 0, 0)
    axis_name = str(record.axis_name)
    if not schedule.overlap:
        return product(record, lax.all_gather(local_rows, axis_name, axis=0, tiled=True), all_rows, 0, 0)
    length = local_rows.shape[0]

    def use_rows(source: jax.Array, rows: jax.Array, total: jax.Array) -> jax.Array:
        rows_of_source = lax.dynamic_slice_in_dim(all_rows, source * length, length, axis=0)
        return total + product(record, rows, rows_of_source, 0, 0)

    zeros = jnp.zeros((local_rows.shape[1], all_rows.shape[1]), accumulator(record))
    return run_gather_ring(local_rows, axis_name, use_rows, zeros)
