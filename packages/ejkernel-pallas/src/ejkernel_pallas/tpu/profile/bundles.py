"""Reads what libtpu writes about a kernel: its final VLIW bundles, their use of slots, and its allocations."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

# A register in an operand: its name, without the physical register that it was assigned.
REGISTER_PATTERN = re.compile(r"%([a-z]*\d+)(?:_[a-z]+\d+)?")

_BUNDLE_PATTERN = re.compile(r"^[ \t]*(0x[0-9a-f]+|0)[ \t]+(?:(LB|LH|LE|PB|PF|CT)[ \t]*)?:[ \t]*((?:>[ \t]*)*)\{", re.M)
_COMMENT_PATTERN = re.compile(r"/\*(.*?)\*/", re.S)
_REGION_START_PATTERN = re.compile(r"(?:Start/End empty|Start) region (\d+)")
# Comments such as /*hbm=*/ name the operand that follows; all others are remarks.
_REMARK_PATTERN = re.compile(r"/\*(?!\w+=\*/).*?\*/", re.S)
# A copy between any two memories names the two in a comment.
_COPY_MEMORIES_PATTERN = re.compile(r"(dma\.general [^;]*?)/\* (\w+)-to-(\w+) \*/")
_OPERAND_NAME_PATTERN = re.compile(r"/\*(\w+)=\*/")
_ASSIGNMENT_PATTERN = re.compile(r"\s*%(\w+)\s*=\s*(.*)$", re.S)
_OPCODE_PATTERN = re.compile(r"([A-Za-z][\w.<> ]*?(?:\[\d+\])?(?:\.mxu\d)?)(?=\s|$|\[|\()")
_PREDICATE_PATTERN = re.compile(r"\((!?)%(p\d+)_p\d+(?:,\s*([^()]+))?\)")
_ANNOTATION_PATTERN = re.compile(r"\[(?:thread|resolvable):\$\w+\]")
_RESULT_REGISTER_PATTERN = re.compile(r"[spv]m?\d")
_SCALAR_STORE_PATTERNS = (
    re.compile(r"(\[smem:.*\]\])\s*,?\s*(.*)$"),
    re.compile(r"(\[smem:[^\s]*(?: \+ [^\s\]]*)*\]+)\s*,?\s*(.*)$"),
)
_BRANCH_TARGET_PATTERN = re.compile(r"\$region(\d+)")
_KERNEL_OPERAND_OPCODE = "inlined_call_operand"
_ALLOCATION_PATTERN = re.compile(
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
        branch_region: The region that a branch jumps to; None for other instructions.
    """

    result: str | None
    opcode: str
    predicate: Predicate | None
    operands: tuple[str, ...]
    named_operands: Mapping[str, str]
    branch_region: int | None = None


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Instructions that are issued in the same cycle.

    Attributes:
        depth: The number of loops around it.
        started_regions: The regions that start here; branches refer to them.
        instructions: The instructions in its slots.
    """

    depth: int
    started_regions: tuple[int, ...]
    instructions: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Utilisation:
    """Slots in use, per bundle.

    Attributes:
        slots: Names of the kinds of slots.
        slot_capacity: How many slots of each kind a bundle has.
        used_slots: For every bundle, how many slots of each kind it uses.
    """

    slots: tuple[str, ...] = ()
    slot_capacity: tuple[int, ...] = ()
    used_slots: tuple[tuple[int, ...], ...] = ()

    def count_slot_uses(self, slot: str, weights: Mapping[int, int]) -> int:
        """Returns how often a kind of slot is used if bundle `k` is issued `weights[k]` times."""
        if slot not in self.slots:
            return 0
        column = self.slots.index(slot)
        return sum(weight * self.used_slots[k][column] for k, weight in weights.items() if k < len(self.used_slots))

    def slot_shares(self, weights: Mapping[int, int]) -> dict[str, float]:
        """Returns the share of each kind of slot that is in use."""
        bundles = sum(weights.values())
        pairs = zip(self.slots, self.slot_capacity, strict=True)
        return {slot: self.count_slot_uses(slot, weights) / max(1, bundles * capacity) for slot, capacity in pairs}


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A buffer of a kernel.

    Attributes:
        name: Its name.
        memory_space: Its memory space.
        size: Its size in bytes.
        purpose: What it is for.
    """

    name: str
    memory_space: str
    size: int
    purpose: str


def parse_bundles(text: str) -> tuple[Bundle, ...]:
    """Reads `*-final_bundles.txt`."""
    found = list(_BUNDLE_PATTERN.finditer(text))
    ends = [header.start() for header in found[1:]] + [len(text)]
    return tuple(_parse_bundle(header, text[header.end() : end]) for header, end in zip(found, ends, strict=True))


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
    found = (match.groups() for match in _ALLOCATION_PATTERN.finditer(text))
    return tuple(Allocation(name, space, int(size, 0), purpose or "") for name, space, size, purpose in found)


def _parse_bundle(header: re.Match[str], text: str) -> Bundle:
    regions = tuple(
        int(n) for comment in _COMMENT_PATTERN.findall(text) for n in _REGION_START_PATTERN.findall(comment)
    )
    body = _REMARK_PATTERN.sub("", _COPY_MEMORIES_PATTERN.sub(r"\1, /*memories=*/\2_to_\3", text))
    body = body[: body.rfind("}")] if "}" in body else body
    instructions = (_parse_instruction(slot) for slot in body.split(";;") if slot.strip())
    return Bundle(header[3].count(">"), regions, tuple(i for i in instructions if i is not None))


def _parse_instruction(text: str) -> Instruction | None:
    match = _ASSIGNMENT_PATTERN.match(text)
    if match is None:
        return None
    target, rest = match[1], match[2].strip()
    opcode_match = _OPCODE_PATTERN.match(rest)
    opcode = opcode_match[1] if opcode_match else rest.split()[0]
    if opcode.startswith(_KERNEL_OPERAND_OPCODE):
        return _parse_kernel_operand(target, rest)
    rest, predicate = _parse_predicate(_ANNOTATION_PATTERN.sub("", rest[len(opcode) :]).strip())
    operands, named = _parse_operands(_store_operands(rest) if opcode == "sst" else rest)
    branch = _BRANCH_TARGET_PATTERN.search(text) if opcode == "sbr.rel" else None
    return Instruction(_result_register(target), opcode, predicate, operands, named, int(branch[1]) if branch else None)


def _parse_kernel_operand(result_text: str, definition_text: str) -> Instruction:
    """Returns an instruction that stands for an operand of the kernel: the memory space it is in, and its number."""
    number = re.search(r"index: (\d+)", definition_text)
    space = definition_text.split("[")[0].split(".")[-1].strip()
    return Instruction(
        result_text.split("_")[0], _KERNEL_OPERAND_OPCODE, None, (space, number[1] if number else "0"), {}
    )


def _parse_predicate(text: str) -> tuple[str, Predicate | None]:
    match = _PREDICATE_PATTERN.search(text)
    if match is None:
        return text, None
    rest = (text[: match.start()] + text[match.end() :]).strip().lstrip(",").strip()
    return rest, Predicate(match[1] == "!", match[2], match[3])


def _store_operands(text: str) -> str:
    """Puts a comma between the address and the value of a scalar store, which are written without one."""
    for pattern in _SCALAR_STORE_PATTERNS:
        if match := pattern.match(text):
            return f"{match[1]},{match[2]}"
    return text


def _parse_operands(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    operands, named = list[str](), dict[str, str]()
    for operand in _split_operands(text):
        if match := _OPERAND_NAME_PATTERN.match(operand):
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


def _result_register(result_text: str) -> str | None:
    if _RESULT_REGISTER_PATTERN.match(result_text):
        return result_text.split("_")[0]
    return result_text if result_text.isdecimal() else None
