"""What the kernels have in common that send keys on by themselves."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import _compat
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning.ring_schedule import Ring
from ejkernel_pallas.tpu.ring_attention.neighbours import Lane, Route
from ejkernel_pallas.tpu.ring_attention.plan import Lister, Plan
from ejkernel_pallas.tpu.tiled_attention.launch import VMEM_LIMIT
from ejkernel_pallas.tpu.tiled_attention.operands import Operand
from ejkernel_pallas.tpu.tiled_attention.spec import Spec

MOST = 2**16
"""Tile pairs of all loads that scalar memory has room for, with much to spare."""

TRAVELLING = ("key", "value", "k_ids", "k_positions")


def route_of(ring: Ring, hops: range, inputs: dict[str, Operand], cargo: tuple[str, ...] = ()) -> Route:
    """How the keys among a kernel's inputs travel, and what is collected for them."""
    load = Lane(ring.axis_name, tuple(name for name in TRAVELLING if name in inputs), "load")
    return Route(len(hops), load, Lane(ring.axis_name, cargo, "cargo"))


def slots_of(lane: Lane, inputs: dict[str, Operand]) -> dict[str, jax.ShapeDtypeStruct]:
    """The slots of what moves."""
    arrays = {name: inputs[name].array for name in lane.names}
    return {f"{name}_slots": jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for name, x in arrays.items()}


def neighbours(ring: Ring, hops: range) -> jax.Array:
    """The devices that loads come from and go to, int32 [2]."""
    return (lax.axis_index(ring.axis_name) + jnp.asarray([-hops.step, hops.step], jnp.int32)) % ring.size


def collective(ring: Ring, hops: range) -> int:
    """A number for the semaphore that devices meet at: neighbours along other axes, or behind, have another."""
    return zlib.crc32(ring.axis_name.encode()) % 2**12 * 2 + (hops.step < 0)


def launch_alone(
    kernel: Callable[..., None],
    arrays: list[Any],
    shapes: list[Any],
    scratch: dict[str, Any],
    aliases: dict[int, int],
    *,
    collective: int,
    name: str,
) -> list[jax.Array]:
    """Runs a kernel once, on arrays where they lie.

    Args:
        kernel: Called with all arrays, results and scratch memory.
        arrays: Its inputs, of which the first two, int32 vectors, are in scalar memory.
        shapes: Of its results.
        scratch: What it has besides.
        aliases: Which result takes the place of which input.
        collective: The semaphore at which devices meet.
        name: In traces and dumps.
    """
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    arrays = _compat.as_varying(arrays, arrays)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(),
            in_specs=[anywhere] * (len(arrays) - 2),
            out_specs=[anywhere] * len(shapes),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[_compat.shape_like(x.shape, x.dtype, arrays[0]) for x in shapes],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_LIMIT, has_side_effects=True, collective_id=collective
        ),
        name=name,
    )
    with _compat.described_tpu():
        return call(*arrays)


def tables(plan: Plan, spec: Spec, met: TiledAttention, hops: range, visits: Lister) -> jax.Array:
    """The tile pairs of every load: int32 [loads, B|1, 1, steps].

    Of other devices' segments and positions it takes the smallest and the largest in every tile of keys.
    """
    ring = plan.ring
    sources = (lax.axis_index(ring.axis_name) - jnp.asarray(hops)) % ring.size
    extremes = {
        name: _extremes(x, spec.kv_block)
        for name in ("kv_segment_ids", "kv_positions")
        if (x := getattr(plan.record, name)) is not None
    }
    every = lax.all_gather(extremes, ring.axis_name)
    two = dataclasses.replace(spec, keys=2 * (spec.keys // spec.kv_block), kv_block=2)

    def of(source: jax.Array) -> Any:
        if plan.indexed:
            return plan.visits(met, spec, source, visits)
        theirs = {name: x[source] for name, x in every.items()}
        return visits(dataclasses.replace(met, key=met.key[:, : two.keys], **theirs), two)

    listed = jnp.asarray(jax.vmap(of)(sources))
    if listed.size > MOST:
        raise ValueError(f"tiles: {listed.size} pairs to visit, wants at most {MOST}: choose larger tiles")
    return listed


def _extremes(x: jax.Array, block: int) -> jax.Array:
    """[B|1, S] -> [B|1, 2 a tile]: its smallest and its largest value."""
    cut = x.reshape(x.shape[0], -1, block)
    return jnp.stack([cut.min(axis=2), cut.max(axis=2)], axis=2).reshape(x.shape[0], -1)
