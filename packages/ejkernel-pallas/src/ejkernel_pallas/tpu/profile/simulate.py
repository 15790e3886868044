"""Simulates a kernel's schedule: how often each bundle is issued, what is copied, and how long it takes."""

import collections
import time
from collections.abc import Mapping, Sequence

from ejkernel_pallas.tpu.profile.bundles import (
    Allocation,
    Bundle,
    Utilisation,
    parse_allocations,
    parse_bundles,
    parse_utilisation,
)
from ejkernel_pallas.tpu.profile.chips import Chip
from ejkernel_pallas.tpu.profile.flow import find_control_flow, find_loops
from ejkernel_pallas.tpu.profile.machine import SimulatedCore
from ejkernel_pallas.tpu.profile.report import FILL_SLOT, SPILL_SLOT, Loop, Simulation
from ejkernel_pallas.tpu.profile.scalar_code import ScalarCode
from ejkernel_pallas.tpu.profile.scheduler import (
    BlockTime,
    InstructionKind,
    RegistersPerInput,
    opcode_properties,
    time_block,
)

_TIME_CHECK_INTERVAL = 1 << 14  # blocks between checks of the time limit
# Words that are 0: identifiers of the simulated core and device, which are the first, and the null operand.
_ZERO_ALLOCATION_PURPOSES = ("core index", "chip ID", "partition id location", "replica id location", "null")


class CompiledKernel:
    """A kernel as scheduled by libtpu.

    Args:
        chip: The chip that it was compiled for.
        bundles: Text of its final bundles.
        utilisation: Text of their use of slots; empty if there is none.
        allocations: Text of its allocations; empty if there is none.
    """

    def __init__(self, chip: Chip, bundles: str, utilisation: str = "", allocations: str = "") -> None:
        self.chip = chip
        self.bundles: Sequence[Bundle] = parse_bundles(bundles)
        self.utilisation: Utilisation = parse_utilisation(utilisation)
        self.allocations: Sequence[Allocation] = parse_allocations(allocations)
        latencies = chip.latencies
        self.flow = find_control_flow(self.bundles, latencies.branch_delay_slots)
        registers_per_input = RegistersPerInput.of(self.bundles)
        self.times: dict[int, BlockTime] = {
            start: time_block(block, self.bundles, latencies, registers_per_input)
            for start, block in self.flow.blocks.items()
        }

    @property
    def vmem_bytes(self) -> int:
        """Returns the bytes of all allocations in VMEM."""
        return sum(allocation.size for allocation in self.allocations if allocation.memory_space == "vmem")

    def run(self, operands: Mapping[int, Sequence[int]], seconds: float = 120.0) -> Simulation:
        """Simulates the schedule on one core.

        Args:
            operands: Words of the operands whose values are known, by operand number, as returned by `pack_words`.
            seconds: The time limit.
        """
        scalar_code = ScalarCode(self.bundles, self.flow, self.times)
        core = SimulatedCore(self.chip, operands)
        for allocation in self.allocations:
            if allocation.purpose.endswith(_ZERO_ALLOCATION_PURPOSES):
                core.memory[scalar_code.symbols.allocation_address(allocation.name)] = 0
        blocks, complete = self._execute_blocks(scalar_code, core, seconds)
        issues = collections.Counter[int]()
        for start, count in blocks.items():
            block = self.flow.blocks[start]
            issues.update(dict.fromkeys(range(block.start, block.end), count))
        return Simulation(
            is_complete=complete,
            cycles=core.t,
            compute_cycles=sum(count * self.times[start].cycles for start, count in blocks.items()),
            waited_cycles=core.waited,
            mxu_cycles=self._mxu_cycles(issues),
            entries_per_block=dict(blocks),
            issues_per_bundle=dict(issues),
            copied_bytes_by_kind=dict(core.copied),
            num_copies_by_kind=dict(core.copies),
            busiest_link_bytes=max(core.bytes_by_target.values(), default=0),
            unknown_reads=core.unknown_reads(scalar_code.symbols.allocations),
        )

    def _execute_blocks(
        self, scalar_code: ScalarCode, core: SimulatedCore, seconds: float
    ) -> tuple[Mapping[int, int], bool]:
        """Returns how often each block runs, and whether the end was reached."""
        blocks = collections.Counter[int]()
        functions, memory, end = scalar_code.functions, core.memory, len(self.bundles)
        registers = [0] * len(scalar_code.symbols.registers)
        deadline, bundle, count = time.monotonic() + seconds, 0, 0
        while bundle < end:
            blocks[bundle] += 1
            count += 1
            if count % _TIME_CHECK_INTERVAL == 0 and time.monotonic() > deadline:
                return blocks, False
            bundle = functions[bundle](registers, core, memory)
        return blocks, True

    def _mxu_cycles(self, issues_per_bundle: Mapping[int, int]) -> float:
        latencies, cycles = self.chip.latencies, 0
        for k, count in issues_per_bundle.items():
            for instruction in self.bundles[k].instructions:
                properties = opcode_properties(instruction.opcode)
                if properties.kind is InstructionKind.MATMUL:
                    cycles += count * (
                        latencies.matmul_interval if properties.is_narrow else latencies.matmul_f32_interval
                    )
        return cycles / self.chip.mxus

    def loops(self, entries_per_block: Mapping[int, int]) -> tuple[Loop, ...]:
        """Returns its loops, outer before inner; `entries_per_block` has the number of times that each block was
        entered.
        """
        found = find_loops(self.bundles, self.flow)
        return tuple(
            Loop(
                start=span.start,
                end=span.end,
                depth=span.depth,
                num_trips=entries_per_block.get(span.start, 0),
                slots=self.utilisation.slot_shares(once := dict.fromkeys(range(span.start, span.end + 1), 1)),
                fills=self.utilisation.count_slot_uses(FILL_SLOT, once),
                spills=self.utilisation.count_slot_uses(SPILL_SLOT, once),
            )
            for span in found
        )
