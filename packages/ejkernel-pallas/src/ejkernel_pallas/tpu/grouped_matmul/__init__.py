"""Grouped matmul in Mosaic TPU.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.grouped_matmul import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.grouped_matmul import config
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires

SUPPORTED_OPTIONAL_FIELDS = ("group_offset", "existing_out", "rhs_scale", "rhs_bias", "transpose_rhs", "precision")
"""Optional fields that the kernels honour."""

SUPPORTED_GATED_OPTIONAL_FIELDS = frozenset(
    {"indices", "rhs_bias", "activation", "transpose_rhs", "interleaved", "gated"}
) | {*("alpha", "beta", "limit", "precision")}
"""The optional arguments that the kernel of gated products supports."""

FLOAT_DTYPES = ("bfloat16", "float32")
EIGHT_BIT_MATRIX_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not record.lhs.shape[0]:
        yield f"lhs: got {record.lhs.shape}, the kernels take at least one row"
    yield from _work_list_refusal_reasons(record)
    if str(record.rhs.dtype) not in (*FLOAT_DTYPES, *EIGHT_BIT_MATRIX_DTYPES):
        supported = ", ".join((*FLOAT_DTYPES, *EIGHT_BIT_MATRIX_DTYPES))
        yield f"rhs: got dtype {record.rhs.dtype}, the kernels take {supported}"
    for name, dtype in (
        ("preferred_element_type", record.out_dtype),
        ("existing_out", _dtype_or_none(record.existing_out)),
    ):
        if dtype is not None and str(dtype) not in FLOAT_DTYPES:
            yield f"{name}: got {dtype}, the kernels take {', '.join(FLOAT_DTYPES)}"


def _work_list_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields a reason to refuse a record whose work list does not fit scalar memory."""
    needed_bytes, rows = config.work_list_smem_bytes(record), record.lhs.shape[0]
    if needed_bytes > config.MAX_WORK_LIST_SMEM_BYTES:
        yield (
            f"lhs: got {rows} rows and {record.rhs.shape[0]} matrices, whose work list takes {needed_bytes} bytes of "
            f"SMEM; the kernels take {config.MAX_WORK_LIST_SMEM_BYTES}"
        )


def _gated_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the same reasons for a gated product."""
    product = config.ungated_product_record(record)
    if not product.lhs.shape[0]:
        yield f"lhs: got {product.lhs.shape}, the kernels take at least one row"
    if record.rhs_bias is not None and str(record.rhs_bias.dtype) not in FLOAT_DTYPES:
        yield f"rhs_bias: got dtype {record.rhs_bias.dtype}, the kernels take {', '.join(FLOAT_DTYPES)}"
    yield from _work_list_refusal_reasons(product)
    needed_bytes = config.whole_columns_vmem_bytes(record)
    if needed_bytes > config.MAX_WHOLE_COLUMNS_VMEM_BYTES:
        half = record.rhs.shape[1 if record.transpose_rhs else 2] // 2
        yield (
            f"rhs: the factor's columns begin at column {half}, which is no multiple of 128, so that a tile has all "
            f"columns: it takes {needed_bytes} bytes of VMEM, the kernels take {config.MAX_WHOLE_COLUMNS_VMEM_BYTES}"
        )


def _dtype_or_none(array: Any) -> Any:
    return None if array is None else array.dtype


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(
                config, forward=config.TpuMatmul, kind=config.tuned_table_key, fixed_if_invariant=("block_m",)
            ),
            tpu_requires(supported_fields=SUPPORTED_OPTIONAL_FIELDS, refusal_reasons=_refusal_reasons),
            fields_without_gradient=frozenset({"lhs_scale"}),
            invariant_to=frozenset({"batch"}),
            invariance_limits=config.invariance_limits,
        ),
        Implementation(
            family="gated_grouped_matmul",
            name="mosaic_tpu",
            platform="pallas",
            forward="ejkernel_pallas.tpu.grouped_matmul.forward:gated_forward",
            backward="ejkernel_pallas.tpu.grouped_matmul.backward:gated_backward",
            gradients=frozenset({"lhs", "rhs", "rhs_bias"}),
            requires=tpu_requires(
                supported_fields=SUPPORTED_GATED_OPTIONAL_FIELDS, refusal_reasons=_gated_refusal_reasons
            ),
            config=ConfigSpace(
                heuristic=config.gated_heuristic,
                candidates=config.gated_candidates,
                forward=config.TpuMatmul,
                batch_invariant=config.gated_batch_invariant,
                fixed_if_invariant=("block_m",),
                public_fields=config.PUBLIC_FIELDS,
            ),
            # Neither the products nor their activation are in memory, which XLA's path writes and reads again.
            priority=10,
            invariant_to=frozenset({"batch"}),
            invariance_limits=config.invariance_limits,
        ),
    )
