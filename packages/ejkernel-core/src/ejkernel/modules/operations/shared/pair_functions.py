"""The caller's functions of pairs, `score_mod` and `mask_mod`, as arguments of a call."""

from typing import Any

import jax.numpy as jnp

from ejkernel.types.pair_functions import PairFunction, mask_function, score_function


def pair_functions(score_mod: Any, mask_mod: Any, query: Any) -> dict[str, PairFunction | None]:
    """Returns the caller's functions of pairs, with the arrays that they close over as arguments of the call.

    Raises:
        ValueError: A function does not have the documented parameters or result.
    """
    scores = jnp.float64 if getattr(query, "dtype", None) == jnp.float64 else jnp.float32
    return {
        "score_mod": score_function("score_mod", score_mod, scores),
        "mask_mod": mask_function("mask_mod", mask_mod),
    }
