"""A last tile that is moved back shares rows with the one before, and padding sees no padding."""

import flash_calls
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

X = np.random.default_rng(0).normal(size=(3, 1, 10, 2, 4)).astype(np.float32)


def test_rows_in_two_overlapping_tiles_count_once_in_gradients():
    def total(arrays, block):
        return jnp.sum(jnp.sin(flash_attention(*arrays, causal=True, cfg=flash_calls.tiles(block, block))))

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    np.testing.assert_allclose(gradient(X, 4), gradient(X, 10), rtol=1e-4, atol=1e-5)


def test_padding_queries_and_keys_attend_to_nothing():
    ids = jnp.asarray([[0] * 6 + [-1] * 4], jnp.int32)
    info = MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids)
    output, lse = jax.jit(lambda *x: flash_attention(*x, mask_info=info, return_lse=True))(*X)
    assert not np.any(output[:, 6:])
    assert np.all(lse[..., 6:] == -np.inf)
    assert np.isfinite(lse[..., :6]).all()
