"""Tests of suite/arrays.py: the arrays of tests are JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite import arrays

DTYPES = (None, float, int, bool, "float32", jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32, jnp.float8_e4m3fn)
RANDOM = np.random.default_rng(0)
VALUES = {
    "float64": RANDOM.normal(size=(3, 5)) * 100,
    "float32": RANDOM.normal(size=7).astype(np.float32),
    "bfloat16": RANDOM.normal(size=7).astype(jnp.bfloat16),
    "not finite": np.array([np.nan, np.inf, -np.inf, -0.0]),
    "beyond float16": np.array([1e5, -7e4]),
    "int64": np.arange(-4, 5),
    "large integers": np.array([300, -70000, 2**31 - 1]),
    "bool": np.array([[True], [False]]),
    "nothing": np.zeros((0, 4)),
    "list of integers": [[1, 2], [3, 4]],
    "list of floats": [0.1, 0.7],
    "list of both": [1, 0.3, True],
    "number": 3.5,
}


def assert_equals_jax(call, name):
    function = getattr(jnp, name)
    with np.errstate(over="ignore", invalid="ignore"):
        got, want = call(function), call(function.__wrapped__)
    assert (got.shape, got.dtype, got.weak_type, got.sharding) == (
        want.shape,
        want.dtype,
        want.weak_type,
        want.sharding,
    )
    assert got.committed == want.committed
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize("values", VALUES)
def test_converted_arrays_are_those_of_jax(values):
    for dtype in DTYPES:
        if values == "not finite" and dtype not in (None, float, "float32", jnp.bfloat16, jnp.float16):
            continue  # undefined
        for name in ("asarray", "array"):
            assert_equals_jax(lambda f, dtype=dtype: f(VALUES[values], dtype=dtype), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_ones_are_those_of_jax(dtype):
    for name in ("zeros", "ones"):
        for shape in ((), 3, (2, 0), [2, 3], (np.int64(2),)):
            assert_equals_jax(lambda f, shape=shape: f(shape, dtype), name)


@pytest.mark.parametrize("limits", [(5,), (2, 7), (7, 2, -2), (0,), (1.5,), (0, 1, 0.25), (3, None, 1)])
def test_ranges_are_those_of_jax(limits):
    assert_equals_jax(lambda f: f(*limits), "arange")


def test_arrays_of_tests_compile_nothing():
    compiled = []

    def listen(event, duration_secs, **kwargs):
        compiled.extend([event] if event.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready((jnp.zeros((3, 41)), jnp.arange(43), jnp.asarray(np.ones(47)), jnp.array([1] * 53)))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_traced_arrays_are_left_to_jax():
    made = jax.make_jaxpr(lambda: jnp.zeros((3, 41)))()
    assert made.eqns
    assert arrays.install() is None
    assert jnp.zeros.__module__ == arrays.__name__


MAKERS_OF_DONATED_ARRAYS = {
    "zeros": lambda: jnp.zeros((64, 64)),
    "range": lambda: jnp.arange(4096),
    "converted": lambda: jnp.asarray(np.ones(4096, np.float32)),
    "drawn": lambda: jax.random.normal(jax.random.key(0), (64, 64)),
}


@pytest.mark.parametrize("name", MAKERS_OF_DONATED_ARRAYS)
def test_donated_arrays_are_updated_in_place(name):
    """XLA copies a donated array whose memory is NumPy's: whether it is depends on where NumPy has put it."""
    add_one = jax.jit(lambda x: x.at[0].add(1), donate_argnums=0)
    for _ in range(16):
        array = jax.block_until_ready(MAKERS_OF_DONATED_ARRAYS[name]())
        pointer = array.unsafe_buffer_pointer()
        updated = add_one(array)
        assert array.is_deleted()
        assert updated.unsafe_buffer_pointer() == pointer
