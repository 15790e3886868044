"""The policy under which the result of a row does not depend on what else is in the call."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from ejkernel.ops.model import Implementation, Op
from ejkernel.types.block_policy import BlockPolicy

_policy = BlockPolicy()

GRADIENTS_NOTE = (
    "batch_invariant: the bits of a row of the output do not depend on the rest of the call; those of gradients may"
)
"""The sentence of `explain` for a call in a `batch_invariant` block."""


def batch_invariant() -> AbstractContextManager[None]:
    """Makes the bits of a row independent of what else is in the call, for the calls traced inside of the block.

    The same row gives the same bits, on one device and with one version of the toolchain, alone or in any batch, with
    any padding, packed with others or not, from a whole prompt or in chunks, and wherever the pages of its cache lie:
    `ejkernel.types.invariances.INVARIANCES` has the list. An implementation serves a call only if its `invariant_to`
    has every one of these names that the call may depend on, and it runs in one fixed configuration. The block also
    isolates sequences, as `isolate_sequences` does. Gradients are not covered: those of weights are sums over the
    batch.

    If no implementation is invariant enough, the call is an error; `ejkernel.explain` shows the reasons.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import flash_attention
        from ejkernel.ops import batch_invariant

        x = jax.random.normal(jax.random.key(0), (3, 8, 2, 16))
        with batch_invariant():
            together = flash_attention(x, x, x, causal=True)
            alone = flash_attention(x[1:2], x[1:2], x[1:2], causal=True)
        assert (together[1:2] == alone).all()
        ```
    """
    return _policy.block()


def is_batch_invariant() -> bool:
    """Returns whether a `batch_invariant` block is active."""
    return _policy.is_on


def required_invariances(op: Op, implementation: Implementation, record: Any) -> frozenset[str]:
    """Returns the kinds of invariance that an implementation has to provide for a call: those that the family lists.

    An implementation of this operation alone need not provide what calls of it never have: `chunking` if rows have one
    query, and `packing` if segment ids only mark padding. Those of a whole family must: their other claims are proven
    for calls without segment ids.
    """
    names = op.family.invariances(record)
    if implementation.only != frozenset((op.name,)):
        return names
    excluded = {"chunking": op.single_query, "packing": op.padding_only}
    return names - {name for name, is_excluded in excluded.items() if is_excluded}


def invariance_refusals(op: Op, implementation: Implementation, record: Any) -> Iterator[str]:
    """Yields the reasons why an implementation does not serve a call in a `batch_invariant` block."""
    missing = sorted(required_invariances(op, implementation, record) - implementation.invariant_to)
    if missing:
        yield f"batch_invariant: its rows may depend on {', '.join(missing)}"
    yield from (f"batch_invariant: {reason}" for reason in implementation.invariance_limits(record))
