"""The decode step of the selective scan in Triton: one to eight tokens a sequence, the states updated in place."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families import selective_scan
from ejkernel.families.selective_scan import ScanResiduals, SelectiveScan
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.sizes import padded

HELD = 16
"""Numbers of a state that a thread holds, and of A as many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTile:
    """Configuration of the decode step.

    Attributes:
        block_e: Channels of a program; a power of two.
        num_warps: Warps a program.
    """

    block_e: int
    num_warps: int

    def __post_init__(self) -> None:
        if self.block_e < 1 or self.block_e & (self.block_e - 1):
            raise ValueError(f"block_e: got {self.block_e}, wants a power of two")


FACES = {"block_d": "block_e", "num_warps": "num_warps"}
"""Fields of the public configuration and what they set here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Constants of the kernel.

    Attributes:
        T: Tokens of a row.
        SEQUENCES: Packed sequences of a row; 1 without packing.
        E: Channels.
        N: Numbers of a channel's state.
        BLOCK_E: Channels of a program.
        BLOCK_N: N, padded to a power of two.
        TILES: Programs of a sequence.
        PACKED: Whether sequences are packed.
        STATE: Whether there are states to begin with.
        SLOTS: How many slots hold them; 0 where they are in no slots.
        IN_PLACE: Whether the final states have the memory of those to begin with, and are read from there.
    """

    T: int
    SEQUENCES: int
    E: int
    N: int
    BLOCK_E: int
    BLOCK_N: int
    TILES: int
    PACKED: bool
    STATE: bool
    SLOTS: int
    IN_PLACE: bool


def make_spec(record: SelectiveScan, config: StepTile) -> StepSpec:
    """The constants of a record's kernel."""
    (_, tokens, channels), size, states = record.x.shape, record.decay.shape[1], record.initial_state
    packed = record.cu_seqlens is not None
    slots = 0 if states is None or record.state_slots is None else states.shape[0]
    return StepSpec(
        T=tokens,
        SEQUENCES=sequences(record) if packed else 1,
        E=channels,
        N=size,
        BLOCK_E=config.block_e,
        BLOCK_N=padded(size),
        TILES=-(-channels // config.block_e),
        PACKED=packed,
        STATE=states is not None,
        SLOTS=slots,
        IN_PLACE=states is not None and (slots > 0 or states.dtype == jnp.float32),
    )


def sequences(record: SelectiveScan) -> int:
    """Rows, or packed sequences."""
    return record.x.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1


def heuristic(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> StepTile:
    """The tile for a record on a device, not measured."""
    if interpreting():
        return StepTile(block_e=16, num_warps=1)
    lanes, numbers = 64 if device.vendor == "amd" else 32, padded(record.decay.shape[1])
    block, programs = max(1, 4 * HELD * lanes // numbers), sequences(record)
    block = min(block, padded(record.x.shape[2]))
    # Few states are cut finer, to reach every multiprocessor.
    while block * numbers > 16 * lanes and programs * -(-record.x.shape[2] // block) < chip_of(device).multiprocessors:
        block //= 2
    return _sized(block, numbers, lanes)


def _sized(block: int, numbers: int, lanes: int) -> StepTile:
    return StepTile(block_e=block, num_warps=max(1, min(8, block * numbers // (HELD * lanes))))


def candidates(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> tuple[StepTile, ...]:
    """Tiles worth measuring for a record on a device."""
    first = heuristic(record, device, direction)
    if interpreting():
        return (first, StepTile(block_e=4, num_warps=1))
    sizes = [max(1, first.block_e * n // 4) for n in (1, 2, 4, 8)]
    made = [StepTile(block_e=n, num_warps=max(1, first.num_warps * n // first.block_e)) for n in sizes]
    made += [dataclasses.replace(x, num_warps=2 * x.num_warps) for x in made if x.num_warps < 8]
    return tuple(dict.fromkeys((first, *made)))


def forward(record: SelectiveScan, config: StepTile) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Output and final states of a record.

    States in float32, and slots of any dtype, are updated in their own memory: XLA copies them before only if they are
    used elsewhere, as those of a call that does not donate them are.

    Args:
        record: The canonical arguments.
        config: The tile.

    Returns:
        Output [B, T, I] in x's dtype, final states in float32 or the slots, and what a backward pass needs.
    """
    from ejkernel_triton.selective_scan.step_kernel import scan_step_kernel

    spec, rows = make_spec(record, config), record.x.shape[0]
    bounds, slots, initial = record.cu_seqlens, record.state_slots, record.initial_state
    if spec.PACKED:
        bounds, slots, initial = (None if x is None else x[None] for x in (bounds, slots, initial))
        bounds, slots = (None if x is None else x.astype(jnp.int32) for x in (bounds, slots))
    fields = (record.x, record.step, record.decay[None], record.write, record.read, record.skip[None])
    inputs = (*fields, bounds, slots, initial)
    states = (spec.SEQUENCES, spec.E, spec.N) if spec.PACKED else (spec.E, spec.N)
    final, output = launch(
        scan_step_kernel,
        inputs,
        (
            # The number of an input says that the output is written to its memory.
            len(inputs) - 1 if spec.IN_PLACE else Shape((rows, *states), jnp.float32),
            Shape(record.x.shape, record.x.dtype),
        ),
        batch=rows,
        grid=rows * spec.SEQUENCES * spec.TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    # XLA makes the residuals of calls that have a backward pass, and drops those of the others.
    return (output, final[0] if spec.PACKED else final), selective_scan.reference(record)[1]
