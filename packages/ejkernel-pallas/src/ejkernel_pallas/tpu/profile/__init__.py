"""Predicts the run time of TPU kernels without a TPU.

libtpu compiles ahead of time on any machine, and writes the VLIW bundles that a TPU would run. The profile reads them,
executes their scalar code, issues them in order with the latencies of the chip's units, and models copies as one HBM
queue: see the page "TPU kernels without a TPU".
"""

from ejkernel_pallas.tpu.profile.cases import Case, Workload
from ejkernel_pallas.tpu.profile.chips import CHIPS, Chip
from ejkernel_pallas.tpu.profile.jobs import profile, profile_many
from ejkernel_pallas.tpu.profile.report import KernelReport, Loop, Report, Simulation

__all__ = [
    "CHIPS",
    "Case",
    "Chip",
    "KernelReport",
    "Loop",
    "Report",
    "Simulation",
    "Workload",
    "profile",
    "profile_many",
]
