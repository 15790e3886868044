"""What the registrations of all Mosaic TPU kernels share: requirements of device, toolchain and dtypes, and names."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Family, Implementation, Requires
from ejkernel_pallas.toolchain import JAX
from ejkernel_pallas.tpu.interpret import served_device_kinds

SUPPORTED_DTYPES = frozenset({"bfloat16", "float32"})
SUPPORTED_DTYPES_AND_FLOAT8 = SUPPORTED_DTYPES | {"float8_e4m3fn"}
MAX_VMEM_BYTES = 40 * 2**20
"""Bytes of VMEM for blocks and scratch memory: what every chip has, minus what the compiler needs."""


def tpu_requires(
    *,
    supported_fields: Iterable[str],
    refusal_reasons: Callable[[Any], Iterable[str]] = lambda record: (),
    head_dims: range | None = None,
    dtypes: frozenset[str] = SUPPORTED_DTYPES,
) -> Requires:
    """Returns requirements that are met by TPUs, and by the CPU where kernels are interpreted.

    Args:
        supported_fields: Optional fields that the kernels support.
        refusal_reasons: Yields reasons to refuse a record that data cannot express.
        head_dims: Head dimensions that the kernels support; None for operations without heads.
        dtypes: Dtypes that the kernels support.
    """
    return Requires(
        devices=served_device_kinds(),
        modules=JAX,
        dtypes=dtypes,
        head_dims=head_dims,
        handles=frozenset(supported_fields),
        extra=refusal_reasons,
    )


def make_mosaic_tpu_implementation(
    family: Family,
    config: ConfigSpace,
    requires: Requires,
    *,
    folder: str = "",
    backward: bool = True,
    fields_without_gradient: frozenset[str] = frozenset(),
    **other_fields: Any,
) -> Implementation:
    """Returns an implementation whose passes are those of a folder here, `forward.py` and `backward.py`.

    Args:
        family: The family.
        config: What can be chosen.
        requires: What the kernels need, from `tpu_requires`.
        folder: The folder; that of the family's name unless given.
        backward: Whether there is a backward pass.
        fields_without_gradient: Differentiable fields that the kernels do not have.
        **others: Further fields of `Implementation`, or other values of its name and priority.
    """
    module = f"ejkernel_pallas.tpu.{folder or family.name}"
    fields: dict[str, Any] = {"name": "mosaic_tpu", "priority": 10, "forward": f"{module}.forward:forward"}
    if backward:
        fields |= {
            "backward": f"{module}.backward:backward",
            "gradients": frozenset(family.differentiable) - fields_without_gradient,
        }
    return Implementation(
        family=family.name, platform="pallas", requires=requires, config=config, **{**fields, **other_fields}
    )
