"""Grouped matmul in Mosaic TPU.

What the kernels need, and what they do not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.grouped_matmul import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.grouped_matmul import config
from ejkernel_pallas.tpu.requirements import tpu_requires

OPTIONAL = ("group_offset", "existing_out", "rhs_scale", "rhs_bias", "transpose_rhs", "precision")
"""Optional fields that the kernels honour."""

DTYPES = ("bfloat16", "float32")
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")


def _reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not record.lhs.shape[0]:
        yield "lhs has no rows"
    if str(record.rhs.dtype) not in (*DTYPES, *NARROW):
        yield f"rhs has dtype {record.rhs.dtype}, which is not among {', '.join((*DTYPES, *NARROW))}"
    for name, dtype in (("preferred_element_type", record.out_dtype), ("existing_out", _dtype(record.existing_out))):
        if dtype is not None and str(dtype) not in DTYPES:
            yield f"{name} {dtype} is not among {', '.join(DTYPES)}"


def _dtype(array: Any) -> Any:
    return None if array is None else array.dtype


def implementations() -> tuple[Implementation, ...]:
    """Returns one implementation."""
    return (
        Implementation(
            family="grouped_matmul",
            name="pallas_tpu",
            platform="pallas",
            forward="ejkernel_pallas.tpu.grouped_matmul.forward:forward",
            backward="ejkernel_pallas.tpu.grouped_matmul.backward:backward",
            gradients=frozenset(FAMILY.differentiable) - {"lhs_scale"},
            requires=tpu_requires(
                handles=frozenset(OPTIONAL),
                extra=_reasons,
            ),
            config=ConfigSpace(
                heuristic=config.heuristic,
                candidates=config.candidates,
                kind=config.kind,
                forward=config.TpuMatmul,
                faces=config.PUBLIC_FIELDS,
            ),
            priority=10,
        ),
    )
