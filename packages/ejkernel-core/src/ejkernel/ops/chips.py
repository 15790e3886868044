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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a kernel can have of a GPU.

    Attributes:
        target: What compilers call it: `sm_90`, `gfx942`.
        product: The product that the figures are of.
        architecture: Its generation. Consumer Blackwell (sm_120) has `ada`'s matrix instructions, and counts as that.
        multiprocessors: How many it has.
        shared_memory: Bytes of shared memory that one thread block can have.
        total_shared_memory: Bytes of a multiprocessor for its resident blocks; each takes 1 KiB more on NVIDIA.
        registers: 32-bit registers of a multiprocessor, which its resident blocks share.
        l2: Bytes of the L2 cache, of all its parts together.
        bandwidth: Bytes a second of its memory.
    """

    target: str
    product: str
    architecture: Architecture
    multiprocessors: int
    shared_memory: int
    total_shared_memory: int
    registers: int = 64 * KIBI
    l2: int
    bandwidth: float

    @property
    def capability(self) -> int:
        """The number in NVIDIA's name: 90 for `sm_90`; 0 for another vendor's."""
        return int(self.target[3:]) if self.vendor == "nvidia" else 0

    @property
    def vendor(self) -> Literal["nvidia", "amd"]:
        """Who makes it."""
        return "nvidia" if self.target.startswith("sm_") else "amd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """One kind of TPU, as JAX shows it: a device of v7x is one of the two cores of a chip.

    Attributes:
        name: Its short name.
        kind: JAX's `device_kind`.
        clock: Cycles a second: `flops` over the operations a cycle of the matrix units.
        flops: Dense bfloat16 operations a second of a device.
        bandwidth: HBM bytes a second of a device.
        link_bandwidth: Bytes a second that a link between chips takes in one direction: the vendor's figure for a chip,
            which is of both directions, over two and over its links (four in a plane, six in space).
        cores: Cores that share the bandwidth; a kernel runs on all of them.
        mxus: Matrix units of a core.
        vmem: VMEM bytes of a core.
    """

    name: str
    kind: str
    clock: float
    flops: float
    bandwidth: float
    link_bandwidth: float
    cores: int = 1
    mxus: int
    vmem: int

    @property
    def core_bandwidth(self) -> float:
        """HBM bytes a second that one core gets while all of them copy."""
        return self.bandwidth / self.cores


GPUS = {
    gpu.target: gpu
    for gpu in (
        Gpu(
            target="sm_80", product="A100", architecture="ampere", multiprocessors=108, shared_memory=163 * KIBI,
            total_shared_memory=164 * KIBI, l2=40 * MEBI, bandwidth=2039e9,
        ),
        Gpu(
            target="sm_86", product="RTX A6000", architecture="ampere", multiprocessors=84, shared_memory=99 * KIBI,
            total_shared_memory=100 * KIBI, l2=6 * MEBI, bandwidth=768e9,
        ),
        Gpu(
            target="sm_87", product="Jetson AGX Orin", architecture="ampere", multiprocessors=16,
            shared_memory=163 * KIBI, total_shared_memory=164 * KIBI, l2=4 * MEBI, bandwidth=204.8e9,
        ),
        Gpu(
            target="sm_89", product="RTX 6000 Ada", architecture="ada", multiprocessors=142, shared_memory=99 * KIBI,
            total_shared_memory=100 * KIBI, l2=96 * MEBI, bandwidth=960e9,
        ),
        Gpu(
            target="sm_90", product="H200", architecture="hopper", multiprocessors=132, shared_memory=227 * KIBI,
            total_shared_memory=228 * KIBI, l2=50 * MEBI, bandwidth=4800e9,
        ),
        Gpu(
            target="sm_100", product="B200", architecture="blackwell", multiprocessors=148, shared_memory=227 * KIBI,
            total_shared_memory=228 * KIBI, l2=126 * MEBI, bandwidth=8000e9,
        ),
        Gpu(
            target="sm_103", product="B300", architecture="blackwell", multiprocessors=148, shared_memory=227 * KIBI,
            total_shared_memory=228 * KIBI, l2=126 * MEBI, bandwidth=8000e9,
        ),
        Gpu(  # An RTX 5090 has 170 of the chip's 192 multiprocessors and 96 MiB of its L2.
            target="sm_120", product="RTX PRO 6000 Blackwell", architecture="ada", multiprocessors=188,
            shared_memory=99 * KIBI, total_shared_memory=100 * KIBI, l2=128 * MEBI, bandwidth=1792e9,
        ),
        Gpu(  # Vector registers: 64 lanes, in 32-bit words a lane.
            target="gfx942", product="MI300X", architecture="cdna3", multiprocessors=304, shared_memory=64 * KIBI,
            total_shared_memory=64 * KIBI, registers=128 * KIBI, l2=32 * MEBI, bandwidth=5300e9,
        ),
    )
}  # fmt: skip
"""GPUs by target."""

TPUS = {
    tpu.name: tpu
    for tpu in (
        Tpu(
            name="v5e", kind="TPU v5 lite", clock=1.50e9, flops=197e12, bandwidth=819e9, link_bandwidth=400e9 / 2 / 4,
            mxus=4, vmem=128 * MEBI,
        ),
        Tpu(
            name="v5p", kind="TPU v5", clock=1.75e9, flops=459e12, bandwidth=2765e9, link_bandwidth=1200e9 / 2 / 6,
            cores=2, mxus=4, vmem=64 * MEBI,
        ),
        Tpu(
            name="v6e", kind="TPU v6 lite", clock=1.75e9, flops=918e12, bandwidth=1640e9, link_bandwidth=800e9 / 2 / 4,
            mxus=2, vmem=128 * MEBI,
        ),
        Tpu(
            name="v7x", kind="TPU7x", clock=2.20e9, flops=2307e12 / 2, bandwidth=7380e9 / 2,
            link_bandwidth=1200e9 / 2 / 6, mxus=2, vmem=64 * MEBI,
        ),
    )
}  # fmt: skip
"""TPUs by short name."""


def gpu_named(target: str) -> Gpu:
    """Returns the GPU that compilers call so.

    Raises:
        ValueError: It is not in the table.
    """
    if target not in GPUS:
        raise ValueError(f"chip: got {target!r}, wants one of {', '.join(GPUS)}")
    return GPUS[target]


def gpu_of(device: DeviceInfo) -> Gpu:
    """Returns the GPU of a device; of one that is not in the table, the newest of its vendor that is not newer.

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
