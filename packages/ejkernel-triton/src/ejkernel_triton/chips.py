"""The table of GPUs that the kernels support, for heuristics and for compiling ahead of time.

Sources: NVIDIA's CUDA C++ programming guide, table "technical specifications per compute capability", and its data
sheets; AMD's CDNA 3 instruction set guide and data sheets.
"""

import dataclasses
from typing import Literal

from ejkernel.ops.device import DeviceInfo

KIBI = 1024
Architecture = Literal["ampere", "ada", "hopper", "blackwell", "cdna3"]


@dataclasses.dataclass(frozen=True)
class Chip:
    """The limits of a chip that kernels depend on.

    Attributes:
        target: The name of Triton's target: `sm_90`, `gfx942`.
        vendor: The manufacturer.
        architecture: The generation. Consumer Blackwell (sm_120) has `ada`'s matrix instructions, and counts as that.
        shared_memory: Bytes of shared memory that one program can use.
        registers: 32-bit registers of a multiprocessor, which its resident programs share.
        multiprocessors: Number in the largest product on sale; a grid that covers them has no tail wave.
    """

    target: str
    vendor: Literal["nvidia", "amd"]
    architecture: Architecture
    shared_memory: int
    registers: int
    multiprocessors: int

    @property
    def capability(self) -> int:
        """Returns the number in NVIDIA's name: 90 for `sm_90`; 0 for other vendors."""
        return int(self.target[3:]) if self.vendor == "nvidia" else 0


CHIPS = {
    chip.target: chip
    for chip in (
        Chip("sm_80", "nvidia", "ampere", 163 * KIBI, 64 * KIBI, 108),
        Chip("sm_86", "nvidia", "ampere", 99 * KIBI, 64 * KIBI, 84),
        Chip("sm_87", "nvidia", "ampere", 163 * KIBI, 64 * KIBI, 16),
        Chip("sm_89", "nvidia", "ada", 99 * KIBI, 64 * KIBI, 142),
        Chip("sm_90", "nvidia", "hopper", 227 * KIBI, 64 * KIBI, 132),
        Chip("sm_100", "nvidia", "blackwell", 227 * KIBI, 64 * KIBI, 148),
        Chip("sm_103", "nvidia", "blackwell", 227 * KIBI, 64 * KIBI, 148),
        Chip("sm_120", "nvidia", "ada", 99 * KIBI, 64 * KIBI, 188),
        Chip("gfx942", "amd", "cdna3", 64 * KIBI, 128 * KIBI, 304),
    )
}
"""Maps Triton's names to chips. AMD's registers are vector registers of 64 lanes, counted in 32-bit words per lane."""


def named(target: str) -> Chip:
    """Returns the chip with Triton's name `target`.

    Raises:
        ValueError: It is not in the table.
    """
    if target not in CHIPS:
        raise ValueError(f"chip: got {target!r}, wants one of {', '.join(CHIPS)}")
    return CHIPS[target]


def chip_of(device: DeviceInfo) -> Chip:
    """Returns the chip of a device; for one that is not in the table, the newest of its vendor that is not newer.

    A CPU, where Triton's interpreter runs, counts as the largest chip, since it has no limits.
    """
    if device.platform == "cpu":
        return CHIPS["sm_90"]
    if device.vendor == "amd":
        return CHIPS["gfx942"]
    capability = round((device.compute_capability or 8.6) * 10)
    known = sorted((x for x in CHIPS.values() if x.vendor == "nvidia"), key=lambda chip: chip.capability)
    return next((chip for chip in reversed(known) if chip.capability <= capability), known[0])
