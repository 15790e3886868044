"""Conformance cases of the decode step: fields that no other case has with few enough tokens."""

import jax.numpy as jnp

from ejkernel.modules.operations.cases import delta, state_space
from ejkernel.modules.operations.cases.recurrence import RecurrenceSizes, Row, gate_maker, make_cases, normal
from ejkernel.modules.operations.gated_delta_rule import GatedDeltaRuleArguments
from ejkernel.modules.operations.gated_linear_attention import GLAttentionArguments
from ejkernel.modules.operations.recurrent_attention import RecurrentAttentionArguments
from ejkernel.modules.operations.state_space_v2 import StateSpaceV2Arguments
from ejkernel.ops.model import Case

RETURN_STATE = {"return_state": True}
_VALUE_GATES_CASE: Row = (
    "a step with gates of keys and values",
    RecurrenceSizes(t=3, g=2, v=12),
    gate_maker("g_gamma", "gk", "gv", "initial_state", **RETURN_STATE),
    ("decay", "value_decay", "initial_state"),
    ("awkward",),
)
_CHANNEL_GATES_CASE: Row = (
    "a step of eight tokens with a gate of channels",
    RecurrenceSizes(t=8, g=1, k=6, v=20, dtype=jnp.bfloat16),
    lambda key, sizes: {
        **gate_maker("gate of channels", **RETURN_STATE)(key, sizes),
        "initial_state": normal(key, sizes.shape("initial_state"), jnp.bfloat16),
    },
    ("decay", "initial_state"),
    ("awkward",),
)
_SEGMENTS_CASE: Row = (
    "a step with segments and padding",
    RecurrenceSizes(t=8),
    delta.segment_inputs,
    ("beta", "decay", "segment_ids", "initial_state"),
    ("awkward",),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the cases of the decode step, by operation."""
    sizes = state_space.StateSpaceSizes(t=4)
    skipped: state_space.Row = (
        "a step with a state",
        sizes,
        ("initial_state",),
        {},
        ("decay", "dt", "skip", "initial_state"),
        (),
    )
    return {
        "recurrent_attention": make_cases(RecurrentAttentionArguments, (_VALUE_GATES_CASE,)),
        "gated_linear_attention": make_cases(GLAttentionArguments, (_CHANNEL_GATES_CASE,)),
        "gated_delta_rule": make_cases(GatedDeltaRuleArguments, (_SEGMENTS_CASE,)),
        "state_space_v2": state_space.make_cases(StateSpaceV2Arguments, (skipped,)),
    }
