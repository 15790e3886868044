"""Grouped matmul in Triton, for GPUs from Ampere on and AMD's through HIP."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from ejkernel.families.grouped_matmul import FAMILY
from ejkernel.families.grouped_matmul.kinds import shared_tuning_key
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton import requirements
from ejkernel_triton.grouped_matmul import config
from ejkernel_triton.grouped_matmul.spec import FLOAT8_OPERAND_DTYPE
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLED_FIELDS = ("group_offset", "existing_out", "rhs_scale", "rhs_bias", "lhs_scale", "transpose_rhs", "precision")
"""Optional fields that the kernels honour."""

DTYPES = ("float16", "bfloat16", "float32")
EIGHT_BIT_DTYPES = ("int8", "float8_e5m2", "float8_e4m3fn")
"""Dtypes of matrices with scales. The chip must convert float8_e4m3fn, which NVIDIA's chips do from Ada on."""
MAX_MATRIX_ELEMENTS = 2**31 - 1
"""The largest number of elements of a matrix: offsets in it have 32 bits."""


def matrix_size_refusal_reasons(rhs: jax.Array) -> Iterable[str]:
    """Yields the reason to refuse matrices [E, K, N] that are too large for the kernels' offsets."""
    rows, columns = rhs.shape[1:3]
    if rows * columns > MAX_MATRIX_ELEMENTS:
        yield f"rhs: got matrices of {rows} by {columns}, the kernel has at most {MAX_MATRIX_ELEMENTS} elements"


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if str(record.rhs.dtype) not in (*DTYPES, *EIGHT_BIT_DTYPES):
        yield f"rhs: got {record.rhs.dtype}, the kernel reads {', '.join((*DTYPES, *EIGHT_BIT_DTYPES))}"
    chip = gpu_of(current_device())
    if str(record.rhs.dtype) == "float8_e4m3fn" and (chip.vendor == "amd" or chip.capability < 89):
        yield f"rhs: got float8_e4m3fn, which {chip.target} does not convert to other dtypes"
    existing = None if record.existing_out is None else record.existing_out.dtype
    for name, dtype in (("preferred_element_type", record.out_dtype), ("existing_out", existing)):
        if dtype is not None and str(dtype) not in DTYPES:
            yield f"{name}: got {dtype}, the kernel writes {', '.join(DTYPES)}"
    yield from matrix_size_refusal_reasons(record.rhs)


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "grouped_matmul",
            forward="grouped_matmul.forward:forward",
            backward="grouped_matmul.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=dataclasses.replace(
                triton_requires(handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
                dtypes=requirements.DTYPES | {FLOAT8_OPERAND_DTYPE},
            ),
            config=ConfigSpace.of(
                config, forward=config.GroupedForward, backward=config.GroupedBackward, kind=shared_tuning_key
            ),
            invariant_to=frozenset({"batch"}),
        ),
    )
