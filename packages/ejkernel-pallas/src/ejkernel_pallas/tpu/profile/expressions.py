"""Translates the scalar unit's instructions to Python expressions over registers `R`, memory `M` and machine `S`."""

import re
from collections.abc import Callable, Mapping

from ejkernel_pallas.tpu.profile.bundles import REGISTER_PATTERN, Instruction
from ejkernel_pallas.tpu.profile.machine import ADDRESS_UNIT, operand_address

_NUMBER = re.compile(r"-?(0x[0-9a-f]+|\d+)")
_UNSIGNED = "&0xffffffff"
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

# Templates by the start of the opcode; {0} is the first operand. A longer prefix comes before those that it begins
# with.
_EXPRESSIONS_BY_PREFIX = {
    "smov": "{0}",
    "pmov": "{0}",
    "int_to_ptr": "{0}",
    "sadd": "wrap({0}+{1})",
    "ssub": "wrap({0}-{1})",
    "smulhi.u32": "multiply_high({0},{1})",
    "smul.": "multiply({0},{1})",
    "sshllo": "wrap(({0}<<({1}&31))|((1<<({1}&31))-1))",
    "sshll": "shift_left({0},{1})",
    "sshrl": "shift_right({0},{1})",
    "sshra": "{0}>>({1}&31)",
    "sand": "wrap({0}&{1})",
    "sor": "wrap({0}|{1})",
    "sxor": "wrap({0}^{1})",
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
    "sld": "S.load({0})",
    "sst": "M.__setitem__({0},{1})",
}


class Names:
    """Assigns numbers to what a kernel names: registers, and the addresses of its allocations."""

    def __init__(self) -> None:
        self.registers: dict[str, int] = {}
        self.allocations: dict[str, int] = {}

    def register(self, name: str) -> str:
        """Returns the expression of a register."""
        return f"R[{self.registers.setdefault(name, len(self.registers))}]"

    def address(self, allocation: str) -> int:
        """Returns the address where an allocation starts."""
        return ADDRESS_UNIT * self.allocations.setdefault(allocation, len(self.allocations) + 1)

    def operand(self, text: str) -> str:
        """Returns the expression of a register, a sum in brackets, an allocation or a literal; 0 if it has no value
        here.
        """
        text = text.strip()
        if text.startswith("%"):
            match = REGISTER_PATTERN.match(text)
            return self.register(match[1]) if match else "0"
        if text.startswith("["):
            inner = text[1 : text.rfind("]")].replace("smem:", "").strip().strip("[]")
            return "(" + " + ".join(self.operand(part) for part in inner.split("+")) + ")"
        if text.startswith("#"):
            return str(self.address(text[1:]))
        if text.startswith("$"):
            return str(int(text[1:], 0))
        match = _NUMBER.match(text)
        return str(_signed_constant(int(match[0], 0))) if match else "0"


def expression(instruction: Instruction, names: Names, cycle: int) -> str:
    """Returns the expression of an instruction, `cycle` cycles after its block has begun.

    It is 0 if the scalar code only depends on the instruction's existence.
    """
    opcode = instruction.opcode
    if opcode in _SPECIAL:
        return _SPECIAL[opcode](instruction, names, cycle)
    if opcode.startswith("dma."):
        return _start_copy(instruction, names, cycle)
    operands = [names.operand(text) for text in instruction.operands]
    if opcode.startswith(("smin", "smax")):
        return _min_or_max(opcode, operands)
    if opcode.startswith("scmp"):
        return _comparison(opcode, operands)
    if opcode.startswith("scalar_lea"):
        return "+".join(operands[:2])
    template = _TEMPLATES_BY_OPCODE.get(opcode) or _find_by_prefix(opcode, _EXPRESSIONS_BY_PREFIX)
    return template.format(*operands)


def _find_by_prefix(opcode: str, by_prefix: Mapping[str, str]) -> str:
    return next((template for prefix, template in by_prefix.items() if opcode.startswith(prefix)), "0")


def _min_or_max(opcode: str, operands: list[str]) -> str:
    unsigned = _UNSIGNED if ".u32" in opcode else ""
    return f"wrap({opcode[1:4]}({operands[0]}{unsigned},{operands[1]}{unsigned}))"


def _comparison(opcode: str, operands: list[str]) -> str:
    _, comparison, dtype = opcode.split(".")[:3]
    unsigned = _UNSIGNED if dtype == "u32" else ""
    return f"({operands[0]}{unsigned}) {_COMPARISONS[comparison]} ({operands[1]}{unsigned})"


def _kernel_operand(instruction: Instruction, names: Names, cycle: int) -> str:
    """Returns the address of an operand, or its value if the operand is a scalar and not in memory."""
    space, number = instruction.operands[0], int(instruction.operands[1])
    return f"S.scalar_operand({number})" if space.startswith("<no") else str(operand_address(number))


def _semaphore_wait_expression(instruction: Instruction, names: Names, cycle: int) -> str:
    semaphore, amount = (names.operand(text) for text in instruction.operands[:2])
    return f"t=t+S.wait(t+{cycle},{semaphore},{amount})"


def _start_copy(instruction: Instruction, names: Names, cycle: int) -> str:
    """Returns the expression of a copy. It contains the addresses if it fills SMEM, since scalar code may read the
    result.
    """
    kind, named = instruction.opcode.removeprefix("dma."), instruction.named_operands
    if kind == "general":
        fields = ("size_in_granules", "src_syncflagno", "dst_syncflagno", "overrides")
        values = [names.operand(named.get(field, "0")) for field in fields]
        return f"S.start_general(t+{cycle},{named.get('memories', 'vmem_to_vmem')!r},{','.join(values)})"
    source = named.get(kind.partition("_to_")[0]) if kind.endswith("_to_smem") else None
    target = named.get("smem") if source is not None else None
    values = [names.operand(named.get(name, "0")) for name in ("size_in_granules", "dst_syncflagno")]
    values += [names.operand(address or "0") for address in (source, target)]
    return f"S.start(t+{cycle},{kind!r},{','.join(values)})"


_SPECIAL: dict[str, Callable[[Instruction, Names, int], str]] = {
    "inlined_call_operand": _kernel_operand,
    "dma.done.wait": _semaphore_wait_expression,
}


def _signed_constant(value: int) -> int:
    return value - (1 << 32) if value >= 0x80000000 else value
