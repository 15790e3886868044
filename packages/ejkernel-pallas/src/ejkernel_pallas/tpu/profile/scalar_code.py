"""Translates the scalar code of a kernel to one Python function per basic block.

The code that decides where a kernel branches, what it copies and what it waits for is scalar: the grid loop, `pl.when`,
`fori_loop` and tables of scalar prefetch. Instructions that none of these depends on are left out.
"""

import collections
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ejkernel_pallas.tpu.profile.bundles import REGISTER_PATTERN, Bundle, Instruction
from ejkernel_pallas.tpu.profile.expressions import SymbolTable, translate_instruction
from ejkernel_pallas.tpu.profile.flow import BasicBlock, ControlFlow
from ejkernel_pallas.tpu.profile.machine import (
    SimulatedCore,
    multiply,
    multiply_high,
    shift_left,
    shift_right,
    wrap_to_int32,
)
from ejkernel_pallas.tpu.profile.scheduler import BlockTime

BlockFunction = Callable[[list[int], SimulatedCore, dict[int, int]], int]

_SCALAR_REGISTER_PATTERN = re.compile(r"[sp]\d")
_PHI_OPCODES = ("sphi", "pphi")
_COPY_SIZE_OPERANDS = ("size_in_granules", "dst_syncflagno", "src_syncflagno", "overrides")
_COPY_ADDRESS_OPERANDS = ("src", "hbm", "vmem", "smem")


class _ScalarSlice:
    """Collects the instructions that control flow and copies depend on."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self.kept: set[Instruction] = set()
        self._wanted: set[str] = set()
        self._pending: list[str] = []
        self._definitions = collections.defaultdict[str, list[Instruction]](list)
        self._stores: list[Instruction] = []
        everything = [i for bundle in bundles for i in bundle.instructions]
        for instruction in everything:
            if instruction.result and _SCALAR_REGISTER_PATTERN.match(instruction.result):
                self._definitions[instruction.result].append(instruction)
            if instruction.opcode == "sst":
                self._stores.append(instruction)
        for instruction in everything:
            if instruction.branch_region is not None or instruction.opcode == "dma.done.wait":
                self._keep_instruction(instruction, instruction.operands)
            elif instruction.opcode.startswith("dma."):
                names = (*_COPY_SIZE_OPERANDS, *(_COPY_ADDRESS_OPERANDS if "smem" in instruction.opcode else ()))
                self._keep_instruction(
                    instruction,
                    [instruction.named_operands[name] for name in names if name in instruction.named_operands],
                )
        self._keep_required_definitions()

    def _keep_instruction(self, instruction: Instruction, operands: Iterable[str]) -> None:
        if instruction in self.kept:
            return
        self.kept.add(instruction)
        for operand in operands:
            self._require_register(operand)
        if predicate := instruction.predicate:
            self._require_register(f"%{predicate.register}")
            self._require_register(predicate.value_if_false or "")

    def _require_register(self, text: str) -> None:
        for name in REGISTER_PATTERN.findall(text):
            if _SCALAR_REGISTER_PATTERN.match(name) and name not in self._wanted:
                self._wanted.add(name)
                self._pending.append(name)

    def _keep_required_definitions(self) -> None:
        while self._pending:
            for instruction in self._definitions[self._pending.pop()]:
                self._keep_instruction(instruction, instruction.operands)
                if instruction.opcode == "sld":  # the load may read what any store has written
                    for store in self._stores:
                        self._keep_instruction(store, store.operands)


class ScalarCode:
    """A kernel's scalar code, translated to Python functions.

    Attributes:
        names: The indices of registers and allocations.
        functions: Maps the first bundle of a block to `(registers, machine, memory) -> first bundle of the next block`.
    """

    def __init__(
        self, bundles: Sequence[Bundle], control_flow: ControlFlow, block_times: Mapping[int, BlockTime]
    ) -> None:
        self.symbols = SymbolTable()
        self._bundles, self._flow = bundles, control_flow
        self._kept = _ScalarSlice(bundles).kept
        self._merged = self._find_phis_by_input()
        source = "\n".join(
            self._translate_block(block, block_times[start]) for start, block in control_flow.blocks.items()
        )
        scope: dict[str, Any] = {
            f.__name__: f for f in (wrap_to_int32, multiply, multiply_high, shift_left, shift_right)
        }
        # the source is generated from parsed operands; a compiled function is a hundred times faster than an
        # interpreter
        exec(source, scope)
        self.functions: dict[int, BlockFunction] = {start: scope[f"b{start}"] for start in control_flow.blocks}

    def _find_phis_by_input(self) -> Mapping[str, list[str]]:
        """Maps each register to the merges that have it as an input. They are assigned where the register is."""
        found = collections.defaultdict[str, list[str]](list)
        for bundle in self._bundles:
            for merge in bundle.instructions:
                if merge.opcode in _PHI_OPCODES and merge.result:
                    for match in filter(None, map(REGISTER_PATTERN.match, merge.operands)):
                        found[match[1]].append(merge.result)
        return found

    def _translate_block(self, block: BasicBlock, block_time: BlockTime) -> str:
        lines = [f"def b{block.start}(R,S,M):", "t=S.t"]
        for k, cycle in zip(range(block.start, block.end), block_time.issue_cycles, strict=True):
            merges = [i for i in self._bundles[k].instructions if i.opcode in _PHI_OPCODES]
            others = [i for i in self._bundles[k].instructions if i.opcode not in _PHI_OPCODES]
            for merge in merges:
                lines += self._translate_phi(merge.result) if merge in self._kept and merge.result else ()
            for instruction in others:
                if instruction.branch_region is None and instruction in self._kept:
                    lines += self._translate_statement(instruction, cycle)
                elif k == block.branch and instruction.branch_region is not None:
                    lines.append(f"taken={self._predicate_expression(instruction)}")
        lines.append(f"S.t=t+{block_time.cycles}")
        target = None if block.branch is None else self._flow.branches[block.branch].target
        otherwise = block.fallthrough_bundle
        lines.append(f"return {otherwise}" if target is None else f"return {target} if taken else {otherwise}")
        return "\n ".join(lines)

    def _translate_phi(self, result: str) -> Iterable[str]:
        register = self.symbols.register(result)
        yield f"{register}={self.symbols.register(f'phi_{result}')}"
        yield from self._phi_input_assignments(result)

    def _phi_input_assignments(self, result: str) -> Iterable[str]:
        """Assigns a register's value to the merges that have it as an input, such as those of an inner loop."""
        register = self.symbols.register(result)
        return [f"{self.symbols.register(f'phi_{merge}')}={register}" for merge in self._merged.get(result, ())]

    def _predicate_expression(self, instruction: Instruction) -> str:
        predicate = instruction.predicate
        if predicate is None:
            return "True"
        return f"{'not ' if predicate.is_negated else ''}{self.symbols.register(predicate.register)}"

    def _translate_statement(self, instruction: Instruction, cycle: int) -> Iterable[str]:
        value = translate_instruction(instruction, self.symbols, cycle)
        predicate = instruction.predicate
        guard = f"if {self._predicate_expression(instruction)}: " if predicate else ""
        result = instruction.result
        if (
            result is None
            or not _SCALAR_REGISTER_PATTERN.match(result)
            or instruction.opcode.startswith(("dma", "sst"))
        ):
            return [f"{guard}{value}"]
        register = self.symbols.register(result)
        if predicate and predicate.value_if_false:
            otherwise = self.symbols.translate_operand(predicate.value_if_false)
            value, guard = f"({value}) if {self._predicate_expression(instruction)} else {otherwise}", ""
        return [f"{guard}{register}={value}", *(guard + line for line in self._phi_input_assignments(result))]
