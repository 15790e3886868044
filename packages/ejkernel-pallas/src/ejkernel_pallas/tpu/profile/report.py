"""The results of a profile: predicted time and its components."""

import dataclasses
from collections.abc import Mapping

from ejkernel_pallas.tpu.profile.bundles import Utilisation
from ejkernel_pallas.tpu.profile.chips import Chip, chip

FILL_SLOT, SPILL_SLOT = "VLOAD:FILL", "VSTORE:SPILL"
TO_ICI_SUFFIX, FROM_ICI_PREFIX = "_to_ici", "ici_to_"
"""Parts of the names of copy kinds: of those that go to another device, and of those that come from one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of a kernel's schedule.

    Attributes:
        start: The first bundle.
        end: The last bundle, delay slots included.
        depth: The number of loops that it is in, itself included.
        num_trips: How often its first bundle was entered during the whole run.
        slots: Share of each kind of slot that is in use, with each of its bundles counted once.
        fills: Spilled vector registers that an iteration reloads.
        spills: Vector registers that an iteration spills.
    """

    start: int
    end: int
    depth: int
    num_trips: int
    slots: Mapping[str, float]
    fills: int
    spills: int

    @property
    def bundles(self) -> int:
        """Returns the number of bundles in it, with inner loops counted once."""
        return self.end - self.start + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of simulating a kernel's schedule once, on one core.

    Attributes:
        is_complete: False if the time limit was reached, so that all counts are too low.
        cycles: Cycles from start to end.
        compute_cycles: Cycles that are not spent waiting for copies.
        waited_cycles: Cycles spent waiting for copies.
        mxu_cycles: Cycles for which products occupy the matrix units, divided by the number of units.
        entries_per_block: How often each basic block was entered, by its first bundle.
        issues_per_bundle: How often each bundle was issued.
        copied_bytes_by_kind: Bytes by kind of copy, such as `hbm_to_vmem`.
        num_copies_by_kind: The number of copies by kind.
        busiest_link_bytes: Bytes sent to the device that gets most: each has a link of its own.
        unknown_reads: The number of reads of scalar memory with unknown values, by allocation or operand.
    """

    is_complete: bool
    cycles: float
    compute_cycles: int
    waited_cycles: float
    mxu_cycles: float
    entries_per_block: Mapping[int, int]
    issues_per_bundle: Mapping[int, int]
    copied_bytes_by_kind: Mapping[str, int]
    num_copies_by_kind: Mapping[str, int]
    busiest_link_bytes: int
    unknown_reads: Mapping[str, int]

    @property
    def hbm_read_bytes(self) -> int:
        """Returns the bytes read from HBM."""
        return sum(size for kind, size in self.copied_bytes_by_kind.items() if kind.startswith("hbm_to"))

    @property
    def hbm_written_bytes(self) -> int:
        """Returns the bytes written to HBM."""
        return sum(size for kind, size in self.copied_bytes_by_kind.items() if kind.endswith("to_hbm"))

    @property
    def bytes_sent_to_devices(self) -> int:
        """Returns the bytes sent to other devices."""
        return sum(size for kind, size in self.copied_bytes_by_kind.items() if kind.endswith(TO_ICI_SUFFIX))

    @property
    def bundles(self) -> int:
        """Returns the number of bundles issued."""
        return sum(self.issues_per_bundle.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReport:
    """The profile of one kernel.

    Attributes:
        name: The kernel's name in XLA.
        target: Name of the chip.
        grid: The grid, innermost axis last; a bound that is not static is text. Empty if no `pallas_call` was found.
        utilisation: Slots in use, per bundle.
        loops: The loops, outer before inner.
        vmem_bytes: Bytes of VMEM that it allocates, windows of operands included.
        known_operand_indices: Indices of the scalar operands whose values the simulation had.
        simulation: The result of simulating the schedule.
    """

    name: str
    target: str
    grid: tuple[int | str, ...]
    utilisation: Utilisation
    loops: tuple[Loop, ...]
    vmem_bytes: int
    known_operand_indices: tuple[int, ...]
    simulation: Simulation

    @property
    def chip(self) -> Chip:
        """Returns the chip that the kernel was compiled for."""
        return chip(self.target)

    @property
    def bundles(self) -> int:
        """Returns the number of bundles in its schedule."""
        return len(self.utilisation.used_slots)

    @property
    def compute_seconds(self) -> float:
        """Returns the time without waiting for copies."""
        return self.simulation.compute_cycles / self.chip.clock_hz

    @property
    def memory_seconds(self) -> float:
        """Returns the time that the copies occupy HBM, if nothing else does."""
        return (self.simulation.hbm_read_bytes + self.simulation.hbm_written_bytes) / self.chip.core_bandwidth

    @property
    def link_seconds(self) -> float:
        """Returns the time that copies to other devices occupy the busiest link between chips."""
        return self.simulation.busiest_link_bytes / self.chip.link_bandwidth

    @property
    def seconds(self) -> float:
        """Returns the predicted time."""
        return max(self.simulation.cycles / self.chip.clock_hz, self.memory_seconds, self.link_seconds)

    @property
    def mxu(self) -> float:
        """Returns the share of the time for which the matrix units are busy."""
        return self.simulation.mxu_cycles / max(1.0, self.simulation.cycles)

    @property
    def slots(self) -> dict[str, float]:
        """Returns the share of each kind of slot that is in use, over the bundles issued."""
        return self.utilisation.slot_shares(self.simulation.issues_per_bundle)

    @property
    def fills(self) -> int:
        """Returns the number of spilled vector registers that are reloaded during the whole run."""
        return self.utilisation.count_slot_uses(FILL_SLOT, self.simulation.issues_per_bundle)

    @property
    def spills(self) -> int:
        """Returns the number of vector registers that are spilled during the whole run."""
        return self.utilisation.count_slot_uses(SPILL_SLOT, self.simulation.issues_per_bundle)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The profile of a case: its kernels, without XLA's computation around them.

    Attributes:
        label: The name of the case.
        target: Name of the chip.
        kernels: The kernels, in the order of the compiled program.
        flops: The number of useful operations of the case; None if unknown.
        min_hbm_bytes: Bytes that any kernel has to copy from and to HBM; None if unknown.
        lower_seconds: Time of tracing and lowering.
        compile_seconds: Time of libtpu's compilation.
        error: Why there is no profile; None if there is one.
    """

    label: str
    target: str
    kernels: tuple[KernelReport, ...] = ()
    flops: float | None = None
    min_hbm_bytes: float | None = None
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    error: str | None = None

    @property
    def chip(self) -> Chip:
        """Returns the chip that the kernels were compiled for."""
        return chip(self.target)

    @property
    def seconds(self) -> float:
        """Returns the predicted time of all kernels together."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def mfu(self) -> float | None:
        """Returns useful operations divided by those that the device could have executed; None if their number is
        unknown.
        """
        return self.flops / self.seconds / self.chip.flops if self.flops and self.seconds else None

    @property
    def roofline_seconds(self) -> float | None:
        """Returns the shortest time that is possible with these copies and useful operations; None without
        operations.
        """
        if not self.flops:
            return None
        return max(self.flops / self.chip.flops, sum(kernel.memory_seconds for kernel in self.kernels))

    @property
    def min_seconds_of_any_kernel(self) -> float | None:
        """Returns the shortest time that is possible for any kernel on the device; None if the work is unknown."""
        if self.flops is None or self.min_hbm_bytes is None:
            return None
        return max(self.flops / self.chip.flops, self.min_hbm_bytes / self.chip.bandwidth)
