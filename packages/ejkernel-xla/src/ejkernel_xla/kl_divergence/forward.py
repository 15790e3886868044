"""The divergences in XLA."""

import jax

from ejkernel.families.kl_divergence import FAMILY, KLDivergence, reference
from ejkernel_xla.fixed_tiles import RowOrder, forward_in_tiles


def forward(record: KLDivergence, config: RowOrder) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns the divergences of a record.

    Args:
        record: The canonical arguments.
        config: Whether tokens are computed in tiles of fixed sizes.

    Returns:
        The divergence and the teacher's entropy, [T] each. There are no residuals: probabilities are made again.
    """
    if config.batch_invariant:
        return forward_in_tiles(reference, record, FAMILY.axes_of(record), "t")
    return reference(record)
