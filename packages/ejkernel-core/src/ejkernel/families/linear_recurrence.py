"""The chunked linear recurrence family: the record its operations lower to and its meaning.

Every head of every row (or packed sequence) carries a state S of shape [K, V]. For each token t, in order:

    S   = S * exp(decay_t)[:, None] * exp(value_decay_t)[None, :]      log-space gates
    u_t = dt_t * v_t                                                   without beta; dt is 1 if not given
    u_t = beta_t * (v_t - S^T k_t)                                     with beta (the delta rule)
    S   = S + k_t u_t^T
    o_t = softmax_scale * S^T q_t + skip * v_t                         read after write; skip is 0 if not given

So the order is: decay, write, read. A gate of -inf forgets. Tokens with a negative segment id, and tokens of no packed
sequence, leave the state alone and have output 0.

Sources: Katharopoulos et al. 2020 (linear attention); Yang et al. 2023, arXiv:2312.06635 (gated linear attention);
Qin et al. 2024, arXiv:2401.04658 (constant decay); Dao & Gu 2024, arXiv:2405.21060 (state space duality);
Yang et al. 2024, arXiv:2412.06464 (gated delta rule); Kimi Team 2025, arXiv:2510.26692 (decay per channel in it).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family
from ejkernel.planning import packing, slots
from ejkernel.planning.requests import SHARED, packed_requests, segment_owners


@arguments
class LinearRecurrence:
    """Canonical input of one recurrence. B rows, T tokens, H heads, K key channels, V value channels, N sequences.

    Query, key and value may each have fewer heads than H: head h reads head `h // (H // heads)` of them.

    Attributes:
        query: [B, T, Hq, K] floating.
        key: [B, T, Hk, K], same dtype as query.
        value: [B, T, Hv, V] floating.
        softmax_scale: Factor on the output.
        decay: [B|1, T|1, H, K|1] floating, log of the factor on the state's rows.
        value_decay: [B, T, H, V] floating, log of the factor on the state's columns.
        beta: [B, T, H] floating; its presence makes the recurrence a delta rule.
        dt: [B, T, H] floating, factor on what a token writes; not with beta.
        skip: [1, 1, H] floating, factor on what a token's own value adds to its output.
        initial_state: [B, H, K, V] floating, the state before the first token of every row; None is zeros.
        cu_seqlens: [N + 1] int, with B = 1: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]`, and each has a
            state of its own. Empty sequences are allowed.
        sequence_state: [N, H, K, V] floating, the state before each packed sequence; None is zeros. With
            `state_slots`, the slots [S, H, K, V] that hold them.
        state_slots: [N] int, the slot in which each packed sequence has its state; those of sequences with tokens
            differ. Outside of 0 to S - 1: the sequence starts from zeros, and its state is not kept. The final states
            are then the slots, in their dtype, of which only those of sequences with tokens have changed.
        segment_ids: [B, T] int32; a token whose id differs from that of the last real token before it starts from a
            zero state, and negative ids are padding. The first real token continues from the initial state.
        transposed_states: Whether states are [..., V, K], those at the end too.
        precision: Of the matrix products; None for what `ejkernel.planning.precision` says.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    softmax_scale: float = static()
    decay: jax.Array | None = None
    value_decay: jax.Array | None = None
    beta: jax.Array | None = None
    dt: jax.Array | None = None
    skip: jax.Array | None = None
    initial_state: jax.Array | None = None
    cu_seqlens: jax.Array | None = None
    sequence_state: jax.Array | None = None
    segment_ids: jax.Array | None = None
    state_slots: jax.Array | None = None
    transposed_states: bool = static(default=False)
    precision: lax.Precision | None = static(default=None)


class InSlots(NamedTuple):
    """States in slots.

    Attributes:
        slots: [S, H, K, V], or transposed.
        indices: [N] int, the slot of each sequence.
        starts: [N + 1] int, cumulative lengths of the sequences.
    """

    slots: jax.Array
    indices: jax.Array
    starts: jax.Array


TOKEN_FIELDS = ("query", "key", "value", "decay", "value_decay", "beta", "dt", "skip")
"""What every token brings, [B|1, T|1, heads, ...]."""


def accumulator(record: LinearRecurrence) -> Any:
    """The dtype of states and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(record.query.dtype, jnp.float32)


def by_channel(record: LinearRecurrence) -> bool:
    """Whether each key channel has a gate of its own."""
    return record.decay is not None and record.decay.shape[3] > 1


def head_count(record: LinearRecurrence) -> int:
    """H: the heads that have a state of their own."""
    return max(record.query.shape[2], record.value.shape[2])


def with_plain_states(record: LinearRecurrence) -> LinearRecurrence:
    """The record with states [B, H, K, V] or [N, H, K, V]: read out of slots, and not transposed."""
    given = {"initial_state": record.initial_state, "sequence_state": record.sequence_state}
    if (held := in_slots(record)) is not None:
        given["sequence_state"] = slots.read_slots(held.slots, held.indices, held.starts)
    if record.transposed_states:
        given = {name: None if x is None else x.swapaxes(2, 3) for name, x in given.items()}
    return dataclasses.replace(record, **given, state_slots=None, transposed_states=False)


def as_recorded(record: LinearRecurrence, final: jax.Array) -> jax.Array:
    """The final states of a record, from those of the same record with plain states."""
    final = final.swapaxes(2, 3) if record.transposed_states else final
    held = in_slots(record)
    return final if held is None else slots.write_slots(held.slots, held.indices, held.starts, final)


def in_slots(record: LinearRecurrence) -> InSlots | None:
    """The states of packed sequences in slots; None where a record has them elsewhere, or none."""
    held, indices, starts = record.sequence_state, record.state_slots, record.cu_seqlens
    return None if held is None or indices is None or starts is None else InSlots(held, indices, starts)


def states(record: LinearRecurrence) -> jax.Array:
    """The states before the first tokens of a record with plain states: [B, H, K, V], or [N, H, K, V] of packed
    sequences, in the accumulator."""
    given = record.initial_state if record.cu_seqlens is None else record.sequence_state
    if given is not None:
        return given.astype(accumulator(record))
    rows = record.query.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return jnp.zeros((rows, head_count(record), record.query.shape[3], record.value.shape[3]), accumulator(record))


def segment_roles(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which tokens are real and which start from a zero state, both bool [B, T].

    Args:
        segment_ids: [B, T] int, as in `LinearRecurrence`.
    """
    real = segment_ids >= 0
    index = jnp.where(real, jnp.arange(segment_ids.shape[1], dtype=jnp.int32), -1)
    latest = jnp.pad(lax.cummax(index, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    before = jnp.take_along_axis(segment_ids, jnp.maximum(latest, 0), axis=1)
    return real, real & (latest >= 0) & (segment_ids != before)


def reference(record: LinearRecurrence) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """The family's meaning, one token at a time; float64 if query is, else float32.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states, [B, H, K, V] or [N, H, K, V], in the accumulator's;
        those of a record with slots are its slots, and those of one with transposed states are transposed. There are
        no residuals.
    """
    given, record = record, with_plain_states(record)
    packed = record.cu_seqlens is not None

    def step(table: jax.Array, token: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        old = table[token["row"]][None] if packed else table
        new, output = _token(old, token, record.softmax_scale)
        new = jnp.where(token["real"][:, None, None, None], new, old)
        return (table.at[token["row"]].set(new[0]) if packed else new), output

    final, outputs = lax.scan(step, states(record), _tokens(record))
    return (jnp.moveaxis(outputs, 0, 1).astype(record.query.dtype), as_recorded(given, final)), ()


def _token(state: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    """One step: states [B, H, K, V] after it, and its output [B, H, V]."""
    highest = lax.Precision.HIGHEST
    state = jnp.where(token["restart"][:, None, None, None], 0, state)
    if "decay" in token:
        state = state * jnp.exp(token["decay"])[..., :, None]
    if "value_decay" in token:
        state = state * jnp.exp(token["value_decay"])[..., None, :]
    write = token["value"] * token["dt"][..., None] if "dt" in token else token["value"]
    if "beta" in token:
        known = jnp.einsum("bhkv,bhk->bhv", state, token["key"], precision=highest)
        write = token["beta"][..., None] * (write - known)
    state = state + token["key"][..., :, None] * write[..., None, :]
    output = scale * jnp.einsum("bhkv,bhk->bhv", state, token["query"], precision=highest)
    if "skip" in token:
        output = output + token["skip"][..., None] * token["value"]
    return state, jnp.where(token["real"][:, None, None], output, 0)


def _tokens(record: LinearRecurrence) -> dict[str, jax.Array]:
    """What each token brings, each [T, B, ...] with all heads."""
    (rows, length), heads, dtype = record.query.shape[:2], head_count(record), accumulator(record)
    fields = {name: getattr(record, name) for name in TOKEN_FIELDS}
    tokens = {name: x.astype(dtype) for name, x in fields.items() if x is not None}
    tokens = {name: jnp.repeat(x, heads // x.shape[2], axis=2) for name, x in tokens.items()}
    tokens = {name: jnp.broadcast_to(x, (rows, length, *x.shape[2:])) for name, x in tokens.items()}
    real, restart = jnp.ones((rows, length), bool), jnp.zeros((rows, length), bool)
    if record.segment_ids is not None:
        real, restart = segment_roles(record.segment_ids)
    tokens = {**tokens, "real": real, "restart": restart}
    if record.cu_seqlens is not None:
        ids, _ = packing.packed_ids(record.cu_seqlens, length)
        tokens |= {"real": real & (ids >= 0), "row": jnp.maximum(ids, 0)}
    tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()}
    return tokens if record.cu_seqlens is None else {**tokens, "row": tokens["row"][:, 0]}


def localise(record: LinearRecurrence, offsets: Mapping[str, jax.Array]) -> LinearRecurrence:
    """One shard's record as it is: rows and heads know nothing of each other."""
    return record


def axes(record: LinearRecurrence) -> dict[str, Any]:
    """Axis letters of a record's fields and of its outputs: h counts the heads that have a state, g those they share.

    Either queries have a head each and share keys and values, or values have one each and share queries and keys.
    """
    shared_queries = record.query.shape[2] < record.value.shape[2]
    state = "h v k" if record.transposed_states else "h k v"
    return {
        "query": "b t g k" if shared_queries else "b t h k",
        "key": "b t g k",
        "value": "b t h v" if shared_queries else "b t g v",
        "decay": "b t h k",
        "value_decay": "b t h v",
        "beta": "b t h",
        "dt": "b t h",
        "skip": "b t h",
        "initial_state": f"b {state}",
        "cu_seqlens": "n",
        "sequence_state": f"n {state}",
        "segment_ids": "b t",
        "state_slots": "n",
        # Final states of packed sequences have b = N there: a packed call has one row, which cannot be split.
        "output": ("b t h v", f"b {state}"),
    }


def requests(record: LinearRecurrence) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: packed sequences, segments of rows, or the rows."""
    if record.cu_seqlens is not None:
        return (packed_requests(record.cu_seqlens, record.query.shape[1], record.sequence_state, record.state_slots),)
    if record.segment_ids is None:
        return ({"b": np.arange(record.query.shape[0])},)
    owners = segment_owners(record.segment_ids)
    first, last = (
        np.array([next((x for x in row if x >= 0), SHARED) for row in rows]) for rows in (owners, owners[:, ::-1])
    )
    # The first segment of a row continues its initial state, and the last one leaves the final state.
    return ({"b t": owners, "initial_state": first[:, None, None, None], "output.1": last[:, None, None, None]},)


FAMILY = Family(
    name="linear_recurrence",
    record=LinearRecurrence,
    differentiable=(*TOKEN_FIELDS, "initial_state", "sequence_state"),
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (record.query.shape[-1], record.value.shape[-1]),
    axes=axes,
    shardable="bhg",
    aligned=(("h", "g"),),
    localise=localise,
    reference=reference,
    requests=requests,
)
