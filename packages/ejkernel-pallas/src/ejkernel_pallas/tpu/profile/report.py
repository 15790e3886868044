"""What a profile says: predicted time and what it is made of."""

import dataclasses
from collections.abc import Mapping

from ejkernel_pallas.tpu.profile.bundles import Utilisation
from ejkernel_pallas.tpu.profile.chips import Chip, chip

FILL, SPILL = "VLOAD:FILL", "VSTORE:SPILL"
TO_ICI, FROM_ICI = "_to_ici", "ici_to_"
"""What kinds of copies have in their names that go to another device, and that come from one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of a kernel's schedule.

    Attributes:
        start: First bundle.
        end: Last bundle, delay slots included.
        depth: Loops that it is in, itself included.
        trips: How often its first bundle was entered, over the whole run.
        slots: Share of each kind of slot that is in use, over its bundles once.
        fills: Vector registers that an iteration reloads from where they were spilled.
        spills: Vector registers that it spills.
    """

    start: int
    end: int
    depth: int
    trips: int
    slots: Mapping[str, float]
    fills: int
    spills: int

    @property
    def bundles(self) -> int:
        """Returns bundles in it, inner loops once."""
        return self.end - self.start + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came out of running a kernel's schedule once, on one core.

    Attributes:
        complete: False where the limit on time was reached, so that all counts are too low.
        cycles: From start to end.
        compute_cycles: Of these, those that are not spent waiting for copies.
        waited_cycles: Cycles spent waiting for copies.
        mxu_cycles: Cycles for which products keep the matrix units, divided among them.
        blocks: How often each basic block was entered, by its first bundle.
        issues: How often each bundle was issued.
        copied: Bytes by kind of copy, such as `hbm_to_vmem`.
        copies: Copies by kind.
        unknown: Reads of scalar memory whose value is not known, by allocation or operand.
    """

    complete: bool
    cycles: float
    compute_cycles: int
    waited_cycles: float
    mxu_cycles: float
    blocks: Mapping[int, int]
    issues: Mapping[int, int]
    copied: Mapping[str, int]
    copies: Mapping[str, int]
    unknown: Mapping[str, int]

    @property
    def hbm_read(self) -> int:
        """Returns bytes out of HBM."""
        return sum(size for kind, size in self.copied.items() if kind.startswith("hbm_to"))

    @property
    def hbm_written(self) -> int:
        """Returns bytes into HBM."""
        return sum(size for kind, size in self.copied.items() if kind.endswith("to_hbm"))

    @property
    def sent(self) -> int:
        """Returns bytes to other devices."""
        return sum(size for kind, size in self.copied.items() if kind.endswith(TO_ICI))

    @property
    def bundles(self) -> int:
        """Returns bundles issued."""
        return sum(self.issues.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReport:
    """The profile of one kernel.

    Attributes:
        name: What XLA calls it.
        target: Name of the chip.
        grid: Its grid, innermost last; a bound that is not static is text. Empty where no `pallas_call` was found.
        utilisation: Slots in use, bundle by bundle.
        loops: Its loops, outer before inner.
        vmem_bytes: Bytes that it keeps in VMEM, windows of operands included.
        known: Numbers of the scalar operands whose values the simulation had.
        simulation: What running the schedule gave.
    """

    name: str
    target: str
    grid: tuple[int | str, ...]
    utilisation: Utilisation
    loops: tuple[Loop, ...]
    vmem_bytes: int
    known: tuple[int, ...]
    simulation: Simulation

    @property
    def chip(self) -> Chip:
        """Returns what it was compiled for."""
        return chip(self.target)

    @property
    def bundles(self) -> int:
        """Returns bundles in its schedule."""
        return len(self.utilisation.used)

    @property
    def compute_seconds(self) -> float:
        """Returns time without waiting for copies."""
        return self.simulation.compute_cycles / self.chip.clock

    @property
    def memory_seconds(self) -> float:
        """Returns time that the copies take of HBM, if nothing else does."""
        return (self.simulation.hbm_read + self.simulation.hbm_written) / self.chip.core_bandwidth

    @property
    def link_seconds(self) -> float:
        """Returns time that copies to another device take of one link between chips."""
        return self.simulation.sent / self.chip.link_bandwidth

    @property
    def seconds(self) -> float:
        """Returns predicted time."""
        return max(self.simulation.cycles / self.chip.clock, self.memory_seconds, self.link_seconds)

    @property
    def mxu(self) -> float:
        """Returns share of the time for which the matrix units are busy."""
        return self.simulation.mxu_cycles / max(1.0, self.simulation.cycles)

    @property
    def slots(self) -> dict[str, float]:
        """Returns share of each kind of slot that is in use, over the bundles issued."""
        return self.utilisation.shares(self.simulation.issues)

    @property
    def fills(self) -> int:
        """Returns vector registers reloaded from where they were spilled, over the whole run."""
        return self.utilisation.total(FILL, self.simulation.issues)

    @property
    def spills(self) -> int:
        """Returns vector registers spilled, over the whole run."""
        return self.utilisation.total(SPILL, self.simulation.issues)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The profile of a case: its kernels, without what XLA does around them.

    Attributes:
        label: What the case is called.
        target: Name of the chip.
        kernels: In the order of the compiled program.
        flops: Useful operations of the case; None where unknown.
        bytes: What any kernel has to copy to and from HBM; None where unknown.
        lower_seconds: What tracing and lowering took.
        compile_seconds: What libtpu took.
        error: Why there is no profile; None where there is one.
    """

    label: str
    target: str
    kernels: tuple[KernelReport, ...] = ()
    flops: float | None = None
    bytes: float | None = None
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    error: str | None = None

    @property
    def chip(self) -> Chip:
        """Returns what it was compiled for."""
        return chip(self.target)

    @property
    def seconds(self) -> float:
        """Returns predicted time of all kernels together."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def mfu(self) -> float | None:
        """Returns useful operations over those that the device could have done; None where their number is unknown."""
        return self.flops / self.seconds / self.chip.flops if self.flops and self.seconds else None

    @property
    def roofline_seconds(self) -> float | None:
        """The time that no kernel with these copies and these useful operations can beat; None without operations."""
        if not self.flops:
            return None
        return max(self.flops / self.chip.flops, sum(kernel.memory_seconds for kernel in self.kernels))

    @property
    def bound_seconds(self) -> float | None:
        """Returns the time that no kernel at all can beat on the device; None where the work is unknown."""
        if self.flops is None or self.bytes is None:
            return None
        return max(self.flops / self.chip.flops, self.bytes / self.chip.bandwidth)
