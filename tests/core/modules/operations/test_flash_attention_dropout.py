"""Dropout of `flash_attention`: which weights are dropped is a function of (seed, batch, head, query, key) alone."""

import flash_calls
import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.planning import dropout

BATCH, LENGTH, HEADS = 2, 24, 3
ZERO = jnp.zeros((BATCH, LENGTH, HEADS, 4))
UNIT = jnp.broadcast_to(jnp.eye(LENGTH)[:, None], (BATCH, LENGTH, HEADS, LENGTH))


def weights(seed, prob=0.4, size=8, value=UNIT):
    """[B, H, T, S] what is left of equal softmax weights, times the number of keys and (1 - prob): 0 or 1."""
    options = {"dropout_prob": prob, "dropout_seed": seed, "cfg": flash_calls.tiles(size, size)}
    return flash_attention(ZERO, ZERO, value, **options).transpose(0, 2, 1, 3) * LENGTH * (1 - prob)


def test_the_same_weights_are_dropped_whatever_the_tiles_and_by_the_documented_hash():
    want = np.zeros((BATCH, HEADS, LENGTH, LENGTH))
    for index in np.ndindex(want.shape):
        want[index] = naive.kept(11, *index, 0.4)
    for size in (8, 10, 24):
        np.testing.assert_allclose(weights(11, size=size), want, atol=1e-6)


def test_batch_rows_heads_queries_and_seeds_drop_differently():
    compute = jax.jit(weights)
    kept, other = np.asarray(compute(11)) > 0.5, np.asarray(compute(12)) > 0.5
    patterns = {kept[b, h, t].tobytes() for b in range(BATCH) for h in range(HEADS) for t in range(LENGTH)}
    assert len(patterns) == BATCH * HEADS * LENGTH
    assert 0.3 < (kept != other).mean() < 0.66  # two independent coins of 0.4 differ in 0.48 of all cases


def test_backward_drops_what_forward_dropped():
    # The output is linear in the values, so its derivative is the matrix of weights.
    kept = np.asarray(weights(5))
    gradient = jax.grad(lambda value: jnp.sum(weights(5, value=value)[..., 0]))(UNIT)
    np.testing.assert_allclose(gradient[..., 0], kept.sum(2).transpose(0, 2, 1), atol=1e-5)


@pytest.mark.parametrize("prob", [0.001, 0.1, 0.5, 0.9])
def test_kept_weights_have_the_rate_that_was_asked_for_and_no_visible_order(prob):
    index = jnp.arange(128)
    rows = dropout.row_keys(jnp.uint32(3), index[:8, None, None], index[:8, None], index)
    kept = np.asarray(dropout.is_kept(rows[..., None], index, prob)).astype(float)
    for axes in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        trials = np.prod([kept.shape[axis] for axis in axes])
        rate = kept.mean(axis=axes)
        assert np.all(np.abs(rate - (1 - prob)) < 5 * np.sqrt(prob * (1 - prob) / trials)), axes
    centred = kept - kept.mean()
    for axis in range(4):  # neighbours along every axis are uncorrelated
        correlation = (centred * np.roll(centred, 1, axis)).mean() / centred.var()
        assert abs(correlation) < 5 / np.sqrt(kept.size)


@pytest.mark.parametrize("prob", [0.1, 0.5])
def test_no_group_of_rows_and_columns_is_dropped_together(prob):
    """Sums of rows and of columns scatter as those of coins do, and products of close weights have the mean 0."""
    index, size = jnp.arange(1024), 1024 * 1024
    rows = dropout.row_keys(jnp.uint32(9), jnp.uint32(0), jnp.uint32(1), index)
    coins = np.asarray(dropout.is_kept(rows[:, None], index, prob)).astype(float)
    coins = (coins - (1 - prob)) / np.sqrt(prob * (1 - prob))
    for axis in (0, 1):
        sums = coins.sum(axis) / np.sqrt(1024)
        assert abs((sums**2).mean() - 1) < 5 * np.sqrt(2 / 1024)

    def shifted(down, right):
        return np.roll(coins, (down, right), (0, 1))

    groups = (
        [(0, 0), (0, 1), (0, 2)],
        [(0, 0), (0, 1), (0, 3)],
        [(0, 0), (1, 0), (2, 0)],
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [(0, 0), (0, 64), (64, 0), (64, 64)],
        *([(0, 0), (0, 2**n)] for n in range(10)),
        *([(0, 0), (2**n, 0)] for n in range(10)),
    )
    for group in groups:
        products = np.prod([shifted(*place) for place in group], axis=0)
        assert abs(products.mean()) < 5 / np.sqrt(size), group


def test_seeds_may_be_traced_mapped_and_of_any_integer_kind():
    compute = jax.jit(weights)
    want = np.asarray(compute(jnp.uint32(2**32 - 3)))
    for seed in (-3, 2**32 - 3, np.int32(-3), np.uint32(2**32 - 3), jnp.int32(-3)):
        np.testing.assert_array_equal(weights(seed), want)
    seeds = jnp.arange(3, dtype=jnp.uint32)
    np.testing.assert_array_equal(jax.vmap(weights)(seeds), jnp.stack([compute(seed) for seed in seeds]))


def test_no_dropout_needs_no_seed_and_ignores_one():
    arrays = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    np.testing.assert_array_equal(flash_attention(*arrays), flash_attention(*arrays, dropout_seed=3))
