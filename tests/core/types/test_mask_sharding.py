"""MaskInfo.get_shardings."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ejkernel.types import MaskInfo, MaskSharding

MESH = AbstractMesh((2, 2, 4, 2), ("dp", "fsdp", "tp", "sp"))


def full_info(batch=4, heads=8):
    ids = jnp.zeros((batch, 6), jnp.int32)
    return MaskInfo(
        _attention_mask=jnp.ones((batch, heads, 6, 6), bool),
        _q_segment_ids=ids,
        _kv_segment_ids=ids,
        q_positions=ids,
        kv_positions=ids,
    )


def test_stored_parts_get_the_configured_axes():
    shardings = full_info().get_shardings(mesh=MESH)
    tokens = PartitionSpec(("dp", "fsdp"), None)
    assert shardings == MaskSharding(
        attention_mask=PartitionSpec(("dp", "fsdp"), "tp", None, None),
        q_segment_ids=tokens,
        kv_segment_ids=tokens,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        q_positions=tokens,
        kv_positions=tokens,
    )


def test_sequence_parallel_shards_queries_ids_and_positions():
    shardings = full_info().get_shardings(True, mesh=MESH)
    assert shardings.attention_mask == PartitionSpec(("dp", "fsdp"), "tp", "sp", None)
    assert shardings.q_segment_ids == shardings.kv_positions == PartitionSpec(("dp", "fsdp"), "sp")


@pytest.mark.parametrize(("batch", "heads", "spec"), [(6, 8, (None, "tp")), (4, 1, (("dp", "fsdp"), None))])
def test_dimensions_that_do_not_divide_are_replicated(batch, heads, spec):
    shardings = full_info(batch, heads).get_shardings(mesh=MESH)
    assert shardings.attention_mask == PartitionSpec(*spec, None, None)
    assert shardings.q_segment_ids == PartitionSpec(spec[0], None)


def test_parts_that_are_not_stored_have_no_spec():
    assert MaskInfo().get_shardings(mesh=MESH) == MaskInfo.get_empty_sharding() == MaskSharding(*[None] * 7)
    shardings = MaskInfo.from_cu_seqlens(jnp.array([0, 2, 3]), max_q_len=4).get_shardings(mesh=MESH)
    assert shardings.attention_mask is None
    assert shardings.q_positions is None
    assert shardings.cu_seqlens_q == shardings.cu_seqlens_kv == PartitionSpec(None)


def test_missing_axes_are_named_only_if_they_are_used():
    mesh = AbstractMesh((2, 2), ("data", "tp"))
    info = full_info().replace(batch_axis_name="data", sequence_axis_name="sp")
    assert info.get_shardings(mesh=mesh).q_segment_ids == PartitionSpec("data", None)
    with pytest.raises(ValueError, match="sequence_axis_name='sp': the mesh has no axis 'sp'"):
        info.get_shardings(sequence_parallel=True, mesh=mesh)
    with pytest.raises(ValueError, match=r"batch_axis_name=\('dp', 'fsdp'\): the mesh has no axis 'dp'"):
        full_info().get_shardings(mesh=mesh)
    replicated = info.replace(batch_axis_name=None, qheads_axis_name=None).get_shardings(mesh=mesh)
    assert replicated.attention_mask == PartitionSpec(None, None, None, None)


def test_specs_place_the_parts_on_a_real_mesh():
    mesh = Mesh(jax.devices()[:1], ("dp",))
    info = full_info().replace(batch_axis_name="dp", qheads_axis_name=None)
    spec = info.get_shardings(mesh=mesh).attention_mask
    placed = jax.device_put(info.explicit_mask, NamedSharding(mesh, spec))
    assert placed.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("dp")), placed.ndim)
