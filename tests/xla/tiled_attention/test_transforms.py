"""Tiled attention in XLA under JAX's transformations."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiled_attention_cases import QUICK, assert_close, attend, cotangent_of, differentiable, make, tiled

from ejkernel.families.tiled_attention import TiledAttention

BLOCKS = (16, 16)

quick = functools.partial(jax.jit, compiler_options=QUICK)


def loss(record: TiledAttention) -> jax.Array:
    return jnp.sum(attend(record, BLOCKS) ** 2)


def gradients(record: TiledAttention) -> dict[str, jax.Array]:
    fields = {name: getattr(record, name) for name in differentiable(record)}
    return jax.grad(lambda fields: loss(dataclasses.replace(record, **fields)))(fields)


@pytest.mark.parametrize("options", [{"band": {"causal": True}}, {"segments": True, "extra": {"dropout_prob": 0.3}}])
def test_vmap(options):
    records = [make(seed=seed, **options) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *records)
    together = quick(jax.vmap(gradients))(stacked)
    each = quick(gradients)
    assert_close(together, jax.tree.map(lambda *x: jnp.stack(x), *(each(record) for record in records)))


def test_checkpoint():
    record = make(segments=True, extra={"softmax_aux": True})
    query = record.query

    def of_query(query: jax.Array) -> jax.Array:
        return loss(dataclasses.replace(record, query=query))

    assert_close(quick(jax.grad(jax.checkpoint(of_query)))(query), quick(jax.grad(of_query))(query), 1e-6)


def test_export():
    record = make(segments=True, band={"causal": True}, extra={"dropout_prob": 0.1})

    def grad_of(query: jax.Array, ids: jax.Array, seed: jax.Array) -> jax.Array:
        return gradients(dataclasses.replace(record, query=query, q_segment_ids=ids, dropout_seed=seed))["query"]

    arguments = record.query, record.q_segment_ids, record.dropout_seed
    exported = jax.export.export(jax.jit(grad_of))(*arguments)
    assert_close(quick(exported.call)(*arguments), quick(grad_of)(*arguments), 1e-6)


def test_shard_map_over_heads_and_batch():
    record = make(segments=True)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(-1, 1), ("data", "model"))
    rows, ids = P("data", None, "model", None), P("data", None)

    def local(query, key, value, q_ids, kv_ids):
        parts = {"query": query, "key": key, "value": value, "q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
        return gradients(dataclasses.replace(record, **parts))

    specs = {"in_specs": (rows, rows, rows, ids, ids), "out_specs": {"query": rows, "key": rows, "value": rows}}
    sharded = quick(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))
    arrays = record.query, record.key, record.value, record.q_segment_ids, record.kv_segment_ids
    assert_close(sharded(*arrays), quick(gradients)(record), 1e-6)


def test_new_values_do_not_recompile():
    options = {"segments": True, "positions": True, "mask": "pairs", "extra": {"dropout_prob": 0.3}}
    first, second = make(seed=1, **options), make(seed=2, **options)
    grad_fields = frozenset({"value"})
    outcomes = [tiled(first, cotangent_of(first), blocks=BLOCKS, grad_fields=grad_fields)]
    compiled = tiled._cache_size()
    outcomes.append(tiled(second, cotangent_of(second), blocks=BLOCKS, grad_fields=grad_fields))
    assert tiled._cache_size() == compiled
    assert not np.array_equal(outcomes[0][0], outcomes[1][0])
