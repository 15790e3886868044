"""Conformance cases of the selective scan's decode step, with few enough tokens."""

import jax.numpy as jnp

from ejkernel.modules.operations.cases import state_space_v1
from ejkernel.modules.operations.state_space_v1 import StateSpaceV1Arguments
from ejkernel.ops.model import Case

_CASES = (
    ("a step of three tokens", (3, 3, 40, 16), ("initial_state", "gate"), jnp.float32, ("initial_state",), ()),
    ("a step in bfloat16", (2, 8, 24, 20), ("initial_state",), jnp.bfloat16, ("initial_state",), ("awkward",)),
    ("slots in bfloat16", (1, 6, 24, 16), ("slots",), jnp.bfloat16, ("cu_seqlens", "state_slots"), ()),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {"state_space_v1": state_space_v1.make_cases(StateSpaceV1Arguments, _CASES)}
