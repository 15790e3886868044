"""The gated grouped matmul family: the record its operations lower to and its meaning.

Every row names a token and is multiplied with the matrix of its group; the first half of the columns gates the second:

    y = x_t W_e          t = i_m, e the group of row m          o_m = act(y[:F]) y[F:]

The product is taken as `grouped_matmul` takes it, and gated before it is rounded. A row that names no token, and one of
no group, is 0; with `left_over="undefined"`, rows of no group are any numbers.

Source: the gated linear units of Shazeer 2020, arXiv:2002.05202, in the experts of Gale et al. 2022, arXiv:2211.15841.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families import grouped_matmul
from ejkernel.families.grouped_matmul import EXPERTS_OVER_DEVICES, GroupedMatmul
from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family
from ejkernel.planning.requests import PADDING, UNUSED, claimed

ACTIVATIONS = ("silu", "gelu")


@arguments
class GatedGroupedMatmul:
    """Canonical input of one gated grouped matmul. T tokens, K contracted, E matrices, M rows, F columns.

    Attributes:
        lhs: [T, K] floating.
        rhs: [E, K, 2 F] in lhs's dtype, the columns of the gate first.
        group_sizes: [E] int32, rows of every group.
        indices: [M] int32, the token of every row; outside of 0..T-1 for none. None for row m of token m.
        activation: Of the gate: `"silu"`, or `"gelu"` by its tanh formula.
        precision: Of the product, as `GroupedMatmul` has it.
        left_over: Likewise.
    """

    lhs: jax.Array
    rhs: jax.Array
    group_sizes: jax.Array
    indices: jax.Array | None = None
    activation: str = static("silu")
    precision: lax.Precision | None = static(default=None)
    left_over: str = static("zero")


def product_record(record: GatedGroupedMatmul, rows: Any, dtype: Any) -> GroupedMatmul:
    """The record of the product.

    Args:
        record: The record.
        rows: [M, K], the token of every row, or its shape.
        dtype: Dtype of the product.
    """
    return GroupedMatmul(
        lhs=rows,
        rhs=record.rhs,
        group_sizes=record.group_sizes,
        out_dtype=dtype,
        transpose_rhs=False,
        precision=record.precision,
        left_over=record.left_over,
    )


def gathered(record: GatedGroupedMatmul) -> jax.Array:
    """The token of every row, [M, K]; 0 for none."""
    if record.indices is None:
        return record.lhs
    if not record.lhs.shape[0]:  # no index names a token
        return jnp.zeros((record.indices.shape[0], record.lhs.shape[1]), record.lhs.dtype)
    named = (record.indices >= 0) & (record.indices < record.lhs.shape[0])
    return jnp.where(named[:, None], record.lhs[jnp.where(named, record.indices, 0)], 0)


def gate(record: GatedGroupedMatmul, products: jax.Array) -> jax.Array:
    """The output of products [M, 2 F]."""
    first, second = jnp.split(products, 2, axis=-1)
    activation = jax.nn.silu if record.activation == "silu" else jax.nn.gelu
    return (activation(first) * second).astype(record.lhs.dtype)


def reference(record: GatedGroupedMatmul) -> tuple[jax.Array, tuple[()]]:
    """The family's meaning in plain jnp; float64 if lhs is, else float32.

    Returns:
        [M, F] in lhs's dtype. There are no residuals.
    """
    wide = grouped_matmul.dtype_of_sums(record.lhs.dtype)
    products, _ = grouped_matmul.reference(product_record(record, gathered(record), wide))
    return gate(record, products), ()


def axes(record: GatedGroupedMatmul) -> Mapping[str, Any]:
    """The axis letters of a record's fields and of its output."""
    token = "m" if record.indices is None else "t"
    return {"lhs": f"{token} k", "rhs": "e k n", "group_sizes": "e", "indices": "m", "output": "m f"}


def localise(record: GatedGroupedMatmul, offsets: Mapping[str, jax.Array]) -> GatedGroupedMatmul:
    """One shard's record as it is: nothing is split."""
    return record


def requests(record: GatedGroupedMatmul) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: the groups, with their matrices, and the tokens, which share those."""
    rows = record.lhs if record.indices is None else jnp.zeros((record.indices.shape[0], 1), record.lhs.dtype)
    (first, end), row = (
        (np.asarray(x) for x in grouped_matmul.group_rows(product_record(record, rows, rows.dtype))),
        np.arange(rows.shape[0]),
    )
    owns = (row >= first[:, None]) & (row < end[:, None])
    group, tokens = np.where(owns.any(axis=0), owns.argmax(axis=0), -1), record.lhs.shape[0]
    token = row if record.indices is None else np.asarray(record.indices)
    token = np.where((token >= 0) & (token < tokens), token, PADDING)
    left_over = PADDING if record.left_over == "zero" else UNUSED
    groups, used = np.full(tokens, UNUSED), (group >= 0) & (token >= 0)
    for m in np.flatnonzero(used):
        claimed(groups, token[m], group[m])
    return (
        {
            "lhs": groups[:, None],
            "output": np.where(group >= 0, group, left_over)[:, None],
            "e": np.arange(owns.shape[0]),
        },
        {"lhs": np.arange(tokens)[:, None], "output": np.where(used, token, left_over)[:, None]},
    )


FAMILY = Family(
    name="gated_grouped_matmul",
    record=GatedGroupedMatmul,
    differentiable=(),
    dtype=lambda record: record.lhs.dtype,
    head_dims=lambda record: (record.lhs.shape[-1], record.rhs.shape[-1]),
    axes=axes,
    shardable="",
    aligned=(),
    permissions=frozenset({"left_over"}),
    localise=localise,
    unsplit={"e": EXPERTS_OVER_DEVICES},
    reference=reference,
    requests=requests,
)
