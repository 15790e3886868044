"""Conformance cases of gates per key channel: head sizes that the kernels are compiled for, in bfloat16."""

from typing import Any

import jax

from ejkernel.modules.operations.cases.recurrence import RecurrenceSizes, Row, gate_maker, log_gate, make_cases
from ejkernel.modules.operations.gated_linear_attention import GLAttentionArguments
from ejkernel.modules.operations.kernel_delta_attention import KernelDeltaAttentionArguments
from ejkernel.ops.model import Case
from ejkernel_cuda.delta_rule.cases import DEFAULT_SIZES, LONG_SIZES, PACKED_SIZES, packed_inputs, with_short_queries


def _packed_beta_and_decay(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns packed sequences with states, beta and a decay for each key channel."""
    others, decay = jax.random.split(key)
    return packed_inputs(others, sizes, "beta") | {"decay": log_gate(decay, sizes.shape("gk"))}


def _beta_decay_and_state(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns beta, a decay for each key channel, and a state."""
    others, decay = jax.random.split(key)
    fields = gate_maker("beta", "initial_state", return_state=True)(others, sizes)
    return fields | {"decay": log_gate(decay, sizes.shape("gk"))}


_DELTA_CASES: tuple[Row, ...] = (
    (
        "CUDA chunks, decay of channels",
        RecurrenceSizes(t=130, h=2, g=1, v=64, **DEFAULT_SIZES),
        _beta_decay_and_state,
        ("beta", "decay", "initial_state"),
        (),
    ),
    (
        "CUDA chunks of packed sequences, decay of channels",
        RecurrenceSizes(h=2, g=2, v=64, **PACKED_SIZES),
        _packed_beta_and_decay,
        ("beta", "decay", "cu_seqlens", "sequence_state"),
        (),
    ),
    (
        "CUDA chunks in segments, decay of channels",
        RecurrenceSizes(h=2, g=2, v=64, **LONG_SIZES),
        _beta_decay_and_state,
        ("beta", "decay", "initial_state"),
        (),
    ),
)
_CASES: tuple[Row, ...] = (
    (
        "CUDA chunks, gates of channels",
        RecurrenceSizes(t=200, h=2, g=2, v=128, **DEFAULT_SIZES),
        gate_maker("gate of channels", "initial_state", return_state=True),
        ("decay", "initial_state"),
        (),
    ),
    (
        "CUDA chunks of packed sequences, gates of channels",
        RecurrenceSizes(h=2, g=2, v=64, **PACKED_SIZES),
        lambda key, sizes: packed_inputs(key, sizes, "gate of channels"),
        ("decay", "cu_seqlens", "sequence_state"),
        (),
    ),
    (
        "CUDA chunks in segments, gates of channels",
        RecurrenceSizes(h=2, g=2, v=64, **LONG_SIZES),
        gate_maker("gate of channels", "initial_state", return_state=True),
        ("decay", "initial_state"),
        (),
    ),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {
        "kernel_delta_attention": make_cases(KernelDeltaAttentionArguments, _DELTA_CASES),
        "gated_linear_attention": tuple(with_short_queries(case) for case in make_cases(GLAttentionArguments, _CASES)),
    }
