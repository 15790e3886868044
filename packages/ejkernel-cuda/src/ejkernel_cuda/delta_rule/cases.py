"""Conformance cases of the chunked delta rule: head sizes that the kernel is compiled for, in bfloat16."""

from typing import Any

import jax.numpy as jnp

from ejkernel.modules.operations.cases.recurrence import RecurrenceSizes, Row, gate_maker, make_cases
from ejkernel.modules.operations.gated_delta_rule import GatedDeltaRuleArguments
from ejkernel.ops.model import Case

DEFAULT_SIZES: dict[str, Any] = {"k": 128, "dtype": jnp.bfloat16}


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
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {"gated_delta_rule": make_cases(GatedDeltaRuleArguments, _CASES)}
