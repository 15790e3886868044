"""Ring attention compiled for slices of real chips by their own compiler."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpu_rings import SPREAD, record

from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.ring_attention.kernels import (
    collective_backward,
    collective_forward,
    remote_backward,
    remote_forward,
)
from ejkernel_pallas.tpu.tiled_attention.config import GradientTile, TpuBackward, TpuForward

pytestmark = pytest.mark.needs("libtpu")

SLICES = {"v5e": "v5e:4x2", "v5p": "v5p:2x2x1", "v6e": "v6e:4x2", "v7x": "tpu7x:2x2x1"}
WAYS = {"collectives": (collective_forward, collective_backward), "remote copies": (remote_forward, remote_backward)}
SPECS = SPREAD | {"lse": PartitionSpec(None, None, "sp")}
TILE = GradientTile(block_q=256, block_kv=256)
SMALL = (
    TpuForward(block_q=256, block_kv=256, chunk_q=256, chunk_kv=256),
    TpuBackward(dkv=TILE, dq=TILE, chunk=256),
)
DEFAULT = (TpuForward(), TpuBackward())


@functools.cache
def ring(name):
    """The devices of a described slice. The compiler looks for none where it is told not to ask the machine's host."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    devices = topologies.get_topology_desc(platform="tpu", topology_name=SLICES[name]).devices
    return Mesh(np.array(devices), ("sp",))


def both(way, given, sizes, **options):
    """Output and every gradient, with the output for its own cotangent."""
    part = record(given, **options)
    output, residuals = way[0].forward(part, (sizes or DEFAULT)[0])
    wanted = frozenset({"query", "key", "value"})
    residuals = SoftmaxResiduals(lse=residuals.lse)
    pullback = Pullback(record=part, residuals=residuals, output=output, cotangent=output, grad_fields=wanted)
    return output, way[1].backward(pullback, (sizes or DEFAULT)[1])


def compiled(name, way, shapes, sizes, **options):
    mesh = ring(name)
    specs = {field: SPECS.get(field, PartitionSpec(None, "sp")) for field in shapes}
    given = {
        field: jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, specs[field]))
        for field, shape in shapes.items()
    }
    mapped = jax.shard_map(
        lambda given: both(WAYS[way], given, sizes, **options),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(None, "sp"),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(mapped).trace(given).lower(lowering_platforms=("tpu",)).compile()


# The kernels between collectives are tiled attention's, which are compiled for every chip on their own.
STRIPED = [*((name, "remote copies") for name in SLICES), ("v5p", "collectives")]


@pytest.mark.parametrize(("name", "way"), STRIPED)
def test_a_striped_ring_compiles(name, way):
    length = 512 * ring(name).size
    shapes = {field: ((1, length, heads, 64), "bfloat16") for field, heads in (("query", 2), ("key", 1), ("value", 1))}
    made = compiled(name, way, shapes, SMALL, causal=True)
    assert "tpu_custom_call" in made.as_text()


@pytest.mark.parametrize("way", WAYS)
def test_a_ring_with_ids_and_positions_compiles(way):
    length = 256 * 8
    shapes = {field: ((2, length, 2, 128), "float32") for field in ("query", "key", "value")}
    shapes |= {"softmax_aux": ((2,), "float32")}
    names = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
    shapes |= {field: ((2, length), "int32") for field in names}
    compiled("v5e", way, shapes, SMALL, sliding_window=(300, 200), logits_soft_cap=20.0)


def test_a_ring_with_functions_compiles():
    """The pairs of tiles are traced, since the function counts from the first query and key of a device."""
    slopes, documents = jnp.ones(2), jnp.zeros(256 * 8, jnp.int32)
    functions = {
        "score_mod": score_function("score_mod", lambda s, b, h, q, k: s - slopes[h] * jnp.abs(q - k), jnp.float32),
        "mask_mod": mask_function("mask_mod", lambda b, h, q, k: documents[q] == documents[k]),
    }
    shapes = {field: ((1, 256 * 8, 2, 128), "bfloat16") for field in ("query", "key", "value")}
    compiled("v5e", "collectives", shapes, SMALL, sliding_window=(300, 200), **functions)


@pytest.mark.parametrize("way", WAYS)
def test_attention_of_a_model_compiles_in_linear_memory(way):
    """A shard of Llama 3's attention over eight devices: no array of queries by keys, nor the keys of all devices."""
    length = 2048 * 8
    shapes = {field: ((1, length, heads, 128), "bfloat16") for field, heads in (("query", 8), ("key", 2), ("value", 2))}
    made = compiled("v5e", way, shapes, {}, causal=True)
    part = 2048 * 8 * 128 * 2
    assert made.memory_analysis().temp_size_in_bytes < 16 * part
