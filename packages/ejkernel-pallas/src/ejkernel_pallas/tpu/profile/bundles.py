"""Reads what libtpu writes about a kernel: its final VLIW bundles, their use of slots, and its allocations."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

# A register in an operand: its name, without the physical register that it was assigned.
REGISTER_PATTERN = re.compile(r"%([a-z]*\d+)(?:_[a-z]+\d+)?")

_RECORD = re.compile(r"^[ \t]*(0x[0-9a-f]+|0)[ \t]+(?:(LB|LH|LE|PB|PF|CT)[ \t]*)?:[ \t]*((?:>[ \t]*)*)\{", re.M)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
_REGION = re.compile(r"(?:Start/End empty|Start) region (\d+)")
# Comments such as /*hbm=*/ name the operand that follows; all others are remarks.
_PLAIN_COMMENT = re.compile(r"/\*(?!\w+=\*/).*?\*/", re.S)
# A copy between any two memories names the two in a comment.
_MEMORIES = re.compile(r"(dma\.general [^;]*?)/\* (\w+)-to-(\w+) \*/")
_NAMED = re.compile(r"/\*(\w+)=\*/")
_ASSIGNMENT = re.compile(r"\s*%(\w+)\s*=\s*(.*)$", re.S)
_OPCODE = re.compile(r"([A-Za-z][\w.<> ]*?(?:\[\d+\])?(?:\.mxu\d)?)(?=\s|$|\[|\()")
_PREDICATE = re.compile(r"\((!?)%(p\d+)_p\d+(?:,\s*([^()]+))?\)")
_ANNOTATION = re.compile(r"\[(?:thread|resolvable):\$\w+\]")
_RESULT = re.compile(r"[spv]m?\d")
_STORE = re.compile(r"(\[smem:.*\]\])\s*,?\s*(.*)$"), re.compile(r"(\[smem:[^\s]*(?: \+ [^\s\]]*)*\]+)\s*,?\s*(.*)$")
_BRANCH_TARGET = re.compile(r"\$region(\d+)")
_CALL_OPERAND = "inlined_call_operand"
_ALLOCATION = re.compile(
    r"#(allocation\d+) \[shape = '[^']*', space=(\w+), size = (0x[0-9a-f]+|\d+)(?:.*?tag = '([^']*))?", re.S
)


@dataclasses.dataclass(frozen=True)
class Predicate:
    """The condition under which an instruction takes effect.

    Attributes:
        is_negated: Whether the instruction takes effect where the register is 0.
        register: The predicate register.
        value_if_false: The operand that is the result where the condition is false; None if there is none.
    """

    is_negated: bool
    register: str
    value_if_false: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One slot of a bundle.

    Attributes:
        result: The register that it defines, without the physical one; None if it defines none.
        opcode: The opcode, such as `vmatmul.mubr.bf16.gmra.mxu0`.
        predicate: The condition under which it takes effect; None for always.
        operands: The operands, as written.
        named_operands: Operands that have a name.
        region: The region that a branch jumps to; None for other instructions.
    """

    result: str | None
    opcode: str
    predicate: Predicate | None
    operands: tuple[str, ...]
    named_operands: Mapping[str, str]
    region: int | None = None


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Instructions that are issued in the same cycle.

    Attributes:
        depth: The number of loops around it.
        regions: The regions that start here; branches refer to them.
        instructions: The instructions in its slots.
    """

    depth: int
    regions: tuple[int, ...]
    instructions: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Utilisation:
    """Slots in use, per bundle.

    Attributes:
        slots: Names of the kinds of slots.
        capacity: How many slots of each kind a bundle has.
        used: For every bundle, how many slots of each kind it uses.
    """

    slots: tuple[str, ...] = ()
    capacity: tuple[int, ...] = ()
    used: tuple[tuple[int, ...], ...] = ()

    def total(self, slot: str, weights: Mapping[int, int]) -> int:
        """Returns how often a kind of slot is used if bundle `k` is issued `weights[k]` times."""
        if slot not in self.slots:
            return 0
        column = self.slots.index(slot)
        return sum(weight * self.used[k][column] for k, weight in weights.items() if k < len(self.used))

    def shares(self, weights: Mapping[int, int]) -> dict[str, float]:
        """Returns the share of each kind of slot that is in use."""
        bundles = sum(weights.values())
        pairs = zip(self.slots, self.capacity, strict=True)
        return {slot: self.total(slot, weights) / max(1, bundles * capacity) for slot, capacity in pairs}


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A buffer of a kernel.

    Attributes:
        name: Its name.
        space: Its memory space.
        size: Its size in bytes.
        purpose: What it is for.
    """

    name: str
    space: str
    size: int
    purpose: str


def parse_bundles(text: str) -> tuple[Bundle, ...]:
    """Reads `*-final_bundles.txt`."""
    found = list(_RECORD.finditer(text))
    ends = [record.start() for record in found[1:]] + [len(text)]
    return tuple(_bundle(record, text[record.end() : end]) for record, end in zip(found, ends, strict=True))


def parse_utilisation(text: str) -> Utilisation:
    """Reads `*-final_hlo-static-per-bundle-utilization.txt`; empty text gives an empty utilisation."""
    lines = text.splitlines()
    if not lines:
        return Utilisation()
    slots = tuple(name.strip() for name in lines[1].split(","))
    used = tuple(tuple(map(int, line.split())) for line in lines[4:] if line.strip())
    return Utilisation(slots, tuple(map(int, lines[2].split())), used)


def parse_allocations(text: str) -> tuple[Allocation, ...]:
    """Reads `*-pre-finalize-registers-and-allocations.txt`."""
    found = (match.groups() for match in _ALLOCATION.finditer(text))
    return tuple(Allocation(name, space, int(size, 0), purpose or "") for name, space, size, purpose in found)


def _bundle(record: re.Match[str], text: str) -> Bundle:
    regions = tuple(int(n) for comment in _COMMENT.findall(text) for n in _REGION.findall(comment))
    body = _PLAIN_COMMENT.sub("", _MEMORIES.sub(r"\1, /*memories=*/\2_to_\3", text))
    body = body[: body.rfind("}")] if "}" in body else body
    instructions = (_instruction(slot) for slot in body.split(";;") if slot.strip())
    return Bundle(record[3].count(">"), regions, tuple(i for i in instructions if i is not None))


def _instruction(text: str) -> Instruction | None:
    match = _ASSIGNMENT.match(text)
    if match is None:
        return None
    target, rest = match[1], match[2].strip()
    opcode_match = _OPCODE.match(rest)
    opcode = opcode_match[1] if opcode_match else rest.split()[0]
    if opcode.startswith(_CALL_OPERAND):
        return _call_operand(target, rest)
    rest, predicate = _predicate(_ANNOTATION.sub("", rest[len(opcode) :]).strip())
    operands, named = _operands(_store_operands(rest) if opcode == "sst" else rest)
    branch = _BRANCH_TARGET.search(text) if opcode == "sbr.rel" else None
    return Instruction(_register(target), opcode, predicate, operands, named, int(branch[1]) if branch else None)


def _call_operand(target: str, rest: str) -> Instruction:
    """Returns an instruction that stands for an operand of the kernel: the memory space it is in, and its number."""
    number = re.search(r"index: (\d+)", rest)
    space = rest.split("[")[0].split(".")[-1].strip()
    return Instruction(target.split("_")[0], _CALL_OPERAND, None, (space, number[1] if number else "0"), {})


def _predicate(text: str) -> tuple[str, Predicate | None]:
    match = _PREDICATE.search(text)
    if match is None:
        return text, None
    rest = (text[: match.start()] + text[match.end() :]).strip().lstrip(",").strip()
    return rest, Predicate(match[1] == "!", match[2], match[3])


def _store_operands(text: str) -> str:
    """Puts a comma between the address and the value of a scalar store, which are written without one."""
    for pattern in _STORE:
        if match := pattern.match(text):
            return f"{match[1]},{match[2]}"
    return text


def _operands(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    operands, named = list[str](), dict[str, str]()
    for operand in _split_operands(text):
        if match := _NAMED.match(operand):
            operand = operand[match.end() :].strip()
            named[match[1]] = operand
        operands.append(operand)
    return tuple(operands), named


def _split_operands(text: str) -> Sequence[str]:
    """Splits at the commas that are outside all brackets."""
    parts, depth, start = list[str](), 0, 0
    for position, character in enumerate(text):
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _register(target: str) -> str | None:
    if _RESULT.match(target):
        return target.split("_")[0]
    return target if target.isdecimal() else None
