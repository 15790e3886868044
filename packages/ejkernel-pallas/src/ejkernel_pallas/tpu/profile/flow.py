"""Finds the control flow of a kernel: basic blocks, branches and loops over its bundles."""

import dataclasses
from collections.abc import Mapping, Sequence

from ejkernel_pallas.tpu.profile.bundles import Bundle, Instruction


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch.

    Attributes:
        instruction: The branch instruction.
        target: The bundle that it jumps to; None if the region does not exist.
        delay_slots: Delay slots: bundles after the branch that are still executed.
    """

    instruction: Instruction
    target: int | None
    delay_slots: int


@dataclasses.dataclass(frozen=True)
class BasicBlock:
    """A basic block: bundles `start` to `end`, exclusive; only the first is a jump target.

    The delay slots of a branch may run into the next block; they belong to both.

    Attributes:
        start: The first bundle, which identifies the block.
        end: The bundle after the last.
        branch: The bundle with the branch that ends it; None if it falls through.
        fallthrough_bundle: The next bundle if the branch is not taken.
    """

    start: int
    end: int
    branch: int | None
    fallthrough_bundle: int


@dataclasses.dataclass(frozen=True)
class ControlFlow:
    """The control flow of a kernel.

    Attributes:
        blocks: The basic blocks, by their first bundle.
        branches: The branches, by their bundle.
    """

    blocks: Mapping[int, BasicBlock]
    branches: Mapping[int, Branch]


def find_control_flow(bundles: Sequence[Bundle], max_delay_slots: int) -> ControlFlow:
    """Splits bundles into blocks, given that up to `max_delay_slots` bundles after a branch are still executed."""
    regions: dict[int, int] = {}
    for k, bundle in enumerate(bundles):
        for region in bundle.started_regions:
            regions.setdefault(region, k)
    branches = {
        k: Branch(instruction, regions.get(instruction.branch_region), _delay_slots(bundles, k, max_delay_slots))
        for k, bundle in enumerate(bundles)
        for instruction in bundle.instructions
        if instruction.branch_region is not None
    }
    targets = {branch.target for branch in branches.values() if branch.target is not None}
    block_starts = sorted(
        k for k in {0, *targets, *(k + branch.delay_slots + 1 for k, branch in branches.items())} if k < len(bundles)
    )
    ends = [*block_starts[1:], len(bundles)]
    blocks = {
        start: _make_basic_block(start, end, branches, len(bundles))
        for start, end in zip(block_starts, ends, strict=True)
    }
    return ControlFlow(blocks, branches)


def _delay_slots(bundles: Sequence[Bundle], branch: int, max_delay_slots: int) -> int:
    """Returns the number of bundles after a branch that are still executed; v7x has fewer if the next region starts
    earlier.
    """
    after = bundles[branch + 1 : branch + 1 + max_delay_slots]
    return next((count for count, bundle in enumerate(after) if bundle.started_regions), max_delay_slots)


def _make_basic_block(start: int, end: int, branches: Mapping[int, Branch], count: int) -> BasicBlock:
    branch = next((k for k in reversed(range(start, end)) if k in branches), None)
    if branch is None:
        return BasicBlock(start, end, None, end)
    after = branch + branches[branch].delay_slots + 1
    end = min(max(end, after), count)
    taken_somewhere = branches[branch].target is not None
    return BasicBlock(start, end, branch, min(after, end) if taken_somewhere else end)


@dataclasses.dataclass(frozen=True)
class LoopSpan:
    """A loop of a schedule.

    Attributes:
        start: Its first bundle.
        end: Its last bundle.
        depth: The number of loops that it is in, itself included.
    """

    start: int
    end: int
    depth: int


def find_loops(bundles: Sequence[Bundle], control_flow: ControlFlow) -> tuple[LoopSpan, ...]:
    """Returns the loops (backward branches), outer before inner."""
    found = [
        LoopSpan(branch.target, min(k + branch.delay_slots, len(bundles) - 1), max(bundles[branch.target].depth, 1))
        for k, branch in control_flow.branches.items()
        if branch.target is not None and branch.target <= k
    ]
    return tuple(sorted(found, key=lambda loop: (loop.start, -loop.end)))
