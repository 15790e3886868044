"""Grouped matmul in Mosaic GPU, for NVIDIA's Hopper.

What the kernels need, and what they do not do, is data here; nothing of Pallas is imported before a call.
"""

from ejkernel.families.grouped_matmul.kinds import kind_of
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.gpu.grouped_matmul import gated_spec, scaled_spec, spec
from ejkernel_pallas.gpu.requirements import hopper_requires

HANDLES = frozenset({"group_offset", "transpose_rhs"})
"""Optional fields that the kernels honour."""


def implementations() -> tuple[Implementation, ...]:
    """One for operands of 16 bits, one for those of 8 bits with scales, and one for gated products."""
    return (
        Implementation(
            family="grouped_matmul",
            name="mosaic_gpu",
            platform="pallas",
            forward="ejkernel_pallas.gpu.grouped_matmul.run:forward",
            backward="ejkernel_pallas.gpu.grouped_matmul.run:backward",
            gradients=frozenset({"lhs", "rhs"}),
            requires=hopper_requires(
                handles=HANDLES,
                extra=spec.reasons,
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
        Implementation(
            family="grouped_matmul",
            name="mosaic_gpu_8_bits",
            platform="pallas",
            forward="ejkernel_pallas.gpu.grouped_matmul.run:forward_of_8_bits",
            backward=None,
            requires=hopper_requires(
                handles=HANDLES | {"lhs_scale", "rhs_scale", "precision"},
                extra=scaled_spec.reasons,
                dtypes=(scaled_spec.FLOAT8,),
            ),
            config=ConfigSpace(
                heuristic=scaled_spec.heuristic,
                candidates=scaled_spec.candidates,
                forward=spec.HopperScaled,
                faces=scaled_spec.FACES,
                kind=kind_of,
            ),
            # Above Triton's, on an H200: 1.0 to 1.1 times as fast where tensor cores sum, 1.5 times with scales of rows
            # and columns, and 1.6 to 2.3 times with scales of blocks.
            priority=20,
            cases="ejkernel_pallas.gpu.grouped_matmul.cases:cases_of_8_bits",
        ),
        Implementation(
            family="gated_grouped_matmul",
            name="mosaic_gpu",
            platform="pallas",
            forward="ejkernel_pallas.gpu.grouped_matmul.run:gated_forward",
            backward=None,
            requires=hopper_requires(handles={"indices", "activation"}, extra=gated_spec.reasons),
            config=ConfigSpace(
                heuristic=gated_spec.heuristic,
                candidates=gated_spec.candidates,
                forward=gated_spec.HopperGated,
                faces=gated_spec.FACES,
            ),
            priority=gated_spec.priority,
            cases="ejkernel_pallas.gpu.grouped_matmul.gated_cases:cases",
        ),
    )
