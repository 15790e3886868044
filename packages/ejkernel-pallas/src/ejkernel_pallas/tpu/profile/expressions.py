"""Translates the scalar unit's instructions to Python expressions over registers `R`, memory `M` and machine `S`."""

import re
from collections.abc import Callable, Mapping

from ejkernel_pallas.tpu.profile.bundles import REGISTER_PATTERN, Instruction
from ejkernel_pallas.tpu.profile.machine import ALLOCATION_ADDRESS_STRIDE, operand_address

_INTEGER_PATTERN = re.compile(r"-?(0x[0-9a-f]+|\d+)")
_TO_UNSIGNED_32 = "&0xffffffff"
_PYTHON_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

# Templates by the start of the opcode; {0} is the first operand. A longer prefix comes before those that it begins
# with.
_EXPRESSIONS_BY_PREFIX = {
    "smov": "{0}",
    "pmov": "{0}",
    "int_to_ptr": "{0}",
    "sadd": "wrap_to_int32({0}+{1})",
    "ssub": "wrap_to_int32({0}-{1})",
    "smulhi.u32": "multiply_high({0},{1})",
    "smul.": "multiply({0},{1})",
    "sshllo": "wrap_to_int32(({0}<<({1}&31))|((1<<({1}&31))-1))",
    "sshll": "shift_left({0},{1})",
    "sshrl": "shift_right({0},{1})",
    "sshra": "{0}>>({1}&31)",
    "sand": "wrap_to_int32({0}&{1})",
    "sor": "wrap_to_int32({0}|{1})",
    "sxor": "wrap_to_int32({0}^{1})",
    "snot": "~{0}",
}
_TEMPLATES_BY_OPCODE = {
    "scalar_select": "{1} if {0} else {2}",
    "por": "bool({0} or {1})",
    "pand": "bool({0} and {1})",
    "pnand": "not ({0} and {1})",
    "pnor": "not ({0} or {1})",
    "pxor": "bool({0}) != bool({1})",
    "pneg": "not {0}",
    "sld": "S.load_word({0})",
    "sst": "M.__setitem__({0},{1})",
}


class SymbolTable:
    """Assigns numbers to what a kernel names: registers, and the addresses of its allocations."""

    def __init__(self) -> None:
        self.registers: dict[str, int] = {}
        self.allocations: dict[str, int] = {}

    def register(self, name: str) -> str:
        """Returns the expression of a register."""
        return f"R[{self.registers.setdefault(name, len(self.registers))}]"

    def allocation_address(self, allocation: str) -> int:
        """Returns the address where an allocation starts."""
        return ALLOCATION_ADDRESS_STRIDE * self.allocations.setdefault(allocation, len(self.allocations) + 1)

    def translate_operand(self, text: str) -> str:
        """Returns the expression of a register, a sum in brackets, an allocation or a literal; 0 if it has no value
        here.
        """
        text = text.strip()
        if text.startswith("%"):
            match = REGISTER_PATTERN.match(text)
            return self.register(match[1]) if match else "0"
        if text.startswith("["):
            inner = text[1 : text.rfind("]")].replace("smem:", "").strip().strip("[]")
            return "(" + " + ".join(self.translate_operand(part) for part in inner.split("+")) + ")"
        if text.startswith("#"):
            return str(self.allocation_address(text[1:]))
        if text.startswith("$"):
            return str(int(text[1:], 0))
        match = _INTEGER_PATTERN.match(text)
        return str(_signed_constant(int(match[0], 0))) if match else "0"


def translate_instruction(instruction: Instruction, symbols: SymbolTable, cycle: int) -> str:
    """Returns the expression of an instruction, `cycle` cycles after its block has begun.

    It is 0 if the scalar code only depends on the instruction's existence.
    """
    opcode = instruction.opcode
    if opcode in _TRANSLATORS_BY_OPCODE:
        return _TRANSLATORS_BY_OPCODE[opcode](instruction, symbols, cycle)
    if opcode.startswith("dma."):
        return _translate_copy_start(instruction, symbols, cycle)
    operands = [symbols.translate_operand(text) for text in instruction.operands]
    if opcode.startswith(("smin", "smax")):
        return _translate_min_or_max(opcode, operands)
    if opcode.startswith("scmp"):
        return _translate_comparison(opcode, operands)
    if opcode.startswith("scalar_lea"):
        return "+".join(operands[:2])
    template = _TEMPLATES_BY_OPCODE.get(opcode) or _find_template(opcode, _EXPRESSIONS_BY_PREFIX)
    return template.format(*operands)


def _find_template(opcode: str, templates_by_prefix: Mapping[str, str]) -> str:
    return next((template for prefix, template in templates_by_prefix.items() if opcode.startswith(prefix)), "0")


def _translate_min_or_max(opcode: str, operands: list[str]) -> str:
    unsigned = _TO_UNSIGNED_32 if ".u32" in opcode else ""
    return f"wrap_to_int32({opcode[1:4]}({operands[0]}{unsigned},{operands[1]}{unsigned}))"


def _translate_comparison(opcode: str, operands: list[str]) -> str:
    _, comparison, dtype = opcode.split(".")[:3]
    unsigned = _TO_UNSIGNED_32 if dtype == "u32" else ""
    return f"({operands[0]}{unsigned}) {_PYTHON_COMPARISONS[comparison]} ({operands[1]}{unsigned})"


def _translate_kernel_operand(instruction: Instruction, symbols: SymbolTable, cycle: int) -> str:
    """Returns the address of an operand, or its value if the operand is a scalar and not in memory."""
    space, number = instruction.operands[0], int(instruction.operands[1])
    return f"S.scalar_operand({number})" if space.startswith("<no") else str(operand_address(number))


def _translate_semaphore_wait(instruction: Instruction, symbols: SymbolTable, cycle: int) -> str:
    semaphore, amount = (symbols.translate_operand(text) for text in instruction.operands[:2])
    return f"t=t+S.wait(t+{cycle},{semaphore},{amount})"


def _translate_copy_start(instruction: Instruction, symbols: SymbolTable, cycle: int) -> str:
    """Returns the expression of a copy. It contains the addresses if it fills SMEM, since scalar code may read the
    result.
    """
    kind, named = instruction.opcode.removeprefix("dma."), instruction.named_operands
    if kind == "general":
        fields = ("size_in_granules", "src_syncflagno", "dst_syncflagno", "overrides")
        values = [symbols.translate_operand(named.get(field, "0")) for field in fields]
        return f"S.start_copy_between(t+{cycle},{named.get('memories', 'vmem_to_vmem')!r},{','.join(values)})"
    source = named.get(kind.partition("_to_")[0]) if kind.endswith("_to_smem") else None
    target = named.get("smem") if source is not None else None
    values = [symbols.translate_operand(named.get(name, "0")) for name in ("size_in_granules", "dst_syncflagno")]
    values += [symbols.translate_operand(address or "0") for address in (source, target)]
    return f"S.start_copy(t+{cycle},{kind!r},{','.join(values)})"


_TRANSLATORS_BY_OPCODE: dict[str, Callable[[Instruction, SymbolTable, int], str]] = {
    "inlined_call_operand": _translate_kernel_operand,
    "dma.done.wait": _translate_semaphore_wait,
}


def _signed_constant(value: int) -> int:
    return value - (1 << 32) if value >= 0x80000000 else value
