"""Shardings that are corrected, sequences dealt out to devices, and gradients that are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.types import MaskInfo
from ejkernel.xla_utils import get_corrected_named_sharding, identity_dtype_convert, reorder_sequence


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("shape", "spec", "want"),
    [
        ((4, 8), ("dp", "tp"), ("dp", "tp")),
        ((4, 8), ("dp", "sp"), ("dp", None)),
        ((3, 8), ("dp", "tp"), (None, "tp")),
        ((8,), (("dp", "tp"),), (("dp", "tp"),)),
        ((6,), (("dp", "tp"),), (("dp",),)),
        ((4,), (("sp", "tp"),), (("tp",),)),
        ((5,), (("dp", "tp"),), (None,)),
        ((4, 8, 5), (None, "tp"), (None, "tp")),
        ((3, 8), (PartitionSpec.UNCONSTRAINED, "tp"), (PartitionSpec.UNCONSTRAINED, "tp")),
        ((), (), ()),
    ],
)
def test_a_corrected_sharding_keeps_axes_that_divide_the_array(mesh, shape, spec, want):
    found = get_corrected_named_sharding(shape, PartitionSpec(*spec), mesh)
    assert found.spec == PartitionSpec(*want)
    assert found.mesh == mesh
    if PartitionSpec.UNCONSTRAINED not in spec:
        assert jax.device_put(jnp.ones(shape), found).sharding == found


def test_a_sharding_has_no_more_entries_than_dimensions(mesh):
    with pytest.raises(ValueError, match=r"partition_spec: got .* for shape \(4,\), wants at most 1 entries"):
        get_corrected_named_sharding((4,), PartitionSpec("dp", "tp"), mesh)


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("seq_dim", [0, 1, -1])
def test_zigzag_reordering_of_tokens_is_undone_by_its_inverse(cp_size, seq_dim):
    x = jax.random.normal(jax.random.key(0), (12, 24, 36))
    dealt = jax.jit(lambda x: reorder_sequence(x, cp_size, seq_dim))(x)
    pieces = np.split(np.asarray(x), 2 * cp_size, axis=seq_dim)
    order = [n for i in range(cp_size) for n in (i, 2 * cp_size - 1 - i)]
    np.testing.assert_array_equal(dealt, np.concatenate([pieces[n] for n in order], axis=seq_dim))
    np.testing.assert_array_equal(reorder_sequence(dealt, cp_size, seq_dim, to_contiguous=True), x)


def test_reordered_tokens_attend_by_their_positions():
    from ejkernel.modules import flash_attention

    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
    places = reorder_sequence(jnp.arange(16)[None], 4)
    dealt = [reorder_sequence(x, 4) for x in (query, key, value)]
    mask = MaskInfo(q_positions=places, kv_positions=places)
    found = reorder_sequence(flash_attention(*dealt, mask_info=mask, causal=True), 4, to_contiguous=True)
    np.testing.assert_allclose(found, flash_attention(query, key, value, causal=True), rtol=1e-5, atol=1e-5)


def test_gradients_of_reordered_tokens_return_to_their_order():
    weight = jnp.arange(8.0)
    found = jax.grad(lambda x: jnp.sum(weight * reorder_sequence(x, 2, 0)))(jnp.ones(8))
    np.testing.assert_array_equal(found, reorder_sequence(weight, 2, 0, to_contiguous=True))


def test_token_counts_that_cannot_be_reordered_are_refused():
    x = jnp.ones((1, 6))
    with pytest.raises(ValueError, match=r"tensor: got shape \(1, 6\), wants a multiple of 2 \* cp_size = 4"):
        reorder_sequence(x, 2)
    with pytest.raises(ValueError, match=r"seq_dim: got int 2, wants a dimension of tensor"):
        reorder_sequence(x, 3, seq_dim=2)
    with pytest.raises(ValueError, match=r"cp_size: got int 0"):
        reorder_sequence(x, 0)


def test_an_identity_rounds_the_gradient_alone():
    rounded = identity_dtype_convert(jnp.bfloat16)
    x, weight = jax.random.normal(jax.random.key(0), (2, 16))
    np.testing.assert_array_equal(rounded(x), x)
    found = jax.jit(jax.grad(lambda tree: jnp.sum(weight * rounded(tree)["x"])))({"x": x})["x"]
    np.testing.assert_array_equal(found, weight.astype(jnp.bfloat16).astype(jnp.float32))
    assert found.dtype == jnp.float32
    with pytest.raises(ValueError, match="dtype: got"):
        identity_dtype_convert(jnp.int32)
