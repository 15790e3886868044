"""`alibi_slopes` and `attention_mask` of `flash_attention`, against the bias and the mask that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.ops import batch_invariant
from ejkernel.types import MaskInfo

KEYS = jax.random.split(jax.random.key(0), 4)
QUERY = jax.random.normal(KEYS[0], (2, 19, 4, 8))
KEY, VALUE = jax.random.normal(KEYS[1], (2, 2, 23, 2, 8))
SLOPES = jnp.array([0.5, 0.25, 0.125, 0.0625])
MASK = jax.random.bernoulli(KEYS[2], 0.6, (2, 1, 19, 23))
SMALL = dict(rtol=2e-5, atol=2e-5)


def distances(queries: int, keys: int) -> jax.Array:
    """|k - q| of indices, [queries, keys]."""
    return jnp.abs(jnp.arange(keys) - jnp.arange(queries)[:, None]).astype(jnp.float32)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"logits_soft_cap": 2.0, "sliding_window": 5}], ids=str)
@pytest.mark.parametrize("slopes", [SLOPES, jnp.stack([SLOPES, 3 * SLOPES])], ids=["heads", "rows"])
def test_slopes_are_a_bias_of_distances(options: dict, slopes: jax.Array) -> None:
    bias = -slopes.reshape(-1, 4, 1, 1) * distances(19, 23)

    def loss(given: dict, *arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(flash_attention(*arrays, **given, **options, platform="xla")))

    arrays = QUERY, KEY, VALUE
    for one, other in zip(
        jax.tree.leaves(jax.value_and_grad(lambda *x: loss({"alibi_slopes": slopes}, *x), argnums=(0, 1, 2))(*arrays)),
        jax.tree.leaves(jax.value_and_grad(lambda *x: loss({"bias": bias}, *x), argnums=(0, 1, 2))(*arrays)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, **SMALL)


def test_distances_are_of_positions_in_packed_sequences_with_other_key_lengths() -> None:
    queries, keys = jnp.array([0, 5, 19]), jnp.array([0, 12, 23])
    arrays = QUERY[:1], KEY[:1], VALUE[:1]
    got = flash_attention(*arrays, cum_seqlens_q=queries, cum_seqlens_k=keys, alibi_slopes=SLOPES)
    for n in range(2):
        rows, columns = slice(*queries[n : n + 2]), slice(*keys[n : n + 2])
        want = flash_attention(arrays[0][:, rows], *(x[:, columns] for x in arrays[1:]), alibi_slopes=SLOPES)
        np.testing.assert_allclose(got[:, rows], want, **SMALL)


def test_distances_stay_exact_in_long_rows() -> None:
    """A bias of the key's position alone would be rounded there: its last bit is 1/256."""
    far, query, key = 100_001, QUERY[:1, :1], KEY[:1, :7]
    near = MaskInfo(q_positions=jnp.array([[6]]), kv_positions=jnp.arange(7)[None])
    away = MaskInfo(q_positions=near.q_positions + far, kv_positions=near.kv_positions + far)
    got, want = (flash_attention(query, key, key, mask_info=x, alibi_slopes=0.7 * SLOPES) for x in (away, near))
    np.testing.assert_array_equal(got, want)


def test_slopes_have_no_gradient() -> None:
    with pytest.raises(NotImplementedError, match="no gradient with respect to alibi_slopes"):
        jax.grad(lambda slopes: jnp.sum(flash_attention(QUERY, KEY, VALUE, alibi_slopes=slopes)))(SLOPES)


@pytest.mark.parametrize("kind", [bool, jnp.int32])
def test_an_attention_mask_is_that_of_mask_info(kind: type) -> None:
    got = flash_attention(QUERY, KEY, VALUE, attention_mask=MASK.astype(kind), causal=True)
    want = flash_attention(QUERY, KEY, VALUE, mask_info=MaskInfo(_attention_mask=MASK), causal=True)
    np.testing.assert_array_equal(got, want)


def test_both_masks_apply() -> None:
    other = jnp.roll(MASK, 5, axis=-1)
    got = flash_attention(QUERY, KEY, VALUE, attention_mask=other, mask_info=MaskInfo(_attention_mask=MASK))
    np.testing.assert_array_equal(got, flash_attention(QUERY, KEY, VALUE, attention_mask=MASK & other))


def test_a_mask_of_keys_hides_padding() -> None:
    kept = jnp.arange(23) < jnp.array([[9], [23]])
    got = flash_attention(QUERY, KEY, VALUE, attention_mask=kept.astype(jnp.int32))
    np.testing.assert_allclose(got[:1], flash_attention(QUERY[:1], KEY[:1, :9], VALUE[:1, :9]), **SMALL)
    np.testing.assert_allclose(got[1:], flash_attention(QUERY[1:], KEY[1:], VALUE[1:]), **SMALL)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alibi_slopes": SLOPES[:3]}, r"alibi_slopes: got shape \(3,\)"),
        ({"alibi_slopes": jnp.arange(4)}, "alibi_slopes: got"),
        ({"attention_mask": MASK[..., :5]}, "attention_mask: got shape"),
        ({"attention_mask": MASK.astype(jnp.float32)}, "attention_mask: got .* wants bool or an integer dtype"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(QUERY, KEY, VALUE, **given)


@pytest.mark.parametrize("queries", [9, 19])
def test_a_row_has_the_same_bits_alone_and_in_a_shorter_call(queries: int) -> None:
    slopes = jnp.array([0.7, -1.3, 0.3, 0.11])
    query, key, value = QUERY[:, :queries], KEY[:, :queries], VALUE[:, :queries]
    with batch_invariant():
        both = flash_attention(query, key, value, causal=True, alibi_slopes=slopes, platform="xla")
        alone = flash_attention(query[1:], key[1:], value[1:], causal=True, alibi_slopes=slopes, platform="xla")
        first = (x[:, :7] for x in (query, key, value))
        prefix = flash_attention(*first, causal=True, alibi_slopes=slopes, platform="xla")
    np.testing.assert_array_equal(both[1:], alone)
    np.testing.assert_array_equal(both[:, :7], prefix)
