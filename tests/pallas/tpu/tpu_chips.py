"""Chips that are not here, for the compiler that libtpu holds."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from suite.chips import pair_cases_with_chips

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}


def on_chips(cases):
    """Pairs of a case and a chip in which each appears."""
    return pair_cases_with_chips(cases, CHIPS)


@functools.cache
def chip(name):
    """One described chip. The compiler looks for none where it is told not to ask the machine's host."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[name]).devices
    return Mesh(np.array(devices[:1]), ("x",))


def compiled(function, arguments, name, donate=()):
    """The function for a chip, from shapes alone."""
    mesh = chip(name)
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=donate).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()


def shaped(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
