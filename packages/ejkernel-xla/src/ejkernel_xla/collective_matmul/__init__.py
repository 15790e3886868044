"""Collective matmul in XLA: a ring of transfers, each under the product of a step, or XLA's own collectives."""

from ejkernel.families.collective_matmul import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.collective_matmul import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(FAMILY, symbolic=False, config=ConfigSpace.of(config, forward=config.CollectiveSchedule)),
)
