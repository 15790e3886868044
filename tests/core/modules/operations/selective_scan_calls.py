"""Calls of `state_space_v1`."""

import numpy as np

from ejkernel.modules import StateSpaceV1Config

WAYS = {"tree": StateSpaceV1Config(associative=True), "loop": StateSpaceV1Config(associative=False)}


def make(rows, tokens, channels, size, optional=(), seed=0, dtype=np.float64):
    """Arrays of a call by argument name; some steps are so large that a state forgets everything."""
    rng = np.random.default_rng(seed)
    arrays = {
        "hidden_states": rng.normal(size=(rows, tokens, channels)),
        "A": -np.exp(rng.normal(size=(channels, size))),
        "B": rng.normal(size=(rows, tokens, size)),
        "C": rng.normal(size=(rows, tokens, size)),
        "D": rng.normal(size=channels),
        "dt": np.where(rng.random((rows, tokens, channels)) > 0.9, 20.0, 1.0) * rng.random((rows, tokens, channels)),
        "gate": rng.normal(size=(rows, tokens, channels)),
        "initial_state": rng.normal(size=(rows, channels, size)),
    }
    left_out = {"gate", "initial_state"} - set(optional)
    return {name: x.astype(dtype) for name, x in arrays.items() if name not in left_out}
