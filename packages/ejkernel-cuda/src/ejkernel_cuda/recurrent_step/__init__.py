"""The decode step of linear recurrences in CUDA C++: eight tokens at a time by the tensor cores, states in place."""

from collections.abc import Iterable

from ejkernel.families.linear_recurrence import LinearRecurrence, by_channel
from ejkernel.ops import Implementation, Requires
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_cuda import library

HANDLES = frozenset({"decay", "beta", "dt", "skip", "initial_state", "cu_seqlens", "sequence_state", "state_slots"})
"""Optional fields that the kernel honours beside these two."""

STEP = 8
"""Most tokens a sequence; of packed sequences, on average."""

LONGEST = 256
"""Most tokens of packed sequences beyond one each: one of them may have all, eight of which are worked on at a time."""

FEWEST, FEWEST_CHANNELS = 4, 7
"""Tokens a sequence from which on the kernel is faster than Triton's, and with gates of channels, on an H200
(docs/lab/linear_recurrence_gpu.md)."""

KEYS = (64, 128)
"""Key channels that the kernel is compiled for."""

WARP_VALUES, BLOCK_VALUES = 32, 128
"""Value channels of a warp and of a block."""


def _reasons(record: LinearRecurrence) -> Iterable[str]:
    """What `Requires` has no word for."""
    tokens, sequences = record.query.shape[1], 1
    if record.cu_seqlens is not None:
        sequences = record.cu_seqlens.shape[0] - 1
        if tokens - sequences > LONGEST:
            longest = f"one of {sequences} packed sequences may have {tokens - sequences + 1}"
            yield f"query: {longest} of {tokens} tokens, more than {LONGEST + 1}"
    if tokens > STEP * sequences:
        yield f"query: {tokens} tokens of {sequences} sequences are more than a step of {STEP} tokens a sequence has"
    arrays = (record.query, record.key, record.value, record.initial_state, record.sequence_state)
    if not all(x.size for x in arrays if x is not None) or not sequences:
        yield "an array is empty"
    dtypes = {str(x.dtype) for x in (record.query, record.key, record.value)}
    if len(dtypes) > 1:
        yield f"query, key and value differ in dtype: {', '.join(sorted(dtypes))}"
    yield from _state_reasons(record)


def _state_reasons(record: LinearRecurrence) -> Iterable[str]:
    """What the kernel has against states and gates."""
    keys, columns = record.query.shape[3], record.value.shape[3]
    channels = by_channel(record)
    if keys not in KEYS:
        yield f"{keys} key channels are not among {', '.join(map(str, KEYS))}"
    wanted = BLOCK_VALUES if channels else WARP_VALUES
    if columns % wanted:
        yield f"{columns} value channels are no multiple of {wanted}"
    if record.transposed_states and (channels or record.beta is not None):
        yield "transposed states with gates of channels or with beta"
    for name in ("initial_state", "sequence_state"):
        state = getattr(record, name)
        if state is not None and str(state.dtype) != "float32":
            yield f"{name}: dtype {state.dtype}, wants float32"


def _priority(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> int:
    """Before Triton's step where there are tokens enough, which is slower there; no chip has run it with fewer."""
    sequences = 1 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    fewest = FEWEST_CHANNELS if by_channel(record) else FEWEST
    return 25 if record.query.shape[1] >= fewest * sequences else -1


IMPLEMENTATIONS = (
    Implementation(
        family="linear_recurrence",
        name="cuda_step",
        platform="cuda",
        forward="ejkernel_cuda.recurrent_step.forward:forward",
        requires=Requires(
            devices=frozenset({"nvidia"}),
            modules=(library.MODULE,),
            min_compute_capability=8.0,
            dtypes=frozenset({"float16", "bfloat16"}),
            handles=HANDLES | {"transposed_states", "precision"},
            extra=_reasons,
        ),
        priority=_priority,
        cases="ejkernel_cuda.recurrent_step.cases:cases",
    ),
)
