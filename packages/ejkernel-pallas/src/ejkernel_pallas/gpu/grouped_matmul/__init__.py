"""Grouped matmul in Mosaic GPU, for NVIDIA's Hopper.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.families.grouped_matmul.kinds import average_rows_per_group, shared_tuning_key
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.gpu.grouped_matmul import config, spec
from ejkernel_pallas.gpu.requirements import hopper_requires

HANDLES = frozenset({"group_offset", "transpose_rhs"})
"""Optional fields that the kernels honour."""

GATED_HANDLES = frozenset(
    ("indices", "activation", "rhs_bias", "transpose_rhs", "interleaved", "gated", "alpha", "beta", "limit")
)
"""Optional fields that the gated kernel honours."""

MIN_MEAN_ROWS_PER_GROUP = 32
"""The mean number of rows per group from which on the gated kernel has priority over Triton's.

On an H200, K2048 F768 G128: with 4 rows per group 0.250 ms, where Triton's kernel takes 0.235; with 32, 0.240 and
0.268.
"""


def _gated_priority(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's 10: an expert layer of 65536 rows takes 1.20 ms forward instead of 1.31.

    With fewer rows per group Triton's smaller tiles are faster. The conformance cases of both kernels pass on a chip.
    """
    return 20 if average_rows_per_group(config.plain_product_record(record)) >= MIN_MEAN_ROWS_PER_GROUP else -1


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations for 16-bit operands, for 8-bit operands with scales, and for gated products."""
    return (
        Implementation(
            family="grouped_matmul",
            name="mosaic_gpu",
            platform="pallas",
            forward="ejkernel_pallas.gpu.grouped_matmul.forward:forward",
            backward="ejkernel_pallas.gpu.grouped_matmul.backward:backward",
            gradients=frozenset({"lhs", "rhs"}),
            requires=hopper_requires(
                handles=HANDLES,
                find_refusal_reasons=spec.refusal_reasons,
            ),
            config=ConfigSpace.of(
                config, forward=config.HopperGrouped, backward=config.HopperGroupedBackward, kind=shared_tuning_key
            ),
            # Above Triton's, whose kernels were slower in both passes of every shape of `grouped_matmul_gpu.py`.
            priority=20,
            cases="ejkernel_pallas.gpu.grouped_matmul.cases:cases",
        ),
        Implementation(
            family="grouped_matmul",
            name="mosaic_gpu_fp8",
            platform="pallas",
            forward="ejkernel_pallas.gpu.grouped_matmul.forward:forward_fp8",
            backward=None,
            requires=hopper_requires(
                handles=HANDLES | {"lhs_scale", "rhs_scale", "precision"},
                find_refusal_reasons=spec.fp8_refusal_reasons,
                dtypes=(spec.FP8_OPERAND_DTYPE,),
            ),
            config=ConfigSpace(
                heuristic=config.fp8_heuristic,
                candidates=config.fp8_candidates,
                forward=config.HopperFp8,
                public_fields=config.PUBLIC_FIELDS,
                kind=shared_tuning_key,
            ),
            # Above Triton's, on an H200: 1.0 to 1.1 times as fast where tensor cores accumulate, 1.5 times with scales
            # per row and column, and 1.6 to 2.3 times with block scales.
            priority=20,
            cases="ejkernel_pallas.gpu.grouped_matmul.cases:fp8_cases",
        ),
        Implementation(
            family="gated_grouped_matmul",
            name="mosaic_gpu",
            platform="pallas",
            forward="ejkernel_pallas.gpu.grouped_matmul.forward:gated_forward",
            backward=None,
            requires=hopper_requires(handles=GATED_HANDLES, find_refusal_reasons=spec.gated_refusal_reasons),
            config=ConfigSpace(
                heuristic=config.gated_heuristic,
                candidates=config.gated_candidates,
                forward=config.HopperGated,
                public_fields=config.PUBLIC_FIELDS,
            ),
            priority=_gated_priority,
            cases="ejkernel_pallas.gpu.grouped_matmul.cases:gated_cases",
        ),
    )
