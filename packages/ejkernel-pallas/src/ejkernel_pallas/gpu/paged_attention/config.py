"""Configuration of the paged kernels: its type, the heuristic, and the candidates."""

import dataclasses
from typing import Any

from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperPaged:
    """Configuration of the paged kernel.

    Attributes:
        num_programs: Persistent thread blocks that share the key blocks of a call.
        stages: Blocks of 128 keys and their values in shared memory, at most as many as fit.
        lazy_rescaling: Whether warps in which no row's maximum moved skip rescaling the accumulator.
        prefill_tokens: The number of query tokens from which on flash attention's kernel serves a sequence.
        split_keys: Keys per split, counted from key 0 of a sequence, whose softmaxes are folded in order by both
            kernels; 0 for shares that are cut anywhere. Sums then depend on the other sequences of the call.
        split_doublings: Keys from which on splits are twice as long, if any.
        folds_in_launch: Whether the program that stores the last split of an item folds all of them, instead of a
            second kernel; the bits are the same.
    """

    num_programs: int
    stages: int = 4
    lazy_rescaling: bool = True
    prefill_tokens: int = 32
    split_keys: int = 0
    split_doublings: tuple[int, ...] = ()
    folds_in_launch: bool = False


INVARIANT_SPLIT_KEYS = 1024
"""Keys per split in a `batch_invariant` block: eight blocks of keys.

A fold takes an H200 0.9 us per tile of prefill: 972 us for 8 chunks of 512 tokens at position 8192, 937 with 2048 keys.
But a sequence that decodes alone has as many programs per KV head as splits.
"""
INVARIANT_SPLIT_DOUBLINGS = (8192,)
"""Keys from which on they are twice as long, so that long prompts have fewer folds."""

PUBLIC_FIELDS = {"num_stages": "stages"}
"""Maps fields of the public configurations to fields of this one."""


def heuristic(record: Any, device: DeviceInfo, direction: Direction) -> HopperPaged:
    """Returns one program per multiprocessor."""
    from ejkernel_pallas.gpu.hopper.tile_scheduler import num_multiprocessors

    return HopperPaged(num_programs=num_multiprocessors())


def batch_invariant(record: Any, device: DeviceInfo, direction: Direction) -> HopperPaged:
    """Returns the configuration of a call in a `batch_invariant` block: splits of a fixed number of keys."""
    return dataclasses.replace(
        heuristic(record, device, direction),
        split_keys=INVARIANT_SPLIT_KEYS,
        split_doublings=INVARIANT_SPLIT_DOUBLINGS,
    )


def candidates(record: Any, device: DeviceInfo, direction: Direction) -> tuple[HopperPaged, ...]:
    """Returns candidates: fewer stages, and rescaling always."""
    default = heuristic(record, device, direction)
    return default, dataclasses.replace(default, stages=2), dataclasses.replace(default, lazy_rescaling=False)
