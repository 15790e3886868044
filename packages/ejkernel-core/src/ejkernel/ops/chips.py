"""The chips that kernels are made for: one table, for heuristics, estimates and compiling ahead of time.

A compute capability has several products. The table has the largest on sale of each, so that a grid that covers it has
no tail wave on the others.

Sources: NVIDIA's CUDA C++ programming guide, table "technical specifications per compute capability", and its data
sheets; AMD's CDNA 3 instruction set guide and data sheets; Google's pages "system architecture" of each TPU.
"""

import dataclasses
from typing import Literal

from ejkernel.ops.device import DeviceInfo

KIBI, MEBI = 2**10, 2**20
Architecture = Literal["ampere", "ada", "hopper", "blackwell", "cdna3"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The resources of a GPU that a kernel can use.

    Attributes:
        target: The name that compilers use: `sm_90`, `gfx942`.
        product_name: The product that has these figures.
        architecture: The generation of the chip. Consumer Blackwell (sm_120) counts as `ada`, since it has Ada's matrix
            instructions.
        multiprocessors: How many it has.
        total_shared_memory: Bytes of a multiprocessor for its resident blocks; each takes 1 KiB more on NVIDIA.
        l2: Bytes of the L2 cache, of all its parts together.
        bandwidth: Bytes a second of its memory.
        registers: 32-bit registers of a multiprocessor, which its resident blocks share.
    """

    target: str
    product_name: str
    architecture: Architecture
    multiprocessors: int
    total_shared_memory: int
    l2: int
    bandwidth: float
    registers: int = 64 * KIBI

    @property
    def shared_memory(self) -> int:
        """Returns bytes of shared memory that one block can have; on NVIDIA the driver keeps 1 KiB for each."""
        return self.total_shared_memory - (KIBI if self.vendor == "nvidia" else 0)

    @property
    def capability(self) -> int:
        """Returns the number in NVIDIA's name of the chip: 90 for `sm_90`; 0 for other vendors."""
        return int(self.target[3:]) if self.vendor == "nvidia" else 0

    @property
    def vendor(self) -> Literal["nvidia", "amd"]:
        """Returns the vendor of the chip."""
        return "nvidia" if self.target.startswith("sm_") else "amd"


@dataclasses.dataclass(frozen=True)
class Tpu:
    """One kind of TPU, as JAX shows it: a device of v7x is one of the two cores of a chip.

    Attributes:
        name: Its short name.
        kind: JAX's `device_kind`.
        clock_hz: Cycles a second: `flops` over the operations a cycle of the matrix units.
        flops: Dense bfloat16 operations per second of a device.
        bandwidth: HBM bytes per second of a device.
        link_bandwidth: Bytes a second that a link between chips takes in one direction: the vendor's figure for a chip,
            which is of both directions, over two and over its links (four in a plane, six in space).
        mxus: Matrix units of a core.
        vmem: VMEM bytes of a core.
        cores: Cores that share the bandwidth; a kernel runs on all of them.
    """

    name: str
    kind: str
    clock_hz: float
    flops: float
    bandwidth: float
    link_bandwidth: float
    mxus: int
    vmem: int
    cores: int = 1

    @property
    def core_bandwidth(self) -> float:
        """Returns HBM bytes per second that one core gets while all of them copy."""
        return self.bandwidth / self.cores


_GPU_ROWS = (
    # target, product, architecture, multiprocessors, KiB of shared memory of each, MiB of L2, bytes per second
    Gpu("sm_80", "A100", "ampere", 108, 164 * KIBI, 40 * MEBI, 2039e9),
    Gpu("sm_86", "RTX A6000", "ampere", 84, 100 * KIBI, 6 * MEBI, 768e9),
    Gpu("sm_87", "Jetson AGX Orin", "ampere", 16, 164 * KIBI, 4 * MEBI, 204.8e9),
    Gpu("sm_89", "RTX 6000 Ada", "ada", 142, 100 * KIBI, 96 * MEBI, 960e9),
    Gpu("sm_90", "H200", "hopper", 132, 228 * KIBI, 50 * MEBI, 4800e9),
    Gpu("sm_100", "B200", "blackwell", 148, 228 * KIBI, 126 * MEBI, 8000e9),
    Gpu("sm_103", "B300", "blackwell", 148, 228 * KIBI, 126 * MEBI, 8000e9),
    # An RTX 5090 has 170 of the die's 192 multiprocessors, and 96 MiB of its L2.
    Gpu("sm_120", "RTX PRO 6000 Blackwell", "ada", 188, 100 * KIBI, 128 * MEBI, 1792e9),
    # Registers are vector registers: of 64 lanes, in 32-bit words a lane.
    Gpu("gfx942", "MI300X", "cdna3", 304, 64 * KIBI, 32 * MEBI, 5300e9, registers=128 * KIBI),
)
GPUS = {gpu.target: gpu for gpu in _GPU_ROWS}
"""GPUs by target."""

_TPU_ROWS = (
    # name, kind, clock, operations, bytes of HBM and of a link a second, matrix units and VMEM of a core, cores
    Tpu("v5e", "TPU v5 lite", 1.50e9, 197e12, 819e9, 400e9 / 2 / 4, 4, 128 * MEBI),
    Tpu("v5p", "TPU v5", 1.75e9, 459e12, 2765e9, 1200e9 / 2 / 6, 4, 64 * MEBI, cores=2),
    Tpu("v6e", "TPU v6 lite", 1.75e9, 918e12, 1640e9, 800e9 / 2 / 4, 2, 128 * MEBI),
    Tpu("v7x", "TPU7x", 2.20e9, 2307e12 / 2, 7380e9 / 2, 1200e9 / 2 / 6, 2, 64 * MEBI),
)
TPUS = {tpu.name: tpu for tpu in _TPU_ROWS}
"""TPUs by short name."""


def gpu_named(target: str) -> Gpu:
    """Returns the GPU that compilers call by this name.

    Raises:
        ValueError: The name is not in the table of chips.
    """
    if target not in GPUS:
        raise ValueError(f"chip: got {target!r}, wants one of {', '.join(GPUS)}")
    return GPUS[target]


def gpu_of(device: DeviceInfo) -> Gpu:
    """Returns the GPU of a device. For a device that is not in the table, returns the newest GPU of its vendor that is
    not newer than the device.

    A CPU, where interpreters run, counts as Hopper: it has no limits of its own.
    """
    if device.platform == "cpu":
        return GPUS["sm_90"]
    if device.vendor == "amd":
        return GPUS["gfx942"]
    capability = round((device.compute_capability or 8.6) * 10)
    known = sorted((x for x in GPUS.values() if x.vendor == "nvidia"), key=lambda gpu: gpu.capability)
    return next((gpu for gpu in reversed(known) if gpu.capability <= capability), known[0])


def tpu_of(device: DeviceInfo) -> Tpu:
    """Returns the TPU of a device; v5p where it is not in the table."""
    return next((tpu for tpu in TPUS.values() if tpu.kind == device.kind), TPUS["v5p"])
