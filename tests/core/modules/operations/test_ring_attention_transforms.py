"""`ring_attention` under JAX's transformations, over two devices; and whatever masks hypothesis thinks of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ring_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transformed import check_no_new_compilations, check_transforms

from ejkernel.types import MaskInfo

T = 12
OPTIONS = {"logits_soft_cap": 3.0, "cfg": ring_calls.tiles(6, 6)}


def arrays(seed):
    rng = np.random.default_rng(seed)
    shapes = ((1, T, 4, 8), (1, T, 2, 8), (1, T, 2, 8), (4, 2), (1, 4, 1, T))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def everywhere(*given):
    """The arrays on both devices: an exported function of two devices is called on two."""
    return jax.device_put(given, NamedSharding(ring_calls.ring(2), P()))


def call(query, key, value, sinks, bias, ids):
    info = MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids)
    return ring_calls.spread(
        query, key, value, sinks, bias, mask_info=info, **OPTIONS, **ring_calls.on(ring_calls.ring(2))
    )


def ids(*lengths):
    found = [n for n, length in enumerate(lengths) for _ in range(length)]
    return jnp.array([found + [-1] * (T - len(found))], jnp.int32)


def test_jit_checkpoint_export_and_vmap():
    check_transforms(call, everywhere(*arrays(0), ids(5, 7)), range(5), everywhere(*arrays(1), ids(2, 2, 6)))


def test_nothing_compiles_again_when_only_values_change():
    check_no_new_compilations(call, [*arrays(0), ids(5, 7)], [*arrays(1), ids(3, 0, 4)])


@functools.cache
def both():
    """Ring and one device, gradients included, compiled once for all masks."""

    def graded(run):
        def loss(x, ids, mask, places):
            info = MaskInfo(
                _attention_mask=mask, _q_segment_ids=ids, _kv_segment_ids=ids, q_positions=places, kv_positions=places
            )
            output = run(*x, mask_info=info, sliding_window=(6, 1), causal=False)
            return jnp.sum(output**2), output

        return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=ring_calls.QUICK)

    around = functools.partial(ring_calls.spread, **ring_calls.on(ring_calls.ring(4)))
    return graded(around), graded(ring_calls.flash)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.lists(st.integers(-1, 2), min_size=T, max_size=T),
    mask=st.lists(st.booleans(), min_size=T * T, max_size=T * T),
    places=st.lists(st.integers(0, 15), min_size=T, max_size=T),
)
def test_any_segments_mask_and_positions(tokens, mask, places):
    parts = (
        jnp.array([tokens], jnp.int32),
        jnp.array(mask).reshape(1, 1, T, T),
        jnp.array([places], jnp.int32),
    )
    around, alone = both()
    (_, got), gradients = around(arrays(0), *parts)
    (_, want), wants = alone(arrays(0), *parts)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=5e-6)
    for one, other in zip(gradients, wants, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
