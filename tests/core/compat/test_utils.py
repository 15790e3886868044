"""Arithmetic of shapes, and inputs that fit what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import ejgpu, utils
from ejkernel.modules import ragged_page_attention_v3


@given(st.integers(-50, 50), st.integers(1, 9))
def test_cdiv_rounds_up(a, b):
    assert utils.cdiv(a, b) == int(np.ceil(a / b))


@given(st.integers(1, 10_000))
def test_next_power_of_2_is_the_smallest_that_fits(n):
    power = utils.next_power_of_2(n)
    assert power >= n > power // 2
    assert power.bit_count() == 1


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (1, 7, 1)])
def test_strides_are_those_of_numpy(shape):
    assert utils.strides_from_shape(shape) == tuple(s // 8 for s in np.zeros(shape).strides)


def test_random_values_depend_on_the_arguments_alone():
    first = utils.numeric_gen(3, 4)
    assert (first.shape, first.dtype) == ((3, 4), jnp.float16)
    np.testing.assert_array_equal(first, utils.numeric_gen((3, 4)))
    np.testing.assert_array_equal(first, utils.numeric_gen(3, 4, key=jax.random.key(0)))
    assert (first != utils.numeric_gen(3, 4, seed=1)).any()
    traced = jax.jit(lambda seed: utils.numeric_gen(3, 4, seed=seed))(1)
    np.testing.assert_array_equal(traced, utils.numeric_gen(3, 4, seed=1))
    assert (utils.numeric_gen(64, dtype="float32", method="uniform") >= 0).all()


@pytest.mark.parametrize("method", ["normals", "key", "bernoulli", "gamma", "truncated_normal", "split"])
def test_the_method_of_numeric_gen_names_a_sampler(method):
    with pytest.raises(ValueError, match=f"method: got '{method}', wants a sampler of jax.random"):
        utils.numeric_gen(3, method=method)


@pytest.mark.parametrize("limit", [None, 2.0])
def test_random_dense_values_are_bfloat16(limit):
    x = utils.random_dense((8, 8), jax.random.key(0), limit=limit)
    np.testing.assert_array_equal(x, x.astype(jnp.bfloat16).astype(jnp.float32))
    assert x.dtype == jnp.float32
    assert (limit or 1 / 64) / 2 < jnp.abs(x).max() <= (limit or 1 / 64)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_block_indices_for_each_query_block(blocks, slots, seed):
    found = np.asarray(utils.generate_block_indices(2, blocks, 3, slots, 4, seed=seed))
    assert found.shape == (2, 4 * blocks, 3, slots)
    assert found.dtype == np.int32
    for b, t, h in np.ndindex(found.shape[:3]):
        own = t // 4
        _check_blocks(found[b, t, h], min(slots, own + 1), own + 1, fill=-1)
        np.testing.assert_array_equal(found[b, t, h], found[b, own * 4, h])


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 13), st.integers(1, 4), st.integers(0, 9))
def test_block_indices_for_each_token(tokens, slots, seed):
    found = np.asarray(ejgpu.generate_block_indices(2, tokens, 3, slots, 4, seed=seed))
    assert found.shape == (2, tokens, 3, slots)
    assert found.dtype == np.int32
    for b, t, h in np.ndindex(found.shape[:3]):
        available = max(1, -(-t // 4))
        _check_blocks(found[b, t, h], min(slots, available), available, fill=tokens)


def _check_blocks(found: np.ndarray, count: int, available: int, fill: int) -> None:
    """`count` different blocks below `available`, ascending, then the fill."""
    chosen, rest = found[:count].tolist(), found[count:].tolist()
    assert chosen == sorted(set(chosen))
    assert all(0 <= block < available for block in chosen)
    assert set(rest) <= {fill}


def test_blocks_are_random_but_repeatable():
    make = [ejgpu.generate_block_indices(2, 64, 2, 3, 4, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(make[0], make[1])
    assert (make[0] != make[2]).any()
    assert (make[0][0] != make[0][1]).any()
    with pytest.raises(ValueError, match="block_size: got int 0"):
        ejgpu.generate_block_indices(2, 64, 2, 3, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32", "head_dim": 64, "num_kv_heads": 4},
        {"num_kv_heads": 1, "num_q_heads": 3, "head_dim": 200},
    ],
    ids=["default", "float32", "odd"],
)
def test_dummy_rpa_inputs_are_accepted_by_the_operation(options):
    inputs = utils.make_dummy_rpa_inputs(**options)
    output, cache = jax.jit(ragged_page_attention_v3)(*inputs.values())
    assert output.shape == inputs["queries"].shape
    assert cache.shape == inputs["kv_cache"].shape
    assert jnp.isfinite(output.astype(jnp.float32)).all()
    tables = inputs["block_tables"].reshape(4, -1)
    pages = [int(page) for row, n in zip(tables, inputs["kv_lens"], strict=True) for page in row[: -(-int(n) // 16)]]
    assert len(set(pages)) == len(pages) == inputs["kv_cache"].shape[0] - 1
    assert inputs["distribution"].tolist() == [2, 2, 4]


def test_paged_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"q_lens: got \(1,\), wants one length for each of kv_lens"):
        utils.make_dummy_rpa_inputs(kv_lens=(1, 2), q_lens=(1,))
    with pytest.raises(ValueError, match=r"q_lens: got \(3,\), wants at most the kv_lens"):
        utils.make_dummy_rpa_inputs(kv_lens=(2,), q_lens=(3,))
    with pytest.raises(ValueError, match=r"num_q_heads: got int 3, wants a multiple of 2"):
        utils.make_dummy_rpa_inputs(num_q_heads=3)


@pytest.mark.parametrize(
    ("dims", "want"), [((1, -1, 1, 1), (1, 8, 1, 1)), ((2, 1, -1, 2), (2, 1, 2, 2)), ((1, 2, 4, 1),) * 2]
)
def test_make_mesh_has_the_requested_axes(dims, want):
    mesh = utils.make_mesh(dims)
    assert mesh.axis_names == ("dp", "fsdp", "tp", "sp")
    assert tuple(mesh.shape.values()) == want
    assert list(mesh.devices.flat) == jax.devices()


@pytest.mark.parametrize("dims", [(1, 3, 1, 1), (3, -1, 1, 1), (-1, -1, 1, 1), (0, -1, 1, 1), (1, 1, 1, 1)])
def test_meshes_that_do_not_fit_are_refused(dims):
    with pytest.raises(ValueError, match=r"axis_dims: got .*, wants sizes with the product 8"):
        utils.make_mesh(dims)


def test_a_mesh_has_a_name_for_every_axis():
    with pytest.raises(ValueError, match=r"axis_names: got \('dp',\), wants a name for each"):
        utils.make_mesh((4, 2), ("dp",))
