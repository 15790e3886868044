"""Recurrences token by token in Triton's interpreter: values against float64 loops, bits of chunks and first tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from log_gates import STRENGTHS, gates_of

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.modules import rwkv6
from ejkernel.ops import batch_invariant
from ejkernel.ops.device import current_device
from ejkernel_triton.linear_recurrence.steps import config
from ejkernel_triton.linear_recurrence.steps.forward import forward

TOKENS, HEADS, KEYS, VALUES = 80, 2, 16, 12
KINDS = {
    "a gate per head": ("head",),
    "GLA": ("channels",),
    "KDA": ("channels", "beta"),
    "RWKV-7": ("channels", "low rank"),
    "Mamba-2": ("head", "dt"),
    "gates of keys and values": ("channels", "values"),
}


def record_of(kind, strength, dtype):
    """A record of a kind of recurrence, with keys of length 1."""
    keys = iter(jax.random.split(jax.random.key(0), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    query, key = normal(1, TOKENS, HEADS, KEYS), normal(1, TOKENS, HEADS, KEYS)
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    fields = {"initial_state": normal(1, HEADS, KEYS, VALUES)}
    terms = KINDS[kind]
    fields["decay"] = gates_of(strength, next(keys), (1, TOKENS, HEADS, 1 if "head" in terms else KEYS))
    if "values" in terms:
        fields["value_decay"] = gates_of(strength, next(keys), (1, TOKENS, HEADS, VALUES))
    if "beta" in terms:
        fields["beta"] = jax.nn.sigmoid(normal(1, TOKENS, HEADS))
    if "dt" in terms:
        fields |= {"dt": jax.nn.softplus(normal(1, TOKENS, HEADS)), "skip": normal(1, 1, HEADS)}
    if "low rank" in terms:  # as RWKV-7 has them: removal of what the key reads
        rate = jax.nn.sigmoid(normal(1, TOKENS, HEADS, KEYS))
        fields |= {"low_rank_read": key, "low_rank_write": -rate * key}
    arrays = {"query": query, "key": key, "value": normal(1, TOKENS, HEADS, VALUES)}
    fields |= {name: x.astype(dtype) for name, x in arrays.items()}
    return LinearRecurrence(softmax_scale=0.25, **fields)


def loop(record):
    """Outputs and final state, token by token in float64."""
    names = ("query", "key", "value", "decay", "value_decay", "beta", "dt", "skip", "low_rank_write", "low_rank_read")
    x = {name: getattr(record, name) for name in names}
    x = {name: np.asarray(value, np.float64) for name, value in x.items() if value is not None}
    state, outputs = np.asarray(record.initial_state, np.float64), []
    for t in range(TOKENS):
        before = state
        state = state * np.exp(x["decay"][:, t])[..., None]
        if "value_decay" in x:
            state = state * np.exp(x["value_decay"][:, t])[:, :, None]
        if "low_rank_read" in x:
            read_values = np.einsum("bhkv,bhk->bhv", before, x["low_rank_read"][:, t])
            state = state + x["low_rank_write"][:, t][..., None] * read_values[:, :, None]
        write = x["value"][:, t] * (x["dt"][:, t, :, None] if "dt" in x else 1.0)
        if "beta" in x:
            write = x["beta"][:, t, :, None] * (write - np.einsum("bhkv,bhk->bhv", state, x["key"][:, t]))
        state = state + x["key"][:, t][..., None] * write[:, :, None]
        output = record.softmax_scale * np.einsum("bhkv,bhk->bhv", state, x["query"][:, t])
        outputs.append(output + (x["skip"][0, 0][:, None] * x["value"][:, t] if "skip" in x else 0.0))
    return np.stack(outputs, 1), state


def run(record):
    tile = config.batch_invariant(record, current_device(), "forward")
    return jax.jit(lambda x: forward(x, tile)[0])(record)


def error(x, y):
    """The largest error relative to the largest number."""
    return np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max()


def check_values():
    """Outputs in bfloat16 are rounded once, by the interpreter towards zero; all sums are in float32."""
    for kind in KINDS:
        for strength in STRENGTHS:
            dtype, most = (jnp.bfloat16, 8e-3) if strength == "initial" else (jnp.float32, 2e-6)
            record = record_of(kind, strength, dtype)
            errors = [error(x, y) for x, y in zip(run(record), loop(record), strict=True)]
            assert errors[0] < most, (kind, strength, errors)
            assert errors[1] < 2e-6, (kind, strength, errors)


def packed(record, bounds, slots, indices, tokens=None):
    """The tokens of the record as packed sequences whose states are in slots."""
    fields = ("query", "key", "value", "decay", "beta")
    chosen = {} if tokens is None else {name: getattr(record, name)[:, tokens] for name in fields}
    values = {name: getattr(record, name) for name in fields} | chosen
    return LinearRecurrence(
        **values,
        softmax_scale=record.softmax_scale,
        cu_seqlens=jnp.array(bounds, jnp.int32),
        sequence_state=slots,
        state_slots=jnp.array(indices, jnp.int32),
    )


def check_bits_of_chunks_in_slots():
    """Three sequences in one call, and each in chunks among those of others, token by token at the end."""
    record, slots = record_of("KDA", "harsh", jnp.bfloat16), jnp.zeros((5, HEADS, KEYS, VALUES), jnp.float32)
    ends = (0, 40, 41, TOKENS)
    whole, final = run(packed(record, ends, slots, (3, 0, 4)))
    # The first call has 17 tokens of the first sequence after 30 of the last; the second call has the others.
    first = [*range(41, 71), *range(17)]
    output, slots = run(packed(record, (0, 30, 47), slots, (1, 2), np.array(first)))
    outputs = dict(zip(first, output[0], strict=True))
    second = [40, *range(17, 40), *range(71, TOKENS - 2)]
    output, slots = run(packed(record, (0, 1, 24, 24 + TOKENS - 73), slots, (0, 2, 1), np.array(second)))
    outputs |= dict(zip(second, output[0], strict=True))
    for token in (TOKENS - 2, TOKENS - 1):
        output, slots = run(packed(record, (0, 1), slots, (1,), np.array([token])))
        outputs[token] = output[0, 0]
    together = np.stack([np.asarray(outputs[n]) for n in range(TOKENS)])
    assert together.tobytes() == np.asarray(whole[0]).tobytes()
    assert np.asarray(slots[jnp.array([2, 0, 1])]).tobytes() == np.asarray(final[jnp.array([3, 0, 4])]).tobytes()


def check_bits_of_first_tokens_of_rwkv6():
    """Sequences in a packed row, whose first tokens read initial states, and each in a row alone."""
    keys = jax.random.split(jax.random.key(0), 6)
    r, k, v, w = (jax.random.normal(key, (1, TOKENS, HEADS, KEYS)) for key in keys[:4])
    u, states = jax.random.normal(keys[4], (HEADS, KEYS)), jax.random.normal(keys[5], (3, HEADS, KEYS, KEYS))
    tokens = (r, k, v, -jnp.exp(w - 4))
    ends = (0, 40, 41, TOKENS)
    options = {"cu_seqlens": jnp.array(ends), "return_state": True}
    for reverse in (False, True):
        options["reverse"] = reverse
        want = rwkv6(*tokens, u, initial_state=states, platform="xla", **options)
        with batch_invariant():
            got = rwkv6(*tokens, u, initial_state=states, platform="triton", **options)
            assert max(map(error, got, map(np.asarray, want))) < 2e-6
            for n, (start, end) in enumerate(itertools.pairwise(ends)):
                row, state = (x[:, start:end] for x in tokens), states[n : n + 1]
                alone = rwkv6(*row, u, initial_state=state, reverse=reverse, return_state=True, platform="triton")
                assert np.asarray(alone[0]).tobytes() == np.asarray(got[0][:, start:end]).tobytes()
                assert np.asarray(alone[1]).tobytes() == np.asarray(got[1][n : n + 1]).tobytes()


check_values()
check_bits_of_chunks_in_slots()
check_bits_of_first_tokens_of_rwkv6()
print("same")
