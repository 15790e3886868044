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

LONG_SIZES: dict[str, Any] = {"b": 1, "t": 1100, **DEFAULT_SIZES}
"""A row that is split into segments."""


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
