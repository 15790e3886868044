"""The shared registration of all XLA implementations."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Family, Implementation, Requires
from ejkernel.types.arguments import optional_fields
from ejkernel_xla.no_tpu_kernel import REASONS_WITHOUT_TPU_KERNEL

FLOAT_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


def xla_implementation(
    family: Family,
    *,
    config: ConfigSpace,
    handles: Iterable[str] | None = None,
    gradients: Iterable[str] | None = None,
    backward: bool = True,
    dtypes: frozenset[str] = FLOAT_DTYPES,
    symbolic: bool = True,
    **other_fields: Any,
) -> Implementation:
    """Returns an implementation for every device, with the passes of the family's folder here.

    Args:
        family: The family it serves.
        config: What can be chosen.
        handles: Optional fields that it honours; None for all there are. The conformance suite fails for one that it
            does not honour.
        gradients: Fields that get a gradient; None for all that are differentiable.
        backward: Whether there is a backward pass.
        dtypes: Those it takes.
        symbolic: Whether it takes symbolic sizes.
        **other_fields: Others of `Implementation`.
    """
    folder = f"ejkernel_xla.{family.name}"
    handles = optional_fields(family.record) if handles is None else handles
    gradients = family.differentiable if gradients is None else gradients
    return Implementation(
        family=family.name,
        name="xla",
        platform="xla",
        forward=f"{folder}.forward:forward",
        backward=f"{folder}.backward:backward" if backward else None,
        gradients=frozenset(gradients) if backward else frozenset(),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}), symbolic=symbolic, dtypes=dtypes, handles=frozenset(handles)
        ),
        config=config,
        instead_of_kernel={"tpu": REASONS_WITHOUT_TPU_KERNEL[family.name]}
        if family.name in REASONS_WITHOUT_TPU_KERNEL
        else {},
        **other_fields,
    )
