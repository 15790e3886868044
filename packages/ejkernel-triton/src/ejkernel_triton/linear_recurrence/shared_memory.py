"""Pipeline stages that shared memory has room for, where programs hold all key channels of a state.

Triton's compiler decides what a kernel takes; this is an upper bound of what its versions 3.6 and 3.9 do, which a test
holds against them.
"""

from ejkernel.ops.device import current_device
from ejkernel_triton.chips import KIBI, Chip, chip_of
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall

WGMMA_ROWS, WGMMA_WARPS = 64, 4
"""Tokens of a chunk and warps from which on Hopper's products read shared memory, which then holds every stage."""


def state_stages(call: RecurrenceCall, most: int, *, block_k: int, block_v: int, written: bool) -> int:
    """The stages with which the delta rule's state passing fits the chip in use.

    Args:
        call: What the stages share.
        most: The most stages.
        block_k: Key channels of a program's tile of the state, which are all.
        block_v: Value channels.
        written: Whether what tokens write is read, in addition to keys and corrections.
    """
    chip = chip_of(current_device())
    fitting = (n for n in range(most, 1, -1) if _bytes(call, chip, n, (block_k, block_v), written) <= _room(chip))
    return next(fitting, 1)


def _room(chip: Chip) -> int:
    return chip.shared_memory - (KIBI if chip.vendor == "nvidia" else 0)


def _bytes(call: RecurrenceCall, chip: Chip, stages: int, state: tuple[int, int], written: bool) -> int:
    """Bytes of the chunks that are copied ahead and of the state, an operand of the correction's product."""
    size, chunk = call.query.dtype.itemsize, call.spec.CHUNK
    block_k, block_v = state
    unit = chip.architecture in ("hopper", "blackwell")
    # Elsewhere the last stage goes to registers.
    buffers = stages if unit and chunk >= WGMMA_ROWS and call.config.state_warps >= WGMMA_WARPS else stages - 1
    of_chunk = chunk * ((2 * block_k + (block_v if written else 0)) * size + 8)  # and gates in float32
    parts = 2 if size > 2 and chip.vendor == "nvidia" else 1  # float32 is multiplied in two parts
    return buffers * of_chunk + parts * block_k * block_v * size
