"""Grouped matmul in Mosaic GPU, for NVIDIA's Hopper.

What the kernels need, and what they do not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import current_device
from ejkernel.planning.grouped_kinds import kind_of
from ejkernel_pallas.gpu.grouped_matmul import spec
from ejkernel_pallas.toolchain import JAX

HANDLES = frozenset({"group_offset", "transpose_rhs"})
"""Optional fields that the kernels honour."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    capability = current_device().compute_capability
    if capability is not None and capability >= 10.0:
        yield f"compute capability {capability}: the instructions that the kernels are made of are those of 9.0 alone"
    yield from spec.reasons(record)


def implementations() -> tuple[Implementation, ...]:
    """One implementation."""
    return (
        Implementation(
            family="grouped_matmul",
            name="mosaic_gpu",
            platform="pallas",
            backend="gpu",
            forward="ejkernel_pallas.gpu.grouped_matmul.run:forward",
            backward="ejkernel_pallas.gpu.grouped_matmul.run:backward",
            gradients=frozenset({"lhs", "rhs"}),
            requires=Requires(
                devices=frozenset({"nvidia"}),
                modules=JAX,
                min_compute_capability=9.0,
                dtypes=frozenset({"float16", "bfloat16"}),
                handles=HANDLES,
                extra=_reasons,
            ),
            config=ConfigSpace(
                heuristic=spec.heuristic,
                candidates=spec.candidates,
                forward=spec.HopperGrouped,
                backward=spec.HopperGroupedBackward,
                faces=spec.FACES,
                kind=kind_of,
            ),
            # Above Triton's, whose kernels were slower in both passes of every shape of `grouped_matmul_gpu.py`.
            priority=20,
            cases="ejkernel_pallas.gpu.grouped_matmul.cases:cases",
        ),
    )
