"""Gather-reduce: weighted sums of named rows, the dispatch and the combine of a mixture of experts."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ejkernel import _compat
from ejkernel.families import gather_reduce as family
from ejkernel.modules.operations.cases import gather_reduce as cases
from ejkernel.modules.operations.configs import GatherReduceConfig
from ejkernel.modules.operations.shared.conditions import have_ranks, same_pairs_condition
from ejkernel.modules.operations.shared.shapes import check_dtype, check_shape
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition


@document_options
def gather_reduce(
    rows: Float[Array, "m d"],
    indices: Integer[Array, "t k"],
    inverse: Integer[Array, "m n"],
    weights: Float[Array, "t k"] | None = None,
    *,
    platform: str | None = None,
    cfg: GatherReduceConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "t d"]:
    """Returns the weighted sum of the rows that every token names: `sum(weights[t, n] * rows[indices[t, n]])` over n.

    Shape letters: M rows, D channels, T tokens, K indices a token, N pairs a row. Sums are taken in float32, in the
    order of n. The gradient of `rows` is gathered through `inverse`: nothing is added to memory out of order, so two
    runs give the same bits. The formulas are in `ejkernel.families.gather_reduce`.

    In a mixture of experts with k experts a token, whose T * k pairs of a token and an expert are sorted by expert into
    `order` (a row's pair) with `places` its inverse (a pair's row):

    - dispatch, the rows of the experts: `gather_reduce(tokens, order[:, None] // k, places.reshape(T, k))`;
    - combine, the sums of their results: `gather_reduce(rows, places.reshape(T, k), order[:, None], weights)`.

    Over devices, channels can be split.

    Args:
        rows: [M, D] float16, bfloat16, float32 or float64.
        indices: [T, K] int, the rows that a token names. An index outside of 0..M-1 names none and counts nothing.
        inverse: [M, N] int, the pairs that name a row, each `t * K + n` once; anything outside of 0..T*K-1 for none.
            Values that are not traced are checked against `indices`, for which an eager call waits.
        weights: [T, K] floating; None for ones.

    Returns:
        [T, D] in the rows' dtype; 0 for a token that names no row.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.modules import gather_reduce

        rows = jnp.array([[1.0], [10.0], [100.0]])
        indices = jnp.array([[2, 0], [1, -1]])  # the second token names one row
        inverse = jnp.array([[1], [2], [0]])  # row 0 is named by pair 1: the first token's second index
        sums = gather_reduce(rows, indices, inverse, jnp.array([[0.5, 1.0], [2.0, 9.0]]))
        assert sums.tolist() == [[51.0], [20.0]]
        ```
    """
    return run_operation(OP, locals())


class GatherReduceArguments(ArgumentRecord, of=gather_reduce):
    """The arguments of a call of `gather_reduce`."""

    def __post_init__(self) -> None:
        # The call goes on under a trace, where no values can be seen.
        check_inverse(self.indices, self.inverse)


def check_inverse(indices: Any, inverse: Any) -> None:
    """Checks that two index arrays list the same pairs, where their values can be read: not under a trace.

    Raises:
        ValueError: A pair of `inverse` names another row, or `indices` has a pair that is not in `inverse`.
    """
    both = indices, inverse
    if any(_compat.is_tracer(x) or not getattr(x, "is_fully_addressable", True) for x in both):
        return
    index, pair = (np.asarray(jax.device_get(x)) for x in both)
    if any(x.ndim != 2 or x.dtype.kind not in "iu" for x in (index, pair)):
        return  # the shape and the dtype are wrong, and `validate` says so
    rows, flat = pair.shape[0], index.reshape(-1).astype(np.int64)
    row = np.broadcast_to(np.arange(rows)[:, None], pair.shape)
    listed = (pair >= 0) & (pair < flat.size)
    pairs, owners = pair[listed], row[listed]
    wrong = flat[pairs] != owners
    if wrong.any():
        at, owner = int(pairs[wrong][0]), int(owners[wrong][0])
        raise ValueError(f"inverse: got pair {at} for row {owner}, wants a pair of that row: this one names {flat[at]}")
    times = np.bincount(pairs, minlength=flat.size)
    lost = (times != 1) & (flat >= 0) & (flat < rows)
    if lost.any():
        at = int(np.flatnonzero(lost)[0])
        raise ValueError(f"inverse: got pair {at} {int(times[at])} times, wants it once: it names row {flat[at]}")


def validate(args: GatherReduceArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked values."""
    sizes: dict[str, int] = {}
    for name, axes in (("rows", "M D"), ("indices", "T K"), ("inverse", "M N"), ("weights", "T K")):
        array = getattr(args, name)
        if array is not None:
            check_shape(name, array, axes, sizes)
    for name in ("rows", "weights"):
        if getattr(args, name) is not None:
            check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    for name in ("indices", "inverse"):
        check_dtype(name, getattr(args, name), jnp.integer, "an integer dtype")
    if sizes["T"] * sizes["K"] >= 2**31:
        raise ValueError(f"indices: got shape {tuple(args.indices.shape)}, wants fewer than 2**31 pairs")


def conditions(args: GatherReduceArguments) -> Iterable[Condition]:
    """Yields the condition that both index arrays list the same pairs."""
    if have_ranks(args, indices=2, inverse=2):
        yield from same_pairs_condition(args.indices, args.inverse)


def lower(args: GatherReduceArguments) -> family.GatherReduce:
    """Returns the record of a call."""
    return family.GatherReduce(
        rows=args.rows,
        indices=args.indices.astype(jnp.int32),
        inverse=args.inverse.astype(jnp.int32),
        weights=args.weights,
    )


class GatherReduce(Kernel[GatherReduceConfig, Array]):
    """Wraps `gather_reduce` in an object that an `Executor` can call."""


OP = Op(
    arguments=GatherReduceArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=cases.cases(GatherReduceArguments),
    tolerance=tolerances(float64=1e-12, float32=(2e-6, 4e-6), bfloat16=(1e-2, 4e-3), float16=(2e-3, 4e-4)),
    make_inputs=cases.make_inputs,
)
GatherReduce.op = OP
