"""Conformance cases of the decode step: sizes that the kernel is compiled for, in 16 bits, with float32 states."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import state_space
from ejkernel.modules.operations.cases.delta import tree_inputs
from ejkernel.modules.operations.cases.recurrence import RecurrenceSizes, Row, gate_maker, make_cases, states_in_slots
from ejkernel.modules.operations.gated_delta_rule import GatedDeltaRuleArguments
from ejkernel.modules.operations.gated_linear_attention import GLAttentionArguments
from ejkernel.modules.operations.kernel_delta_attention import KernelDeltaAttentionArguments
from ejkernel.modules.operations.recurrent_attention import RecurrentAttentionArguments
from ejkernel.modules.operations.state_space_v2 import StateSpaceV2Arguments
from ejkernel.ops.model import Case

DEFAULT_SIZES: dict[str, Any] = {"h": 2, "k": 64, "v": 32, "dtype": jnp.bfloat16}
RETURN_STATE = {"return_state": True}


def _make_delta_input_maker(gate: str, **constants: Any) -> Any:
    """Returns an input maker with beta, a decay per head or per key channel, and a state."""

    def make_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
        inputs = gate_maker("beta", "gk" if gate == "channels" else "decay", "initial_state", **constants)(key, sizes)
        return {("decay" if name == "gk" else name): x for name, x in inputs.items()}

    return make_inputs


def _make_packed_inputs_with_slots(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns packed sequences, one without tokens, one without a slot, and one with more tokens than a chunk."""
    slots = states_in_slots(key, (6, *sizes.shape("initial_state")[1:]), (5, 2))
    starts, indices = jnp.array([0, 1, 1, 14, 15], jnp.int32), jnp.array([-1, 3, 5, 2], jnp.int32)
    inputs = gate_maker("g", **RETURN_STATE)(key, sizes)
    return {**inputs, "initial_state": slots, "cu_seqlens": starts, "state_indices": indices}


_DECAY_AND_STATE_FIELDS = ("decay", "initial_state")


def _make_tree_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns packed trees, one with a path longer than a chunk and one without a slot, in a call without states."""
    slots = states_in_slots(key, (6, *sizes.shape("initial_state")[1:]), (5, 2))
    starts, indices = jnp.array([0, 8, 8, 18, 20], jnp.int32), jnp.array([5, 3, 2, -1], jnp.int32)
    parents = [-1, 0, 1, 1, 2, -1, 4, 4, -1, 0, 1, 2, 3, 4, 5, 6, 7, 3, -1, 0, 0]
    inputs = gate_maker("g")(key, sizes)
    packed = {"cu_seqlens": starts, "state_indices": indices, "parents": jnp.array([parents], jnp.int32)}
    return {**inputs, "initial_state": slots, **packed}


_GATED_CASES: tuple[Row, ...] = (
    (
        "CUDA step, gate of heads",
        RecurrenceSizes(t=8, g=1, **{**DEFAULT_SIZES, "k": 128, "v": 128}),
        gate_maker("g", "initial_state", **RETURN_STATE),
        _DECAY_AND_STATE_FIELDS,
        (),
    ),
    (
        "CUDA step, gate of channels",
        RecurrenceSizes(t=7, g=1, **{**DEFAULT_SIZES, "v": 128}),
        gate_maker("gate of channels", "initial_state", **RETURN_STATE),
        _DECAY_AND_STATE_FIELDS,
        (),
    ),
    (
        "CUDA step, slots",
        RecurrenceSizes(b=1, t=17, g=2, n=4, **DEFAULT_SIZES),
        _make_packed_inputs_with_slots,
        ("decay", "cu_seqlens", "sequence_state", "state_slots"),
        ("awkward",),
    ),
    (
        "CUDA step, trees in slots",
        RecurrenceSizes(b=1, t=21, g=2, n=4, **DEFAULT_SIZES),
        _make_tree_inputs,
        ("decay", "cu_seqlens", "sequence_state", "state_slots", "parents", "keeps_token_states"),
        ("awkward",),
    ),
)
_UNGATED_CASES: tuple[Row, ...] = (
    (
        "CUDA step, no gates",
        RecurrenceSizes(t=4, g=2, **{**DEFAULT_SIZES, "dtype": jnp.float16}),
        gate_maker(),
        (),
        ("awkward",),
    ),
)
_DELTA_CASES: tuple[Row, ...] = (
    (
        "CUDA step, decay of heads",
        RecurrenceSizes(t=8, g=1, **{**DEFAULT_SIZES, "k": 128, "v": 256}),
        _make_delta_input_maker("heads", **RETURN_STATE),
        ("beta", "decay", "initial_state"),
        (),
    ),
    (
        "CUDA step, trees",
        RecurrenceSizes(t=7, g=1, **{**DEFAULT_SIZES, "k": 128}),
        lambda key, sizes: {**tree_inputs(key, sizes), "return_state": False},
        ("beta", "decay", "initial_state", "parents", "keeps_token_states"),
        (),
    ),
)
_CHANNEL_DECAY_CASES: tuple[Row, ...] = (
    (
        "CUDA step, decay of channels",
        RecurrenceSizes(t=7, g=2, **{**DEFAULT_SIZES, "v": 128}),
        _make_delta_input_maker("channels"),
        ("beta", "decay", "initial_state"),
        (),
    ),
)
_STATE_SPACE_CASES: tuple[state_space.Row, ...] = (
    (
        "CUDA step with a state",
        state_space.StateSpaceSizes(t=4, p=64, e=64, dtype=jnp.bfloat16),
        ("initial_state",),
        {"precision": "highest"},
        ("decay", "dt", "skip", "initial_state", "transposed_states", "precision"),
        (),
    ),
    (
        "CUDA step, trees",
        state_space.StateSpaceSizes(t=5, p=64, e=64, dtype=jnp.bfloat16),
        ("initial_state", "parents"),
        {"return_token_states": False},
        ("decay", "dt", "skip", "initial_state", "transposed_states", "parents", "keeps_token_states"),
        (),
    ),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {
        "gated_linear_attention": make_cases(GLAttentionArguments, _GATED_CASES),
        "recurrent_attention": make_cases(RecurrentAttentionArguments, _UNGATED_CASES),
        "gated_delta_rule": make_cases(GatedDeltaRuleArguments, _DELTA_CASES),
        "kernel_delta_attention": make_cases(KernelDeltaAttentionArguments, _CHANNEL_DECAY_CASES),
        "state_space_v2": state_space.make_cases(StateSpaceV2Arguments, _STATE_SPACE_CASES),
    }
