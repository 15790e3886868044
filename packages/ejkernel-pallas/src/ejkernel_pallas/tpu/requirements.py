"""What the registrations of all Mosaic TPU kernels share: requirements of device, toolchain and dtypes, and names."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Family, Implementation, Requires
from ejkernel.ops.space import ConfigModule
from ejkernel_pallas.toolchain import JAX
from ejkernel_pallas.tpu.interpret import device_kinds

DTYPES = frozenset({"bfloat16", "float32"})


def tpu_requires(
    *, handles: Iterable[str], extra: Callable[[Any], Iterable[str]] = lambda record: (), head_dims: range | None = None
) -> Requires:
    """Returns requirements that are met by TPUs, and by the CPU where kernels are interpreted.

    Args:
        handles: Optional fields that the kernels support.
        extra: Yields reasons to refuse a record that data cannot express.
        head_dims: Head dimensions that the kernels support; None for operations without heads.
    """
    return Requires(
        devices=device_kinds(),
        modules=JAX,
        dtypes=DTYPES,
        head_dims=head_dims,
        handles=frozenset(handles),
        extra=extra,
    )


def mosaic_tpu(
    family: Family,
    config: ConfigModule,
    *,
    forward: type,
    backward: type,
    requires: Requires,
    without: frozenset[str] = frozenset(),
) -> Implementation:
    """Returns the implementation of a family whose folder has `forward.py`, `backward.py` and `config.py`.

    Args:
        family: The family; its name is the folder's.
        config: The folder's module `config`: the heuristic, the candidates and the public fields.
        forward: The config type of the forward kernel.
        backward: The config type of the backward kernels.
        requires: What the kernels need, from `tpu_requires`.
        without: Differentiable fields that the kernels do not have.
    """
    folder = f"ejkernel_pallas.tpu.{family.name}"
    return Implementation(
        family=family.name,
        name="mosaic_tpu",
        platform="pallas",
        forward=f"{folder}.forward:forward",
        backward=f"{folder}.backward:backward",
        gradients=frozenset(family.differentiable) - without,
        requires=requires,
        config=ConfigSpace.of(config, forward=forward, backward=backward),
        priority=10,
    )
