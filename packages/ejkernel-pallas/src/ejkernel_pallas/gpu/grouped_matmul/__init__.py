"""Grouped matmul in Mosaic GPU, for NVIDIA's Hopper.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

import jax.numpy as jnp

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.kinds import average_rows_per_group, shared_tuning_key
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.gpu.grouped_matmul import config
from ejkernel_pallas.gpu.grouped_matmul.plan import has_whole_tiles
from ejkernel_pallas.gpu.grouped_matmul.spec import FP8_CONTRACTED_PER_STEP, FP8_OPERAND_DTYPE
from ejkernel_pallas.gpu.hopper.sizes import MAX_GATHERED_MATRIX_BYTES, SWIZZLE_COLUMNS, WGMMA_M
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


def _priority(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's, whose kernels were slower in both passes of every shape of
    `grouped_matmul_gpu.py`; below XLA's for rows that are padded first, which has not been timed.
    """
    return 20 if has_whole_tiles(record.lhs.shape[0]) else -1


def _gated_priority(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's 10: an expert layer of 65536 rows takes 1.20 ms forward instead of 1.31.

    With fewer rows per group Triton's smaller tiles are faster. The conformance cases of both kernels pass on a chip.
    """
    product = config.plain_product_record(record)
    fast = has_whole_tiles(product.lhs.shape[0]) and average_rows_per_group(product) >= MIN_MEAN_ROWS_PER_GROUP
    return 20 if fast else -1


def refusal_reasons(record: GroupedMatmul) -> list[str]:
    """Returns why the kernel for 16-bit operands refuses a record, beyond what `Requires` expresses."""
    contracted, problems = record.lhs.shape[1], []
    for name, size in (("contracted axis of lhs", contracted), ("output axis of rhs", columns(record))):
        if size % SWIZZLE_COLUMNS or not size:
            problems.append(f"the {name} has {size} elements; the kernel wants a multiple of {SWIZZLE_COLUMNS}")
    if record.rhs.dtype != record.lhs.dtype:
        problems.append(f"rhs has dtype {record.rhs.dtype} and lhs {record.lhs.dtype}; the kernel wants the same")
    if jnp.dtype(record.out_dtype).itemsize not in (2, 4):
        problems.append(f"preferred_element_type is {record.out_dtype}; the kernel wants a dtype of 16 or 32 bits")
    return problems


def fp8_refusal_reasons(record: GroupedMatmul) -> list[str]:
    """Returns why the kernel for 8-bit operands refuses a record, beyond what `Requires` expresses."""
    rows, contracted = record.lhs.shape
    problems = []
    if str(record.rhs.dtype) != FP8_OPERAND_DTYPE:
        problems.append(f"rhs has dtype {record.rhs.dtype}; the kernel wants {FP8_OPERAND_DTYPE}")
    if record.lhs_scale is None or record.rhs_scale is None:
        return [*problems, "lhs_scale or rhs_scale is None; the kernel wants both"]
    if not record.transpose_rhs:
        problems.append(
            "transpose_rhs is False; the kernel wants True, as WGMMA reads 8 bits along the contracted axis"
        )
    if rows < WGMMA_M:
        problems.append(f"lhs has {rows} rows; the kernel wants at least {WGMMA_M}")
    if columns(record) % SWIZZLE_COLUMNS or not columns(record):
        problems.append(f"rhs has {columns(record)} columns; the kernel wants a multiple of {SWIZZLE_COLUMNS}")
    for name, blocks in (("lhs_scale", record.lhs_scale.shape[1]), ("rhs_scale", record.rhs_scale.shape[1])):
        if contracted % (blocks * FP8_CONTRACTED_PER_STEP) or not contracted:
            problems.append(
                f"{name} has a scale per {contracted // blocks} contracted elements; the kernel wants a multiple "
                f"of {FP8_CONTRACTED_PER_STEP}"
            )
    if jnp.dtype(record.out_dtype).itemsize not in (2, 4):
        problems.append(f"preferred_element_type is {record.out_dtype}; the kernel wants a dtype of 16 or 32 bits")
    return problems


def gated_refusal_reasons(record: GatedGroupedMatmul) -> list[str]:
    """Returns why the gated kernel refuses a record, beyond what `Requires` expresses."""
    product, size = config.plain_product_record(record), record.lhs.size * record.lhs.dtype.itemsize
    problems = refusal_reasons(product)
    outputs = columns(product) // 2 if record.gated else columns(product)
    if record.gated and outputs % SWIZZLE_COLUMNS:
        problems.append(f"rhs gives {outputs} output columns; the kernel wants a multiple of {SWIZZLE_COLUMNS}")
    if record.indices is not None and size > MAX_GATHERED_MATRIX_BYTES:
        problems.append(f"lhs has {size} bytes; rows can be gathered from at most {MAX_GATHERED_MATRIX_BYTES}")
    return problems


def _plain_implementation() -> Implementation:
    """Returns the implementation for 16-bit operands."""
    return Implementation(
        family="grouped_matmul",
        name="mosaic_gpu",
        platform="pallas",
        forward="ejkernel_pallas.gpu.grouped_matmul.forward:forward",
        backward="ejkernel_pallas.gpu.grouped_matmul.backward:backward",
        gradients=frozenset({"lhs", "rhs"}),
        requires=hopper_requires(
            handles=HANDLES,
            find_refusal_reasons=refusal_reasons,
        ),
        config=ConfigSpace.of(
            config, forward=config.HopperGrouped, backward=config.HopperGroupedBackward, kind=shared_tuning_key
        ),
        priority=_priority,
        cases="ejkernel_pallas.gpu.grouped_matmul.cases:cases",
        invariant_to=frozenset({"batch"}),
        invariant_priority=20,
    )


def _fp8_implementation() -> Implementation:
    """Returns the implementation for 8-bit operands with scales."""
    return Implementation(
        family="grouped_matmul",
        name="mosaic_gpu_fp8",
        platform="pallas",
        forward="ejkernel_pallas.gpu.grouped_matmul.forward:forward_fp8",
        backward=None,
        requires=hopper_requires(
            handles=HANDLES | {"lhs_scale", "rhs_scale", "precision"},
            find_refusal_reasons=fp8_refusal_reasons,
            dtypes=(FP8_OPERAND_DTYPE,),
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
    )


def _gated_implementation() -> Implementation:
    """Returns the implementation for gated products of 16-bit operands."""
    return Implementation(
        family="gated_grouped_matmul",
        name="mosaic_gpu",
        platform="pallas",
        forward="ejkernel_pallas.gpu.grouped_matmul.forward:gated_forward",
        backward=None,
        requires=hopper_requires(handles=GATED_HANDLES, find_refusal_reasons=gated_refusal_reasons),
        config=ConfigSpace(
            heuristic=config.gated_heuristic,
            candidates=config.gated_candidates,
            forward=config.HopperGated,
            public_fields=config.PUBLIC_FIELDS,
            batch_invariant=config.gated_heuristic,
        ),
        priority=_gated_priority,
        cases="ejkernel_pallas.gpu.grouped_matmul.cases:gated_cases",
        invariant_to=frozenset({"batch"}),
        invariant_priority=20,
    )


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations for 16-bit operands, for 8-bit operands with scales, and for gated products."""
    return _plain_implementation(), _fp8_implementation(), _gated_implementation()
