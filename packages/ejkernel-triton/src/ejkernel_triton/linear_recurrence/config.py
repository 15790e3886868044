"""Chunks, tiles and launch parameters of the linear recurrence kernels."""

import dataclasses
from typing import Any

from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence, by_channel, head_count
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import interpreting
from ejkernel_triton.sizes import padded

MIN_TILE = 16
"""Smallest side of a tile that `tl.dot` takes, in tokens or channels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPasses:
    """Configuration of both passes, which share the chunks between whose states they pass.

    Attributes:
        chunk: Tokens a chunk of the forward pass; lowered to a power of two, and raised to 16.
        backward_chunk: Tokens a chunk of the backward pass. Where it is another, nothing is kept for the backward pass,
            which makes gates and states again.
        splits: Segments of a row whose chunks are walked at the same time, for calls of few rows and heads.
        keep_states: Whether the backward pass is given the chunk states, instead of making them again.
        state_block_k: Key channels of a tile of the state that a program passes from chunk to chunk.
        state_block_v: Value channels of it.
        state_warps: Warps of such a program.
        state_stages: Pipeline stages: chunks whose copies are in flight, plus one; in the delta rule fewer where shared
            memory has no room for as many.
        score_block_k: Key channels at once, where the scores of pairs of tokens with gates of channels are made.
        score_warps: Warps of a program there.
        score_stages: Its pipeline stages.
        output_block_t: Tokens of a program that makes outputs, at most a chunk; with gates of channels always that.
        output_block_k: Key channels at once, where outputs and gradients of values are made.
        output_block_v: Value channels of a program there.
        output_warps: Warps of it.
        output_stages: Its pipeline stages.
        gradient_block_k: Key channels of a program, where gradients of queries, keys and gates are made.
        gradient_block_v: Value channels at once there.
        gradient_warps: Warps of it.
        gradient_stages: Its pipeline stages.
        walk: Whether one kernel makes states and outputs forwards, with no state in memory; else `output_*` count, and
            `state_*` do for more than segments. With gradients and `keep_states` two kernels do.
        walk_block_v: Value channels of a program that walks; it has all key channels.
        walk_warps: Warps of it.
        walk_stages: Its pipeline stages.
    """

    chunk: int
    backward_chunk: int
    splits: int
    keep_states: bool
    state_block_k: int
    state_block_v: int
    state_warps: int
    state_stages: int
    score_block_k: int
    score_warps: int
    score_stages: int
    output_block_t: int
    output_block_k: int
    output_block_v: int
    output_warps: int
    output_stages: int
    gradient_block_k: int
    gradient_block_v: int
    gradient_warps: int
    gradient_stages: int
    walk: bool
    walk_block_v: int
    walk_warps: int
    walk_stages: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "_block_" in field.name and (value < MIN_TILE or value & (value - 1)):
                raise ValueError(f"{field.name}: got {value}, wants a power of two from {MIN_TILE} on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrencePasses(ChunkPasses):
    """Configuration of both passes without the delta rule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPasses(ChunkPasses):
    """Configuration of both passes of the delta rule.

    Corrections, which with gates of channels make the scores too, have `score_warps` and `score_stages`.

    Attributes:
        correction_block_k: Key channels at once, where corrections are made.
        correction_block_v: Value channels at once there.
        reverse_block_v: Value channels of a program that passes gradients of states, from the last chunk to the first;
            it has all key channels.
        reverse_warps: Warps of it.
        reverse_stages: Its pipeline stages; fewer where shared memory has no room for as many chunks.
    """

    correction_block_k: int
    correction_block_v: int
    reverse_block_v: int
    reverse_warps: int
    reverse_stages: int


FACES = {
    "block_q": "chunk",
    "chunk_size": "chunk",
    "block_k": "output_block_k",
    "block_d": "output_block_v",
    "num_warps": "output_warps",
    "num_stages": "output_stages",
}
"""Fields of the public configurations and what they set here."""


def heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> RecurrencePasses:
    """Chunks and tiles for a record on a device, not measured."""
    default = RecurrencePasses(**_fields(sized(record, device, 64)))
    # A walk waits for itself from chunk to chunk: with few of them, chunks at the same time are faster.
    if not interpreting() and 4 * _walks(record, default) < 3 * chip_of(device).multiprocessors:
        return default
    return _walking(record, device, default)


def _fields(made: ChunkPasses) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


def _walks(record: LinearRecurrence, config: ChunkPasses) -> int:
    """Programs that make states and outputs in one walk, with as many value channels as states have there."""
    tiles = -(-record.value.shape[3] // config.state_block_v)
    return record.query.shape[0] * _sequences(record) * head_count(record) * tiles * config.splits


def _sequences(record: LinearRecurrence) -> int:
    return 1 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1


def _walking(record: LinearRecurrence, device: DeviceInfo, default: RecurrencePasses) -> RecurrencePasses:
    """The configuration that makes states and outputs in one walk; the default where the kernel does not fit."""
    if by_channel(record):
        return default
    if interpreting():
        return default if record.cu_seqlens is None else dataclasses.replace(default, walk=True)
    if not _fits_walk(record, device):
        return default
    # One walk a multiprocessor: 3 stages 0.250 ms, 2 stages 0.335. Several segments: 2 stages, of which two find room,
    # 0.634 ms for 65536 tokens, 3 stages 0.724; but packed sequences, of which the longest decide, 0.340 and 0.301
    # (docs/lab/linear_recurrence_gpu.md).
    many = record.cu_seqlens is None and _walks(record, default) > chip_of(device).multiprocessors
    if record.dt is not None or record.skip is not None:
        # 1.07 ms instead of 1.59 for Mamba-2, though 8 bytes a thread spill; with gradients two kernels.
        return dataclasses.replace(default, walk=True, walk_stages=2)
    # Without states kept, since they are most of what a call with gradients would keep: 1.27 ms instead of 1.24.
    return dataclasses.replace(default, walk=True, walk_stages=2 if many else 3, keep_states=False)


def _fits_walk(record: LinearRecurrence, device: DeviceInfo) -> bool:
    """Whether a walk's state and tiles fit: float16 has not the range, float32 takes twice the shared memory."""
    chip = chip_of(device)  # only Hopper was measured
    wide = record.query.dtype.name != "bfloat16" or record.precision == lax.Precision.HIGHEST
    return chip.architecture == "hopper" and not wide and padded(record.query.shape[3], MIN_TILE) <= 128


def candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[RecurrencePasses, ...]:
    """Configurations worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    if interpreting():
        other = dataclasses.replace(default, chunk=MIN_TILE, keep_states=False)
        walks = record.cu_seqlens is None and not by_channel(record)
        return (default, dataclasses.replace(other, walk=walks), dataclasses.replace(other, walk=False, splits=1))
    walking = _walking(record, device, default)
    made = [dataclasses.replace(default, walk=False), dataclasses.replace(default, walk=False, keep_states=False)]
    if not by_channel(record):
        made += [dataclasses.replace(made[0], chunk=2 * default.chunk, output_block_v=2 * default.output_block_v)]
    if walking.walk:
        made += [dataclasses.replace(walking, walk_stages=n) for n in (2, 3)]
        made += [dataclasses.replace(walking, walk_block_v=32, walk_stages=2)]
        # Segments of a row that are walked at the same time.
        made += [dataclasses.replace(walking, splits=n) for n in (default.splits // 2, 2 * default.splits) if n > 1]
    made += [
        dataclasses.replace(x, gradient_block_k=n, gradient_stages=1) for x in (walking, *made[:3]) for n in (64, 32)
    ]
    made += [dataclasses.replace(default, walk=False, state_block_k=32, splits=2 * default.splits)]
    return tuple(dict.fromkeys((default, *made)))


def kind_of_large(record: LinearRecurrence) -> str | None:
    """What calls have in common that share an entry of a table: those with work for a large GPU without splits."""
    rows, tokens, _, keys = record.query.shape
    if record.cu_seqlens is not None or tokens < 1024 or rows * head_count(record) < 64:
        return None
    gates = "no" if record.decay is None else "channel" if by_channel(record) else "head"
    bits = 8 * record.query.dtype.itemsize  # bfloat16 and float16 move and multiply alike
    words = [f"{bits} bits", f"{padded(keys, MIN_TILE)}x{padded(record.value.shape[3], MIN_TILE)}", f"{gates} gates"]
    words += ["shared keys"] if _shares_keys(record) else []
    return " ".join(words if record.precision is None else [*words, str(record.precision)])


def sized(record: LinearRecurrence, device: DeviceInfo, chunk: int) -> ChunkPasses:
    """The configuration for chunks of a length.

    Args:
        record: The canonical arguments.
        device: What it runs on.
        chunk: Tokens a chunk.
    """
    chip = chip_of(device)
    wide = record.query.dtype.itemsize > 2 or record.precision == lax.Precision.HIGHEST
    small = wide or chip.shared_memory < 128 * 1024
    keys, values = (padded(x.shape[3], MIN_TILE) for x in (record.query, record.value))
    most = 16 if interpreting() else 64
    short = wide or (chip.architecture == "ada" and by_channel(record))  # half as many registers hold the pairs
    chunk = max(MIN_TILE, min(chunk, 32 if short else chunk, padded(record.query.shape[1], MIN_TILE)))
    backward_chunk = chunk
    if interpreting():
        chunk, backward_chunk = (MIN_TILE if by_channel(record) else 2 * MIN_TILE), MIN_TILE
    half = 32 if small else most
    warps = 8 if backward_chunk > 64 else 4
    hopper = chip.architecture == "hopper" and not wide
    gradient_block_k, gradient_warps = _gradient_tile(record, warps, hopper)
    # Measured on an H200 with chunks of 64 and K, V of 128 (docs/lab/linear_recurrence_gpu.md): states 64 x 64, 4 warps
    # and 3 stages 0.172 ms, 32 x 64 and 2 warps 0.189, 128 x 64 0.246; outputs 4 warps 0.220 ms, 8 warps 0.268, since
    # 64 rows are one warpgroup's; scores 64 channels 0.654 ms, 32 channels 0.866.
    return ChunkPasses(
        chunk=chunk,
        backward_chunk=backward_chunk,
        splits=_splits(record, chip.multiprocessors, chunk, min(keys, most), min(values, most)),
        keep_states=True,
        state_block_k=min(keys, most),
        state_block_v=min(values, most),
        state_warps=4,
        state_stages=2 if small else 3,
        score_block_k=min(keys, half, most, 64 if chip.architecture in ("hopper", "blackwell") else 32),
        score_warps=4,
        score_stages=1,
        output_block_t=MIN_TILE if interpreting() else 64,
        output_block_k=min(keys, half, most),
        output_block_v=min(values, 2 * most if by_channel(record) and not small else most),
        output_warps=warps,
        output_stages=1 if small else 2,
        gradient_block_k=min(keys, half, most, gradient_block_k),
        gradient_block_v=min(values, half, most),
        gradient_warps=gradient_warps,
        # Gates of channels with 32 key channels: 2.61 ms with 1 stage; in the delta rule 3.811 with 2, 3.890 with 1.
        gradient_stages=1 if small or (hopper and by_channel(record) and record.beta is None) else 2,
        walk=False,
        walk_block_v=min(values, 64),
        walk_warps=4,
        walk_stages=2 if small else 3,
    )


def _delta_forward(record: LinearRecurrence, device: DeviceInfo) -> ChunkPasses:
    """Chunks and tiles of the forward pass for a record with beta on a device."""
    made, multiprocessors = sized(record, device, 64), chip_of(device).multiprocessors
    columns, block = record.value.shape[3], made.state_block_v
    walks, splits = record.query.shape[0] * _sequences(record) * head_count(record), made.splits
    if not interpreting():
        # Segments of a row are walked twice before, for which a multiprocessor a walk is enough: 65536 tokens of 16
        # heads take 2.43 ms with 4, 2.55 with 8, and 2.66 with none and narrow tiles.
        splits = multiprocessors // (walks * -(-columns // block)) if _fits_walk(record, device) else 1
        splits = max(1, min(splits, record.query.shape[1] // (16 * made.chunk))) if record.cu_seqlens is None else 1
    # A walk has all key channels of a state, so there are fewer of them: they are made narrower to fill the chip.
    enough = 3 * multiprocessors // 4
    while not interpreting() and block > MIN_TILE and walks * splits * -(-columns // block) < enough:
        block //= 2
    return dataclasses.replace(
        made,
        chunk=min(made.chunk, 64),  # the triangular matrices of 128 tokens do not fit the registers
        splits=splits,
        state_block_v=block,
        output_block_v=min(made.output_block_v, 64),
    )


def delta_heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> DeltaPasses:
    """Chunks and tiles of both passes for a record with beta on a device, not measured."""
    made, chip = _delta_forward(record, device), chip_of(device)
    small, hopper = chip.shared_memory < 128 * 1024, chip.architecture == "hopper"
    keys, values = padded(record.query.shape[3], MIN_TILE), padded(record.value.shape[3], MIN_TILE)
    # Programs that pass states hold all key channels: those of one pass or the other spill with more than 32 columns,
    # but on Hopper.
    block = min(made.state_block_v, 64 if hopper else 32)
    fields: dict[str, Any] = _fields(made) | {
        "backward_chunk": made.chunk,
        "state_block_v": block,
        "state_stages": 1 if small and (by_channel(record) or record.decay is None) else made.state_stages,
        # A program has three products at a time.
        "gradient_block_k": min(made.gradient_block_k, 64 if hopper else MIN_TILE if small else 32),
        "gradient_block_v": min(made.gradient_block_v, MIN_TILE if small else 64),
        "walk": record.cu_seqlens is not None if interpreting() else _delta_walks(record, device, block),
        "walk_block_v": block,
        "correction_block_k": made.score_block_k,
        "correction_block_v": made.output_block_v,
    }
    if hopper and record.query.dtype.itemsize == 2 and not interpreting():
        # Of a gate a head, corrections of all channels at once take 0.237 ms instead of 0.269 with 64; with gates of
        # channels, 0.57 instead of 0.60.
        # Packed and with a gate a head, masks take registers, and 64 leave room for a third program: 0.738 ms, not
        # 0.753.
        most = 64 if record.cu_seqlens is not None and not by_channel(record) else 128
        fields |= {"correction_block_k": min(keys, most), "correction_block_v": min(values, most)}
        fields["output_block_v"] = min(values, 128 if by_channel(record) else 64)
    return DeltaPasses(**fields, reverse_block_v=block, reverse_warps=4, reverse_stages=1 if small else 2)


def _delta_walks(record: LinearRecurrence, device: DeviceInfo, block: int) -> bool:
    """Whether one kernel makes states and outputs of a delta rule."""
    # With a gate a head it takes 0.713 ms where two kernels take 0.712, and with gradients 2.375 instead of 2.180; of
    # packed sequences 0.763 instead of 1.045 (docs/lab/linear_recurrence_gpu.md).
    wins = record.decay is not None and (by_channel(record) or record.cu_seqlens is not None)
    return wins and block == 64 and _fits_walk(record, device)


def delta_candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[DeltaPasses, ...]:
    """Configurations of both passes worth measuring for a record with beta on a device."""
    default = delta_heuristic(record, device, direction)
    if interpreting():
        return (default, dataclasses.replace(default, keep_states=False, walk=not default.walk, splits=1))
    made = [dataclasses.replace(default, walk=False, keep_states=keep) for keep in (True, False)]
    made += [dataclasses.replace(default, splits=n) for n in (default.splits // 2, 2 * default.splits) if n > 1]
    columns = [n for n in (16, 32, 64) if _holds_state(record, device, n)]
    made += [dataclasses.replace(made[0], state_block_v=n) for n in columns]
    made += [dataclasses.replace(default, correction_block_k=64, correction_block_v=64)]
    made += [dataclasses.replace(default, reverse_block_v=n) for n in columns]
    made += [dataclasses.replace(default, reverse_warps=8)]
    made += [dataclasses.replace(default, gradient_block_k=n, gradient_stages=1) for n in (16, 32, 64)]
    return tuple(dict.fromkeys((default, *made)))


def _holds_state(record: LinearRecurrence, device: DeviceInfo, columns: int) -> bool:
    """Whether shared memory holds all key channels of so many columns of a state, and of a chunk of keys."""
    chip, size = chip_of(device), record.query.dtype.itemsize
    parts = 2 if size > 2 and chip.vendor == "nvidia" else 1  # float32 is multiplied in two parts
    rows = parts * columns + (32 if size > 2 else 64)
    return padded(record.query.shape[3], MIN_TILE) * rows * size <= chip.shared_memory


def _gradient_tile(record: LinearRecurrence, warps: int, hopper: bool) -> tuple[int, int]:
    """Key channels and warps of a program that makes gradients of queries and keys: what registers have room for."""
    if by_channel(record):
        # Each halving adds to both gradients, which are float32 in registers. On Hopper 32 take 2.61 ms instead of
        # 3.30, and with the delta rule, where they spill 112 bytes a thread, 3.811 instead of 4.716
        # (docs/lab/linear_recurrence_gpu.md). Sums over heads that share a query or key were not measured.
        heads = head_count(record) if record.beta is None else 0
        return (16 if not hopper or heads > min(record.query.shape[2], record.key.shape[2]) else 32), 4
    return (32, 4) if _shares_keys(record) else (64, warps)


def _shares_keys(record: LinearRecurrence) -> bool:
    return head_count(record) > record.key.shape[2]


def _splits(record: LinearRecurrence, multiprocessors: int, chunk: int, block_k: int, block_v: int) -> int:
    """Segments of a row: one where rows, heads and tiles of states give every multiprocessor a walk already."""
    if record.cu_seqlens is not None:
        return 1
    if interpreting():
        return 2
    rows, tokens, _, keys = record.query.shape
    tiles = -(-keys // block_k) * -(-record.value.shape[3] // block_v)
    # A walk is sequential: its chunks wait for each other, so fewer walks than multiprocessors leave some idle.
    walks = rows * head_count(record) * tiles
    if walks >= multiprocessors:
        return 1
    # Segments cost a second walk over the keys and values; none gets shorter than 16 chunks.
    return max(1, min(2 * multiprocessors // walks, tokens // (16 * chunk)))
