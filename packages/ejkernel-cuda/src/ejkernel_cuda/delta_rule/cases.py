"""Conformance cases of chunked recurrences: head sizes that the kernels are compiled for, in bfloat16."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import state_space
from ejkernel.modules.operations.cases.recurrence import RecurrenceSizes, Row, gate_maker, make_cases
from ejkernel.modules.operations.gated_delta_rule import GatedDeltaRuleArguments
from ejkernel.modules.operations.gated_linear_attention import GLAttentionArguments
from ejkernel.modules.operations.lightning_attention import LightningAttentionArguments
from ejkernel.modules.operations.recurrent_attention import RecurrentAttentionArguments
from ejkernel.modules.operations.state_space_v2 import StateSpaceV2Arguments
from ejkernel.ops.model import Case

DEFAULT_SIZES: dict[str, Any] = {"k": 128, "dtype": jnp.bfloat16}

PACKED_CU_SEQLENS = (0, 0, 80, 150, 150, 210, 290)
"""Sequences with fewer tokens than a chunk and with more, two that are empty, and padding tokens after the last."""

PACKED_SIZES: dict[str, Any] = {"b": 1, "t": 300, "n": len(PACKED_CU_SEQLENS) - 1, **DEFAULT_SIZES}
LONG_SIZES: dict[str, Any] = {"b": 1, "t": 1100, **DEFAULT_SIZES}
"""A row that is split into segments."""


def packed_inputs(key: jax.Array, sizes: RecurrenceSizes, *names: str) -> dict[str, Any]:
    """Returns the named arguments and a state for each packed sequence."""
    make = gate_maker(*names, "initial_state", return_state=True, cu_seqlens=jnp.array(PACKED_CU_SEQLENS, jnp.int32))
    return make(key, sizes)


_CASES: tuple[Row, ...] = (
    (
        "CUDA chunks, decay of heads",
        RecurrenceSizes(t=200, h=4, g=2, v=64, **DEFAULT_SIZES),
        gate_maker("beta", "decay", "initial_state", return_state=True),
        ("beta", "decay", "initial_state"),
        (),
    ),
    (
        "CUDA chunks, no decay",
        RecurrenceSizes(t=65, h=2, g=2, v=128, **DEFAULT_SIZES),
        gate_maker("beta", return_state=True),
        ("beta",),
        ("awkward",),
    ),
    (
        "CUDA chunks, 256 value channels, decay of heads",
        RecurrenceSizes(t=130, h=2, g=1, v=256, **DEFAULT_SIZES),
        gate_maker("beta", "decay", "initial_state", return_state=True),
        ("beta", "decay", "initial_state"),
        (),
    ),
    (
        "CUDA chunks of packed sequences, decay of heads",
        RecurrenceSizes(h=2, g=2, v=64, **PACKED_SIZES),
        lambda key, sizes: packed_inputs(key, sizes, "beta", "decay"),
        ("beta", "decay", "cu_seqlens", "sequence_state"),
        (),
    ),
    (
        "CUDA chunks in segments, decay of heads",
        RecurrenceSizes(h=2, g=2, v=64, **LONG_SIZES),
        gate_maker("beta", "decay", "initial_state", return_state=True),
        ("beta", "decay", "initial_state"),
        (),
    ),
)

_GATED_CASES: tuple[Row, ...] = (
    (
        "CUDA chunks, gate of heads",
        RecurrenceSizes(t=200, h=4, g=2, v=64, **DEFAULT_SIZES),
        gate_maker("g", "initial_state", return_state=True),
        ("decay", "initial_state"),
        (),
    ),
    (
        "CUDA chunks of packed sequences, gate of heads",
        RecurrenceSizes(h=2, g=2, v=64, **PACKED_SIZES),
        lambda key, sizes: packed_inputs(key, sizes, "g"),
        ("decay", "cu_seqlens", "sequence_state"),
        (),
    ),
    (
        "CUDA chunks in segments, gate of heads",
        RecurrenceSizes(h=2, g=2, v=64, **LONG_SIZES),
        gate_maker("g", "initial_state", return_state=True),
        ("decay", "initial_state"),
        (),
    ),
)
_CONSTANT_GATE_CASES: tuple[Row, ...] = (
    (
        "CUDA chunks, constant gates of heads",
        RecurrenceSizes(t=65, h=2, g=2, v=128, **DEFAULT_SIZES),
        gate_maker("g_gamma", return_state=True),
        ("decay",),
        ("awkward",),
    ),
)

_LIGHTNING_CASES: tuple[Row, ...] = (
    (
        "CUDA chunks, decay of a layer",
        RecurrenceSizes(b=1, t=65, h=2, g=2, v=64, **DEFAULT_SIZES),
        gate_maker("initial_state", layer_idx=1, num_layers=4, return_state=True),
        ("decay", "initial_state"),
        (),
    ),
)

_STATE_SPACE_CASES: tuple[state_space.Row, ...] = (
    (
        "CUDA chunks with a state",
        state_space.StateSpaceSizes(t=130, p=64, e=128, dtype=jnp.bfloat16),
        ("initial_state",),
        {},
        ("decay", "dt", "skip", "initial_state", "transposed_states"),
        (),
    ),
)


def _with_short_columns(case: Case) -> Case:
    """Returns a case with B and C of the lengths that normalised keys have: with 128 normal numbers each, outputs are
    sums of large terms, and the suite's tolerance of an element is below the rounding of a bfloat16 term.
    """

    def make(key: jax.Array) -> StateSpaceV2Arguments:
        args = case.make(key)
        return dataclasses.replace(args, B=args.B * 0.3, C=args.C * 0.09)

    return dataclasses.replace(case, make=make)


def with_short_queries(case: Case) -> Case:
    """Returns a case with queries as short as those of models, for the same reason: normal ones add up 128 products,
    and a head without decay adds up all tokens.
    """

    def make(key: jax.Array) -> Any:
        args = case.make(key)
        return dataclasses.replace(args, query=args.query * 0.2)

    return dataclasses.replace(case, make=make)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {"gated_delta_rule": make_cases(GatedDeltaRuleArguments, _CASES)}


def cases_without_delta() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation without the delta rule, by its name."""
    state_space_cases = state_space.make_cases(StateSpaceV2Arguments, _STATE_SPACE_CASES)
    return {
        "gated_linear_attention": tuple(
            with_short_queries(case) for case in make_cases(GLAttentionArguments, _GATED_CASES)
        ),
        "lightning_attention": tuple(
            with_short_queries(case) for case in make_cases(LightningAttentionArguments, _LIGHTNING_CASES)
        ),
        "recurrent_attention": make_cases(RecurrentAttentionArguments, _CONSTANT_GATE_CASES),
        "state_space_v2": tuple(_with_short_columns(case) for case in state_space_cases),
    }
