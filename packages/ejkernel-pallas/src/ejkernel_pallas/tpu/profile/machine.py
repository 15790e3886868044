"""The state that a kernel's scalar code acts on: scalar memory, semaphores, and copies that share one HBM queue."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from ejkernel_pallas.tpu.profile.chips import Chip
from ejkernel_pallas.tpu.profile.report import FROM_ICI_PREFIX, TO_ICI_SUFFIX

GRANULE_BYTES = 32  # bytes per granule, the unit in which copies are counted
ALLOCATION_ADDRESS_STRIDE = (
    1 << 40
)  # an address is a multiple of this plus an offset, so that addresses and integers can be told apart
_FIRST_OPERAND_ALLOCATION = 1 << 20
_LOCAL_COPY_LATENCY = 100  # cycles, of copies between memories of a core; assumed, as is their bandwidth
_LOCAL_COPY_BANDWIDTH = 256.0  # bytes per cycle
_REMOTE_COPY_FLAG = 1 << 14  # set in the word that identifies a copy's target device if that is another device
_SEMAPHORE_NUMBER_MASK = (1 << 13) - 1  # mask of the semaphore's number; the bits above it identify its device


def operand_address(operand_index: int) -> int:
    """Returns the address where an operand of the kernel starts."""
    return ALLOCATION_ADDRESS_STRIDE * (_FIRST_OPERAND_ALLOCATION + operand_index)


def wrap_to_int32(value: int) -> int:
    """Returns an integer wrapped to 32 bits with a sign; addresses stay unchanged."""
    if -0x80000000 <= value < 0x80000000 or value >= ALLOCATION_ADDRESS_STRIDE:
        return value
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def multiply(first: int, second: int) -> int:
    """Returns the lower 32 bits of a product, with a sign, so that the result is not mistaken for an address."""
    return wrap_to_int32(first * second & 0xFFFFFFFF)


def multiply_high(first: int, second: int) -> int:
    """Returns the upper 32 bits of an unsigned product, which divisions by constants use."""
    return wrap_to_int32((first & 0xFFFFFFFF) * (second & 0xFFFFFFFF) >> 32)


def shift_left(value: int, count: int) -> int:
    """Shifts an integer left; addresses stay unchanged, since their unit does not matter here."""
    return value if value >= ALLOCATION_ADDRESS_STRIDE else wrap_to_int32(value << (count & 31))


def shift_right(value: int, count: int) -> int:
    """Shifts an integer right, unsigned; addresses stay unchanged."""
    return value if value >= ALLOCATION_ADDRESS_STRIDE else (value & 0xFFFFFFFF) >> (count & 31)


@dataclasses.dataclass
class _PendingCopy:
    """A copy whose semaphore has not been waited for: the cycle when it arrives, and granules not yet waited for."""

    cycle: float
    granules: int


class SimulatedCore:
    """The state of a core while its kernel runs.

    Attributes:
        t: Cycles since the kernel began.
        memory: Words of scalar memory by address.
        copied: Bytes by kind of copy, such as `hbm_to_vmem`.
        copies: The number of copies by kind.
        waited: Cycles spent waiting for copies.
        unknown: The number of reads of unwritten scalar memory, by allocation or operand.
    """

    def __init__(self, chip: Chip, operands: Mapping[int, Sequence[int]]) -> None:
        self.t = 0.0
        self.memory: dict[int, int] = {}
        self.copied = collections.Counter[str]()
        self.copies = collections.Counter[str]()
        self.waited = 0.0
        self.unknown = collections.Counter[int]()
        self._latencies = chip.latencies
        self._words_per_hbm_address = chip.words_per_hbm_address
        self._bytes_per_cycle = chip.core_bandwidth / chip.clock_hz
        self._hbm_free = 0.0
        self._link_bytes_per_cycle = chip.link_bandwidth / chip.clock_hz
        self._link_free_by_target = collections.defaultdict[int, float](float)
        self.bytes_by_target = collections.Counter[int]()
        self._arrivals = collections.defaultdict[int, collections.deque[_PendingCopy]](collections.deque)
        self._operands = operands
        for number, words in operands.items():
            self._write_words(operand_address(number), words)

    def load_word(self, address: int) -> int:
        """Reads a word. If its value is not known, it returns 0 and counts the read in `unknown`."""
        value = self.memory.get(address)
        if value is None:
            self.unknown[address // ALLOCATION_ADDRESS_STRIDE] += 1
            return 0
        return value

    def scalar_operand(self, number: int) -> int:
        """Returns the value of an operand that is a single number."""
        return self.load_word(operand_address(number))

    def start_copy(
        self, cycle: float, copy_kind: str, granules: int, semaphore: int, source_address: int, target_address: int
    ) -> None:
        """Starts a copy. Copies from and to HBM are executed one after another, at its bandwidth."""
        size = granules * GRANULE_BYTES
        self._count_copy(copy_kind, size)
        if "hbm" in copy_kind:
            crossings = 2 if copy_kind == "hbm_to_hbm" else 1
            self._hbm_free = max(cycle, self._hbm_free) + crossings * size / self._bytes_per_cycle
            reads = copy_kind.startswith("hbm_to")
            done = self._hbm_free + (self._latencies.dma_read_latency if reads else self._latencies.dma_write_latency)
        else:
            done = cycle + _LOCAL_COPY_LATENCY + size / _LOCAL_COPY_BANDWIDTH
        self._arrivals[semaphore].append(_PendingCopy(done, granules))
        if copy_kind.endswith("_to_smem"):
            words = self._operands.get(source_address // ALLOCATION_ADDRESS_STRIDE - _FIRST_OPERAND_ALLOCATION, ())
            first = source_address % ALLOCATION_ADDRESS_STRIDE * self._words_per_hbm_address
            self._write_words(target_address, words[first : first + size // 4])

    def start_copy_between(
        self,
        cycle: float,
        copy_kind: str,
        granules: int,
        source_semaphore: int,
        target_semaphore: int,
        target_device_word: int,
    ) -> None:
        """Starts a copy between any two memories, possibly of two devices, with a semaphore at either end.

        Neighbours are assumed to run in step: when a copy to one has left, the copy from the other has arrived. Copies
        to one device share a link, and those to another have their own. The HBM traffic of both ends is counted, but
        does not delay other copies.
        """
        if not target_device_word & _REMOTE_COPY_FLAG:
            self.start_copy(cycle, copy_kind, granules, target_semaphore, 0, 0)
            return
        size, (here, _, there) = granules * GRANULE_BYTES, copy_kind.partition("_to_")
        self._count_copy(f"{here}{TO_ICI_SUFFIX}", size)
        self._count_copy(f"{FROM_ICI_PREFIX}{there}", size)
        link_free = max(cycle, self._link_free_by_target[target_device_word]) + size / self._link_bytes_per_cycle
        self._link_free_by_target[target_device_word] = link_free
        self.bytes_by_target[target_device_word] += size
        done = link_free + self._latencies.dma_write_latency
        for semaphore in (source_semaphore, target_semaphore):
            slot = semaphore // ALLOCATION_ADDRESS_STRIDE * ALLOCATION_ADDRESS_STRIDE + (
                semaphore % ALLOCATION_ADDRESS_STRIDE & _SEMAPHORE_NUMBER_MASK
            )
            self._arrivals[slot].append(_PendingCopy(done, granules))

    def _count_copy(self, copy_kind: str, size: int) -> None:
        self.copied[copy_kind] += size
        self.copies[copy_kind] += 1

    def wait(self, cycle: float, semaphore: int, granules: int) -> float:
        """Waits until copies have brought `granules` granules; returns the number of cycles waited."""
        arrivals, done = self._arrivals[semaphore], cycle
        while granules > 0 and arrivals:
            first = arrivals[0]
            done = max(done, first.cycle)
            taken = min(granules, first.granules)
            granules -= taken
            first.granules -= taken
            if not first.granules:
                arrivals.popleft()
        self.waited += done - cycle
        return done - cycle

    def _write_words(self, address: int, words: Sequence[int]) -> None:
        for offset, word in enumerate(words):
            self.memory[address + offset] = word

    def unknown_reads(self, allocations: Mapping[str, int]) -> dict[str, int]:
        """Returns how often unwritten words were read, by name."""
        names = {number: name for name, number in allocations.items()}
        return {
            names.get(
                place,
                f"operand {place - _FIRST_OPERAND_ALLOCATION}" if place >= _FIRST_OPERAND_ALLOCATION else str(place),
            ): count
            for place, count in self.unknown.items()
        }
