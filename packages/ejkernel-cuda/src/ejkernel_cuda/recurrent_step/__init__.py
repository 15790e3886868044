"""The decode step of linear recurrences in CUDA C++: up to eight tokens at a time on tensor cores, updating states
in place.
"""

from collections.abc import Iterable

from ejkernel.families.linear_recurrence import LinearRecurrence, has_decay_per_channel
from ejkernel.ops import Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.decode_lengths import MAX_EXTRA_TOKENS, length_refusals
from ejkernel_cuda.requirements import cuda_requires

HANDLED_FIELDS = frozenset(
    {
        "decay",
        "beta",
        "dt",
        "skip",
        "initial_state",
        "cu_seqlens",
        "sequence_state",
        "state_slots",
        "parents",
        "keeps_token_states",
    }
)
"""Optional fields that the kernel honours."""

MIN_TOKENS_FOR_PRIORITY = 4
"""The number of tokens per sequence from which on the kernel is faster than Triton's on an H200
(docs/lab/linear_recurrence_gpu.md).
"""

MAX_TREE_TOKENS = 64
"""The tokens of a tree, on average, up to which the kernel comes before Triton's."""

KEY_DIMS = (64, 128)
"""Key dimensions that the kernel is compiled for."""

CHUNK_SIZE = 8
"""Tokens of a sequence that are processed together, one chunk after another."""

VALUE_CHANNELS_PER_WARP, VALUE_CHANNELS_PER_BLOCK = 32, 128
"""Value channels per warp and per block."""


def _refusal_reasons(record: LinearRecurrence) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    yield from length_refusals("query", record.query.shape[1], record.cu_seqlens, CHUNK_SIZE * MAX_EXTRA_TOKENS)
    if record.parents is not None:
        if record.keeps_token_states:
            yield "parents: got trees whose states are returned, the kernel returns their outputs alone"
        if has_decay_per_channel(record):
            yield "parents: got gates per key channel, the kernel reads trees with gates per head"
    if record.cu_seqlens is not None and record.cu_seqlens.shape[0] == 1:
        yield "cu_seqlens: there is no sequence"
    dtypes = {str(x.dtype) for x in (record.query, record.key, record.value)}
    if len(dtypes) > 1:
        yield f"query: got other dtypes of key or value, wants one dtype instead of {', '.join(sorted(dtypes))}"
    yield from _state_refusal_reasons(record)


def _state_refusal_reasons(record: LinearRecurrence) -> Iterable[str]:
    """Yields the reasons why the kernel cannot serve the record's states and gates."""
    keys, columns = record.query.shape[3], record.value.shape[3]
    gates_channels = has_decay_per_channel(record)
    if keys not in KEY_DIMS:
        yield f"query: got head dimension {keys}, the kernel wants one of {', '.join(map(str, KEY_DIMS))}"
    required_multiple = VALUE_CHANNELS_PER_BLOCK if gates_channels else VALUE_CHANNELS_PER_WARP
    if columns % required_multiple:
        yield f"value: got head dimension {columns}, the kernel wants a multiple of {required_multiple}"
    if record.transposed_states and (gates_channels or record.beta is not None):
        yield "initial_state: got transposed states, which the kernel does not read with beta or gates per key channel"
    for name in ("initial_state", "sequence_state"):
        state = getattr(record, name)
        if state is not None and str(state.dtype) != "float32":
            yield f"{name}: dtype {state.dtype}, wants float32"


def _priority(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above that of Triton's step if there are enough tokens for it to be faster; fewer were not
    measured.
    """
    sequences = 1 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    if record.parents is not None:
        # A packed tree may have all tokens but one of every other; its paths are read token by token.
        return 25 if record.query.shape[1] - sequences <= MAX_TREE_TOKENS * sequences else -1
    return 25 if record.query.shape[1] >= MIN_TOKENS_FOR_PRIORITY * sequences else -1


IMPLEMENTATIONS = (
    Implementation(
        family="linear_recurrence",
        name="cuda",
        platform="cuda",
        forward="ejkernel_cuda.recurrent_step.forward:forward",
        requires=cuda_requires(
            8.0,
            {"float16", "bfloat16"},
            handles=HANDLED_FIELDS | {"transposed_states", "precision"},
            extra_reasons=_refusal_reasons,
        ),
        priority=_priority,
        cases="ejkernel_cuda.recurrent_step.cases:cases",
    ),
)
