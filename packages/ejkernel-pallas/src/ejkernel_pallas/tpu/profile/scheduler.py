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
_RESULT_SLOT_PATTERN = re.compile(r"mrb\[(\d+)\]")


class InstructionKind(enum.Enum):
    """The kinds of instructions that differ in time."""

    MATMUL = enum.auto()
    PUSH = enum.auto()
    WEIGHTS = enum.auto()  # other instructions on the weight registers, which wait for them and delay nothing else
    POP_QUEUE = enum.auto()  # results of the matrix unit are read in order ...
    POP_BUFFER = enum.auto()  # ... or, on newer chips, by their number
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
        slot: Number of the result, if results are numbered; else None.
        results: Result registers per pushed register, before the correction for the chip.
        narrow: Whether its format has up to 16 bits.
        latches: Whether it loads the weights that have been pushed.
        waits: Whether it waits for the cross-lane unit.
        ends: Whether it is the last instruction of a transposition.
    """

    kind: InstructionKind
    unit: int = 0
    slot: int | None = None
    results: int = 2
    narrow: bool = True
    latches: bool = False
    waits: bool = False
    ends: bool = False


@functools.cache
def opcode_properties(opcode: str) -> OpcodeProperties:
    """Returns the properties of an opcode."""
    kind = _matrix_kind(opcode) or _pop_kind(opcode) or _vector_kind(opcode)
    on_xlu = kind in (
        InstructionKind.REDUCE,
        InstructionKind.TRANSPOSE,
        InstructionKind.ROTATE,
        InstructionKind.POP_TRANSPOSED,
    )
    unit = re.search(r"xlu(\d)" if on_xlu else r"mxu(\d)", opcode)
    slot = _RESULT_SLOT_PATTERN.search(opcode)
    return OpcodeProperties(
        kind=kind,
        unit=int(unit[1]) if unit else 0,
        slot=int(slot[1]) if slot else None,
        results=1 if ".f32" in opcode else 2,
        narrow=any(name in opcode for name in _NARROW_DTYPES),
        latches="vlgmr" in opcode,
        waits="xlu" in opcode,
        ends=".end" in opcode,
    )


def _matrix_kind(opcode: str) -> InstructionKind | None:
    if opcode.startswith("vmatprep"):  # it only stages data: the following product or push accounts for the time
        return InstructionKind.OTHER
    if opcode.startswith("vmatmul"):
        return InstructionKind.MATMUL
    if opcode.startswith("vmatpush"):
        return InstructionKind.PUSH
    return InstructionKind.WEIGHTS if opcode.startswith("vmat") else None


def _pop_kind(opcode: str) -> InstructionKind | None:
    if not opcode.startswith("vpop"):
        return None
    if "mrf" in opcode:
        return InstructionKind.POP_QUEUE
    if "mrb" in opcode:
        return InstructionKind.POP_BUFFER
    return InstructionKind.POP_TRANSPOSED if ".trf" in opcode else InstructionKind.POP


def _vector_kind(opcode: str) -> InstructionKind:
    if ".xlane" in opcode:
        return InstructionKind.REDUCE
    if opcode.startswith("vxpose"):
        return InstructionKind.TRANSPOSE
    if "xlu" in opcode:
        return InstructionKind.ROTATE
    return InstructionKind.TRANSCENDENTAL if opcode.startswith(_TRANSCENDENTAL_OPCODES) else InstructionKind.OTHER


@dataclasses.dataclass(frozen=True)
class ResultRatios:
    """Result registers per input register of a unit, a property of chip and dtype that is counted in a kernel.

    Attributes:
        matmul: Registers popped from the queues of the matrix units, for each one expected.
        transposition: Registers popped from the cross-lane units, for each one pushed.
    """

    matmul: float
    transposition: float

    @classmethod
    def of(cls, bundles: Sequence[Bundle]) -> "ResultRatios":
        """Counts the ratios over a whole kernel."""
        found = [opcode_properties(i.opcode) for bundle in bundles for i in bundle.instructions]
        counts = collections.Counter(w.kind for w in found)
        expected = sum(w.results for w in found if w.kind is InstructionKind.MATMUL)
        return cls(
            matmul=counts[InstructionKind.POP_QUEUE] / expected
            if counts[InstructionKind.POP_QUEUE] and expected
            else 1.0,
            transposition=counts[InstructionKind.POP_TRANSPOSED] / counts[InstructionKind.TRANSPOSE]
            if counts[InstructionKind.POP_TRANSPOSED] and counts[InstructionKind.TRANSPOSE]
            else 1.0,
        )

    def results(self, of: OpcodeProperties) -> int:
        """Returns the number of registers that a product puts into its queue."""
        return max(1, round(of.results * self.matmul))


class Scoreboard:
    """The state of the units while a block is issued."""

    def __init__(self, latencies: Latencies, ratios: ResultRatios, bundles: Iterable[Bundle]) -> None:
        self._latencies, self._ratios = latencies, ratios
        self._matrix_free = collections.Counter[int]()
        self._push_free = collections.Counter[int]()
        self._cross_lane_free = collections.Counter[int]()
        self._ready: dict[str | None, int] = {}
        self._queue = collections.defaultdict[int, collections.deque[int]](collections.deque)
        self._buffer: dict[tuple[int, int], int] = {}
        self._transposed = collections.defaultdict[int, collections.deque[int]](collections.deque)
        self._transposing = collections.Counter[int]()
        self._earlier = self._results_of_earlier_blocks(bundles)

    def _results_of_earlier_blocks(self, bundles: Iterable[Bundle]) -> collections.Counter[int]:
        """Returns the pops for which the block has no product: they read results of an earlier block, which are
        ready.
        """
        balance = collections.Counter[int]()
        for bundle in bundles:
            for instruction in bundle.instructions:
                of = opcode_properties(instruction.opcode)
                if of.kind is InstructionKind.MATMUL:
                    balance[of.unit] -= self._ratios.results(of)
                elif of.kind is InstructionKind.POP_QUEUE:
                    balance[of.unit] += 1
        return +balance

    def issue(self, cycle: int, bundle: Bundle) -> int:
        """Issues a bundle at `cycle` or as soon after it as possible; returns the cycle."""
        timed = [
            (i, of)
            for i in bundle.instructions
            if (of := opcode_properties(i.opcode)).kind is not InstructionKind.OTHER
        ]
        for instruction, of in timed:
            cycle = max(cycle, self._earliest(instruction, of))
        for instruction, of in timed:
            self._occupy(cycle, instruction, of)
        return cycle

    def _earliest(self, instruction: Instruction, of: OpcodeProperties) -> int:
        """Returns the earliest cycle for an instruction by itself, and removes the results that it pops."""
        if of.kind is InstructionKind.MATMUL:
            return max(self._matrix_free[of.unit], self._push_free[of.unit] if of.latches else 0)
        if of.kind in (InstructionKind.PUSH, InstructionKind.WEIGHTS):
            return self._push_free[of.unit]
        if of.kind is InstructionKind.POP_QUEUE:
            return self._pop_queue(of.unit)
        if of.kind is InstructionKind.POP_BUFFER:
            return self._buffer.get((of.unit, of.slot or 0), 0)
        if of.kind is InstructionKind.POP_TRANSPOSED:
            return self._transposed[of.unit].popleft() if self._transposed[of.unit] else 0
        if of.kind is InstructionKind.POP:
            found = (REGISTER_PATTERN.search(operand) for operand in instruction.operands)
            return max((self._ready.get(match[1], 0) for match in found if match), default=0)
        return self._cross_lane_free[of.unit] if of.waits else 0

    def _pop_queue(self, unit: int) -> int:
        if self._earlier[unit] > 0:
            self._earlier[unit] -= 1
            return 0
        return self._queue[unit].popleft() if self._queue[unit] else 0

    def _occupy(self, cycle: int, instruction: Instruction, of: OpcodeProperties) -> None:
        """Records until when an instruction occupies its unit, and when its result is ready."""
        latencies = self._latencies
        if of.kind is InstructionKind.MATMUL:
            self._multiply(cycle, of)
        elif of.kind is InstructionKind.PUSH:
            transposes = "xpose" in instruction.opcode
            self._push_free[of.unit] = cycle + (latencies.push_transposed if transposes else latencies.push)
        elif of.kind is InstructionKind.REDUCE:
            self._cross_lane_free[of.unit] = cycle + latencies.xlu
            self._ready[instruction.result] = cycle + latencies.reduction
        elif of.kind is InstructionKind.TRANSPOSE:
            self._transpose(cycle, of)
        elif of.kind is InstructionKind.ROTATE:
            self._cross_lane_free[of.unit] = cycle + 1
            self._ready[instruction.result] = cycle + latencies.rotation
        elif of.kind is InstructionKind.TRANSCENDENTAL:
            self._ready[instruction.result] = cycle + latencies.transcendental

    def _multiply(self, cycle: int, of: OpcodeProperties) -> None:
        latencies = self._latencies
        self._matrix_free[of.unit] = cycle + (latencies.matmul if of.narrow else latencies.matmul_f32)
        ready = cycle + latencies.matmul_result
        if of.slot is None:
            self._queue[of.unit].extend([ready] * self._ratios.results(of))
            return
        for register in range(2 * of.results):
            self._buffer[of.unit, of.slot + register] = ready

    def _transpose(self, cycle: int, of: OpcodeProperties) -> None:
        """Records that the whole tile is ready at the end, one register per pop."""
        self._cross_lane_free[of.unit] = cycle + self._latencies.xlu
        self._transposing[of.unit] += 1
        if of.ends:
            registers = max(1, round(self._transposing[of.unit] * self._ratios.transposition))
            self._transposed[of.unit].extend([cycle + self._latencies.transposition] * registers)
            self._transposing[of.unit] = 0


@dataclasses.dataclass(frozen=True)
class BlockTime:
    """Cycles that a block takes, and the cycle at which each of its bundles is issued."""

    cycles: int
    issued: tuple[int, ...]


def time_block(block: BasicBlock, bundles: Sequence[Bundle], latencies: Latencies, ratios: ResultRatios) -> BlockTime:
    """Issues the bundles of a block on units that are idle at its start, and returns their times."""
    block_bundles = bundles[block.start : block.end]
    scoreboard = Scoreboard(latencies, ratios, block_bundles)
    cycle, issued = -1, list[int]()
    for bundle in block_bundles:
        cycle = scoreboard.issue(cycle + 1, bundle)
        issued.append(cycle)
    return BlockTime(cycle + 1, tuple(issued))
