"""Computes the time of a basic block: bundles are issued in order, and wait for busy units and for results."""

import collections
import dataclasses
import enum
import functools
import re
from collections.abc import Iterable, Sequence

from ejkernel_pallas.tpu.profile.bundles import REGISTER_PATTERN, Bundle, Instruction
from ejkernel_pallas.tpu.profile.chips import Latencies
from ejkernel_pallas.tpu.profile.flow import BasicBlock

_TRANSCENDENTAL_OPCODES = (
    "vexp", "vpow", "vrcp", "vrsqrt", "vtanh", "vlog", "verf", "vsigm", "vsin", "vcos", "vsqrt",
)  # fmt: skip
_NARROW_DTYPES = ("bf16", "s8", "f8")
_RESULT_BUFFER_SLOT_PATTERN = re.compile(r"mrb\[(\d+)\]")


class InstructionKind(enum.Enum):
    """The kinds of instructions that differ in time."""

    MATMUL = enum.auto()
    PUSH_WEIGHTS = enum.auto()
    OTHER_WEIGHT_INSTRUCTION = (
        enum.auto()
    )  # other instructions on the weight registers, which wait for them and delay nothing else
    POP_RESULT_QUEUE = enum.auto()  # results of the matrix unit are read in order ...
    POP_RESULT_BUFFER = enum.auto()  # ... or, on newer chips, by their number
    POP_TRANSPOSED = enum.auto()
    POP = enum.auto()
    REDUCE = enum.auto()
    TRANSPOSE = enum.auto()
    ROTATE = enum.auto()
    TRANSCENDENTAL = enum.auto()
    OTHER = enum.auto()


@dataclasses.dataclass(frozen=True)
class OpcodeProperties:
    """Properties of an opcode.

    Attributes:
        kind: The kind of instruction.
        unit: Index of the matrix or cross-lane unit.
        result_buffer_index: Index of its result in the result buffer; None if results are popped from a queue.
        results_per_push: Result registers per pushed register, before the correction for the chip.
        is_narrow: Whether its format has up to 16 bits.
        loads_weights: Whether it loads the weights that have been pushed.
        waits_for_cross_lane_unit: Whether it waits for the cross-lane unit.
        ends_transposition: Whether it is the last instruction of a transposition.
    """

    kind: InstructionKind
    unit: int = 0
    result_buffer_index: int | None = None
    results_per_push: int = 2
    is_narrow: bool = True
    loads_weights: bool = False
    waits_for_cross_lane_unit: bool = False
    ends_transposition: bool = False


@functools.cache
def opcode_properties(opcode: str) -> OpcodeProperties:
    """Returns the properties of an opcode."""
    kind = _matrix_instruction_kind(opcode) or _pop_instruction_kind(opcode) or _vector_instruction_kind(opcode)
    on_xlu = kind in (
        InstructionKind.REDUCE,
        InstructionKind.TRANSPOSE,
        InstructionKind.ROTATE,
        InstructionKind.POP_TRANSPOSED,
    )
    unit = re.search(r"xlu(\d)" if on_xlu else r"mxu(\d)", opcode)
    slot = _RESULT_BUFFER_SLOT_PATTERN.search(opcode)
    return OpcodeProperties(
        kind=kind,
        unit=int(unit[1]) if unit else 0,
        result_buffer_index=int(slot[1]) if slot else None,
        results_per_push=1 if ".f32" in opcode else 2,
        is_narrow=any(name in opcode for name in _NARROW_DTYPES),
        loads_weights="vlgmr" in opcode,
        waits_for_cross_lane_unit="xlu" in opcode,
        ends_transposition=".end" in opcode,
    )


def _matrix_instruction_kind(opcode: str) -> InstructionKind | None:
    if opcode.startswith("vmatprep"):  # it only stages data: the following product or push accounts for the time
        return InstructionKind.OTHER
    if opcode.startswith("vmatmul"):
        return InstructionKind.MATMUL
    if opcode.startswith("vmatpush"):
        return InstructionKind.PUSH_WEIGHTS
    return InstructionKind.OTHER_WEIGHT_INSTRUCTION if opcode.startswith("vmat") else None


def _pop_instruction_kind(opcode: str) -> InstructionKind | None:
    if not opcode.startswith("vpop"):
        return None
    if "mrf" in opcode:
        return InstructionKind.POP_RESULT_QUEUE
    if "mrb" in opcode:
        return InstructionKind.POP_RESULT_BUFFER
    return InstructionKind.POP_TRANSPOSED if ".trf" in opcode else InstructionKind.POP


def _vector_instruction_kind(opcode: str) -> InstructionKind:
    if ".xlane" in opcode:
        return InstructionKind.REDUCE
    if opcode.startswith("vxpose"):
        return InstructionKind.TRANSPOSE
    if "xlu" in opcode:
        return InstructionKind.ROTATE
    return InstructionKind.TRANSCENDENTAL if opcode.startswith(_TRANSCENDENTAL_OPCODES) else InstructionKind.OTHER


@dataclasses.dataclass(frozen=True)
class RegistersPerInput:
    """Result registers per input register of each unit, which depend on chip and dtype and are counted in a kernel.

    Attributes:
        popped_per_result: Registers popped from the queues of the matrix units, for each one expected.
        popped_per_transposed: Registers popped from the cross-lane units, for each one pushed.
    """

    popped_per_result: float
    popped_per_transposed: float

    @classmethod
    def of(cls, bundles: Sequence[Bundle]) -> "RegistersPerInput":
        """Counts the ratios over a whole kernel."""
        found = [opcode_properties(i.opcode) for bundle in bundles for i in bundle.instructions]
        counts = collections.Counter(w.kind for w in found)
        expected = sum(w.results_per_push for w in found if w.kind is InstructionKind.MATMUL)
        return cls(
            popped_per_result=counts[InstructionKind.POP_RESULT_QUEUE] / expected
            if counts[InstructionKind.POP_RESULT_QUEUE] and expected
            else 1.0,
            popped_per_transposed=counts[InstructionKind.POP_TRANSPOSED] / counts[InstructionKind.TRANSPOSE]
            if counts[InstructionKind.POP_TRANSPOSED] and counts[InstructionKind.TRANSPOSE]
            else 1.0,
        )

    def num_product_results(self, of: OpcodeProperties) -> int:
        """Returns the number of registers that a product puts into its queue."""
        return max(1, round(of.results_per_push * self.popped_per_result))


class Scoreboard:
    """The state of the units while a block is issued."""

    def __init__(self, latencies: Latencies, registers_per_input: RegistersPerInput, bundles: Iterable[Bundle]) -> None:
        self._latencies, self._registers_per_input = latencies, registers_per_input
        self._matrix_free = collections.Counter[int]()
        self._push_free = collections.Counter[int]()
        self._cross_lane_free = collections.Counter[int]()
        self._ready: dict[str | None, int] = {}
        self._queue = collections.defaultdict[int, collections.deque[int]](collections.deque)
        self._buffer: dict[tuple[int, int], int] = {}
        self._transposed = collections.defaultdict[int, collections.deque[int]](collections.deque)
        self._transposing = collections.Counter[int]()
        self._earlier = self._count_results_of_earlier_blocks(bundles)

    def _count_results_of_earlier_blocks(self, bundles: Iterable[Bundle]) -> collections.Counter[int]:
        """Returns the pops for which the block has no product: they read results of an earlier block, which are
        ready.
        """
        balance = collections.Counter[int]()
        for bundle in bundles:
            for instruction in bundle.instructions:
                properties = opcode_properties(instruction.opcode)
                if properties.kind is InstructionKind.MATMUL:
                    balance[properties.unit] -= self._registers_per_input.num_product_results(properties)
                elif properties.kind is InstructionKind.POP_RESULT_QUEUE:
                    balance[properties.unit] += 1
        return +balance

    def issue_bundle(self, cycle: int, bundle: Bundle) -> int:
        """Issues a bundle at `cycle` or as soon after it as possible; returns the cycle."""
        timed = [
            (i, properties)
            for i in bundle.instructions
            if (properties := opcode_properties(i.opcode)).kind is not InstructionKind.OTHER
        ]
        for instruction, properties in timed:
            cycle = max(cycle, self._pop_results_and_find_cycle(instruction, properties))
        for instruction, properties in timed:
            self._occupy_unit(cycle, instruction, properties)
        return cycle

    def _pop_results_and_find_cycle(self, instruction: Instruction, properties: OpcodeProperties) -> int:
        """Returns the earliest cycle for an instruction by itself, and removes the results that it pops."""
        if properties.kind is InstructionKind.MATMUL:
            return max(
                self._matrix_free[properties.unit], self._push_free[properties.unit] if properties.loads_weights else 0
            )
        if properties.kind in (InstructionKind.PUSH_WEIGHTS, InstructionKind.OTHER_WEIGHT_INSTRUCTION):
            return self._push_free[properties.unit]
        if properties.kind is InstructionKind.POP_RESULT_QUEUE:
            return self._pop_result_queue(properties.unit)
        if properties.kind is InstructionKind.POP_RESULT_BUFFER:
            return self._buffer.get((properties.unit, properties.result_buffer_index or 0), 0)
        if properties.kind is InstructionKind.POP_TRANSPOSED:
            return self._transposed[properties.unit].popleft() if self._transposed[properties.unit] else 0
        if properties.kind is InstructionKind.POP:
            found = (REGISTER_PATTERN.search(operand) for operand in instruction.operands)
            return max((self._ready.get(match[1], 0) for match in found if match), default=0)
        return self._cross_lane_free[properties.unit] if properties.waits_for_cross_lane_unit else 0

    def _pop_result_queue(self, unit: int) -> int:
        if self._earlier[unit] > 0:
            self._earlier[unit] -= 1
            return 0
        return self._queue[unit].popleft() if self._queue[unit] else 0

    def _occupy_unit(self, cycle: int, instruction: Instruction, properties: OpcodeProperties) -> None:
        """Records until when an instruction occupies its unit, and when its result is ready."""
        latencies = self._latencies
        if properties.kind is InstructionKind.MATMUL:
            self._record_product(cycle, properties)
        elif properties.kind is InstructionKind.PUSH_WEIGHTS:
            transposes = "xpose" in instruction.opcode
            self._push_free[properties.unit] = cycle + (
                latencies.transposed_weight_push_interval if transposes else latencies.weight_push_interval
            )
        elif properties.kind is InstructionKind.REDUCE:
            self._cross_lane_free[properties.unit] = cycle + latencies.cross_lane_interval
            self._ready[instruction.result] = cycle + latencies.reduction_latency
        elif properties.kind is InstructionKind.TRANSPOSE:
            self._record_transposition(cycle, properties)
        elif properties.kind is InstructionKind.ROTATE:
            self._cross_lane_free[properties.unit] = cycle + 1
            self._ready[instruction.result] = cycle + latencies.rotation_latency
        elif properties.kind is InstructionKind.TRANSCENDENTAL:
            self._ready[instruction.result] = cycle + latencies.transcendental_latency

    def _record_product(self, cycle: int, properties: OpcodeProperties) -> None:
        latencies = self._latencies
        self._matrix_free[properties.unit] = cycle + (
            latencies.matmul_interval if properties.is_narrow else latencies.matmul_f32_interval
        )
        ready = cycle + latencies.matmul_result_latency
        if properties.result_buffer_index is None:
            self._queue[properties.unit].extend([ready] * self._registers_per_input.num_product_results(properties))
            return
        for register in range(2 * properties.results_per_push):
            self._buffer[properties.unit, properties.result_buffer_index + register] = ready

    def _record_transposition(self, cycle: int, properties: OpcodeProperties) -> None:
        """Records that the whole tile is ready at the end, one register per pop."""
        self._cross_lane_free[properties.unit] = cycle + self._latencies.cross_lane_interval
        self._transposing[properties.unit] += 1
        if properties.ends_transposition:
            registers = max(
                1, round(self._transposing[properties.unit] * self._registers_per_input.popped_per_transposed)
            )
            self._transposed[properties.unit].extend([cycle + self._latencies.transposition_latency] * registers)
            self._transposing[properties.unit] = 0


@dataclasses.dataclass(frozen=True)
class BlockTime:
    """The time of a basic block.

    Attributes:
        cycles: Cycles that the block takes.
        issue_cycles: The cycle at which each of its bundles is issued.
    """

    cycles: int
    issue_cycles: tuple[int, ...]


def time_block(
    block: BasicBlock, bundles: Sequence[Bundle], latencies: Latencies, registers_per_input: RegistersPerInput
) -> BlockTime:
    """Issues the bundles of a block on units that are idle at its start, and returns their times."""
    block_bundles = bundles[block.start : block.end]
    scoreboard = Scoreboard(latencies, registers_per_input, block_bundles)
    cycle, issued = -1, list[int]()
    for bundle in block_bundles:
        cycle = scoreboard.issue_bundle(cycle + 1, bundle)
        issued.append(cycle)
    return BlockTime(cycle + 1, tuple(issued))
