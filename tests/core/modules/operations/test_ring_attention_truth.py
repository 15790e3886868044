"""`ring_attention` in float64 against loops in NumPy: outputs pair by pair, gradients by finite differences."""

import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import ring_calls
from transformed import check_finite_differences

from ejkernel.modules import flash_attention, ring_attention
from ejkernel.types import MaskInfo

# Shapes that split into odd parts, of one token, of other lengths for queries and keys; and the ring that they are on.
CALLS = {
    "striped, all heads on one": (4, {"t": 24, "s": 24, "h": 4, "g": 1, "bias": (2, 4, 24, 24), "sinks": (4, 2)}),
    "odd parts, size 60": (3, {"b": 1, "t": 63, "s": 63, "h": 2, "g": 2, "d": 60, "v": 5, "sinks": (2,)}),
    "one token each": (8, {"t": 8, "s": 8, "h": 8, "g": 1, "bias": (1, 1, 1, 8)}),
    "one query each, more keys": (4, {"b": 1, "t": 4, "s": 12, "bias": (1, 4, 4, 1)}),
    "segments and mask": (2, {"t": 18, "s": 18, "bias": (1, 1, 18, 18), "sinks": (3,)}),
}
OPTIONS = {
    "striped, all heads on one": {"causal": True, "logits_soft_cap": 1.5},
    "odd parts, size 60": {"causal": True},
    "one token each": {"sliding_window": (2, 1)},
    "one query each, more keys": {"causal": True, "sliding_window": (2, None), "softmax_scale": 0.7},
    "segments and mask": {"sliding_window": (None, 9)},
}

pytestmark = pytest.mark.usefixtures("x64")


def masks(name):
    """The parts of a mask, as the loop wants them."""
    if name != "segments and mask":
        return {}
    rng = np.random.default_rng(3)
    ids = np.array([[0] * 7 + [1] * 8 + [-1] * 3, [2] * 18], np.int32)
    mask = rng.random((2, 1, 18, 18)) < 0.7
    mask[:, :, 4] = False
    return {"mask": mask, "q_segment_ids": ids, "kv_segment_ids": np.roll(ids, 1, axis=1)}


@pytest.mark.parametrize("name", CALLS)
def test_ring_outputs_and_all_gradients_are_those_of_a_numpy_loop(name):
    size, shapes = CALLS[name]
    query, key, value, sinks, bias = ring_calls.floats(**shapes)
    parts, options = masks(name), OPTIONS[name]
    loop = naive.Call(query=query, key=key, value=value, bias=bias, softmax_aux=sinks, **parts, **options)
    info = None
    if parts:
        info = MaskInfo(
            _attention_mask=jnp.asarray(parts["mask"]),
            _q_segment_ids=jnp.asarray(parts["q_segment_ids"]),
            _kv_segment_ids=jnp.asarray(parts["kv_segment_ids"]),
        )
    call = functools.partial(ring_calls.spread, mask_info=info, **options, **ring_calls.on(ring_calls.ring(size)))
    there = [jnp.asarray(x) for x in (query, key, value, sinks, bias) if x is not None]

    def given(*arrays):
        rest = iter(arrays)
        return call(*(None if x is None else next(rest) for x in (query, key, value, sinks, bias)))

    check_finite_differences(given, there, range(len(there)))
    got = jax.jit(given, compiler_options=ring_calls.QUICK)(*there)
    np.testing.assert_allclose(got, naive.attention(loop), rtol=1e-9, atol=1e-10)


def test_functions_of_pairs_read_indices_of_the_whole_sequence():
    """On a mesh that splits batch and sequence, with the gradients of all arrays: what `flash_attention` computes."""
    query, key, value, table, _ = ring_calls.floats(t=16, s=16, sinks=(4, 9))
    documents = jnp.array([[0] * 5 + [1] * 11, [0] * 9 + [2] * 7])

    def total(attention, *arrays):
        *arrays, table = arrays
        output = attention(
            *arrays,
            score_mod=lambda s, b, h, q, k: s * (1 + 0.1 * b) + table[h, jnp.clip(q - k, -4, 4) + 4],
            mask_mod=lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q != 3),
            causal=True,
        )
        return jnp.sum(output * jnp.arange(output.shape[-1]))

    mesh, spec = jax.make_mesh((2, 4), ("dp", "sp")), jax.sharding.PartitionSpec("dp", "sp")
    placed = {"mesh": mesh, "in_specs": (spec,) * 3, "out_specs": spec, "axis_name": "sp"}
    arrays = tuple(map(jnp.asarray, (query, key, value, table)))
    ring, whole = (
        jax.jit(jax.value_and_grad(functools.partial(total, attention), range(4)), compiler_options=ring_calls.QUICK)
        for attention in (functools.partial(ring_attention, **placed), flash_attention)
    )
    for got, wanted in zip(jax.tree.leaves(ring(*arrays)), jax.tree.leaves(whole(*arrays)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-10)
