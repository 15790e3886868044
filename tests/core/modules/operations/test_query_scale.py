"""`q_scale`: queries are rounded once, to the number of the cache's dtype that is nearest to their quotient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules.operations.shared.paged_arguments import rounded_as_cache


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale", [0.03, 0.0117, 0.5])
def test_queries_become_the_nearest_int8(dtype, scale):
    queries = jax.random.normal(jax.random.key(0), (4096,)).astype(dtype)
    got = np.asarray(jax.jit(rounded_as_cache, static_argnums=(1, 2))(queries, scale, jnp.int8), np.float64)
    quotient = np.asarray(queries, np.float64) / scale
    # A quotient that lies half-way, but for the digits of float32, may go either way.
    assert np.abs(got - np.clip(quotient, -128, 127)).max() < 0.5 + 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_become_the_nearest_float8(dtype):
    queries = jax.random.normal(jax.random.key(0), (4096,)).astype(dtype)
    got = np.asarray(jax.jit(rounded_as_cache, static_argnums=(1, 2))(queries, 0.03, jnp.float8_e4m3fn), np.float32)
    exact = np.asarray(queries, np.float64) / 0.03
    values = np.unique(np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64))
    nearest = np.abs(exact[:, None] - values[np.isfinite(values)]).min(axis=1)
    assert (np.abs(got - exact) <= nearest * (1 + 1e-5) + 1e-9).all()
