"""The names of a forward pass's results, by which policies of `jax.checkpoint` save them."""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ejkernel.types.pullback import ForwardResults

OUTPUT_CHECKPOINT_NAME, LSE_CHECKPOINT_NAME, STATE_CHECKPOINT_NAME, PRIVATE_RESIDUALS_CHECKPOINT_NAME = (
    "ejkernel_out",
    "ejkernel_lse",
    "ejkernel_state",
    "ejkernel_private",
)
"""Names of the results of a forward pass, for the policies of `jax.checkpoint`."""


def name_results(results: ForwardResults) -> ForwardResults:
    """Names the results, so that policies of `jax.checkpoint` can save them."""
    return ForwardResults(
        output=jax.tree.map(functools.partial(checkpoint_name, name=OUTPUT_CHECKPOINT_NAME), results.output),
        residuals=jax.tree_util.tree_map_with_path(_name_residual, results.residuals),
        private_residuals=jax.tree.map(
            functools.partial(checkpoint_name, name=PRIVATE_RESIDUALS_CHECKPOINT_NAME), results.private_residuals
        ),
    )


def _name_residual(path: Any, value: Any) -> Any:
    return checkpoint_name(
        value, LSE_CHECKPOINT_NAME if path and getattr(path[-1], "name", None) == "lse" else STATE_CHECKPOINT_NAME
    )
