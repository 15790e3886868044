"""Collective matmul in Mosaic TPU: one kernel per device, which sends rows or sums while it multiplies others."""

from typing import Any

from ejkernel.families.collective_matmul import FAMILY
from ejkernel.families.ring_attention import axis_size
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.collective_matmul import config
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires


def _priority(record: Any, device: Any, direction: Any) -> int:
    """Returns the place in the order of choice: on one device, where nothing travels, after XLA."""
    return 10 if axis_size(record.axis_name) > 1 else -1


def implementations() -> tuple[Implementation, ...]:
    """Returns what this package registers for `collective_matmul`."""
    requires = tpu_requires(supported_fields=frozenset({"precision"}))
    space = ConfigSpace.of(config, forward=config.TpuCollective)
    return (make_mosaic_tpu_implementation(FAMILY, space, requires, priority=_priority),)
