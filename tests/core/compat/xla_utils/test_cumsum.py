"""`chunk_local_cumsum` and `chunk_global_cumsum` against a loop over the tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.xla_utils import chunk_global_cumsum, chunk_local_cumsum


def pieces(total: int, chunk: int | None, cu: list[int] | None) -> list[range]:
    """The tokens of every sum."""
    bounds = [0, total] if cu is None else cu
    size = chunk or total
    return [
        range(at, min(at + size, end)) for start, end in itertools.pairwise(bounds) for at in range(start, end, size)
    ]


def loop(x: np.ndarray, chunk: int | None, reverse: bool, cu: list[int] | None) -> np.ndarray:
    """[B, T, ...] float64."""
    result = np.zeros(x.shape)
    for piece in pieces(x.shape[1], chunk, cu):
        total = np.zeros_like(result[:, 0])
        for token in reversed(piece) if reverse else piece:
            total = total + x[:, token]
            result[:, token] = total
    return result


def call(x, chunk, **options):
    return chunk_global_cumsum(x, **options) if chunk is None else chunk_local_cumsum(x, chunk, **options)


TOTAL = 13
SPLITS = st.lists(st.integers(0, TOTAL), max_size=3).map(sorted)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 3, 64])
def test_sums_of_packed_sequences_are_those_of_a_loop(chunk, reverse):
    found = jax.jit(lambda x, cu: call(x, chunk, reverse=reverse, cu_seqlens=cu))

    @settings(max_examples=15, deadline=None)
    @given(splits=SPLITS, end=st.integers(0, TOTAL), seed=st.integers(0, 9))
    def check(splits, end, seed):
        # Four sequences, some of them empty; what lies behind the last one belongs to nobody.
        cu = ([0, *[min(split, end) for split in splits], end] + [end] * 3)[:5]
        x = np.random.default_rng(seed).normal(size=(1, TOTAL, 2)).astype(np.float32)
        want = loop(x, chunk, reverse, cu)
        np.testing.assert_allclose(found(x, jnp.array(cu)), want, rtol=1e-5, atol=1e-5)

    check()


@pytest.mark.parametrize("channels", [(), (2,)], ids=["heads", "channels"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_t31_sums_of_rows_are_those_of_a_loop_in_either_layout(chunk, channels):
    x = np.random.default_rng(0).normal(size=(2, TOTAL, 3, *channels)).astype(np.float32)
    want = 0.5 * loop(x, chunk, True, None)

    @jax.jit
    def both(x):
        options = {"reverse": True, "softmax_scale": 0.5}
        return call(x, chunk, **options), call(x.swapaxes(1, 2), chunk, head_first=True, **options).swapaxes(1, 2)

    for found in both(x):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk", [None, 4])
def test_gradients_are_cumulative_sums_in_reverse(chunk, reverse):
    x, weight = jax.random.normal(jax.random.key(0), (2, 1, 11, 2))
    cu = [0, 5, 5, 11]

    def loss(x, cu):
        return jnp.sum(weight * call(x, chunk, reverse=reverse, cu_seqlens=cu))

    found = jax.jit(jax.grad(loss))(x, jnp.array(cu))
    np.testing.assert_allclose(found, loop(np.asarray(weight), chunk, not reverse, cu), rtol=1e-5, atol=1e-5)


def test_gates_that_forget_everything_stay_finite():
    x = jnp.array([-1.0, -jnp.inf, -2.0, -3.0, -4.0])[None, :, None]
    assert call(x, 2)[0, :, 0].tolist() == [-1, -np.inf, -2, -5, -4]
    found = jax.grad(lambda x: jnp.sum(jnp.where(jnp.isfinite(x), call(x, 2), 0)))(x)
    assert found[0, :, 0].tolist() == [1, 0, 2, 1, 1]


def test_long_rows_lose_no_digits():
    x = jnp.full((1, 20_000, 1), 0.1)
    found = np.asarray(jax.jit(chunk_local_cumsum, static_argnums=1)(x, 8))[0, :, 0].reshape(-1, 8)
    np.testing.assert_allclose(found, 0.1 * np.tile(np.arange(1, 9), (2500, 1)), rtol=1e-6)


@pytest.mark.parametrize(("output_dtype", "want"), [(jnp.float32, "float32"), (None, "bfloat16")])
def test_output_dtype(output_dtype, want):
    x = jnp.ones((1, 300, 1), jnp.bfloat16)
    assert jax.eval_shape(lambda x: chunk_local_cumsum(x, 300, output_dtype=output_dtype), x).dtype == want
    # In bfloat16 itself a sum of ones stops at 256.
    assert jax.jit(lambda x: chunk_global_cumsum(x, output_dtype=output_dtype))(x)[0, -1, 0] == 300


def test_vmap_over_lengths():
    x = jnp.ones((2, 1, 4, 1))
    found = jax.jit(jax.vmap(lambda x, cu: chunk_global_cumsum(x, cu_seqlens=cu)))(x, jnp.array([[0, 1, 4], [0, 4, 4]]))
    assert found[:, 0, :, 0].tolist() == [[1, 1, 2, 3], [1, 2, 3, 4]]


def test_cumulative_sums_of_empty_arrays_are_empty():
    assert chunk_global_cumsum(jnp.ones((2, 0, 3))).shape == (2, 0, 3)
    assert not chunk_local_cumsum(jnp.ones((1, 4, 1)), 2, cu_seqlens=jnp.array([0])).any()


def test_what_is_wrong_is_named():
    x = jnp.ones((2, 4, 1))
    with pytest.raises(ValueError, match=r"g: got an array float32\[4\], wants \[B, T, H\] or \[B, T, H, K\]"):
        chunk_local_cumsum(jnp.ones(4), 2)
    with pytest.raises(ValueError, match=r"s: got shape \(2, 4, 1\) with cu_seqlens, wants one row: \[1, T, H\]"):
        chunk_global_cumsum(x, cu_seqlens=jnp.array([0, 4]))
    with pytest.raises(ValueError, match=r"cu_seqlens: got \[0, 9\], wants lengths"):
        chunk_global_cumsum(x[:1], cu_seqlens=jnp.array([0, 9]))
    with pytest.raises(ValueError, match=r"chunk_size: got int 0"):
        chunk_local_cumsum(x, 0)
    with pytest.raises(ValueError, match=r"g: got dtype int32, wants a floating dtype"):
        chunk_local_cumsum(x.astype(jnp.int32), 2)
