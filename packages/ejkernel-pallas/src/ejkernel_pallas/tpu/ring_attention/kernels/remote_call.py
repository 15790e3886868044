"""What the kernels share that send keys with remote copies of their own."""

import dataclasses
import zlib
from collections.abc import Callable, Collection
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.ring_attention.schedule import Ring
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.tpu.mosaic.launch import Operand, Ref
from ejkernel_pallas.tpu.ring_attention.kernels.remote_copies import Arrays, Channel, ChannelRefs, Route
from ejkernel_pallas.tpu.ring_attention.plan import Lister, RingPlan
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

MAX_PAIRS = 2**16
"""The most tile pairs of all loads, whose table scalar memory has ample room for."""

Operands = dict[str, Operand]
TRAVELLING = ("key", "value", "k_ids", "k_positions")


def route_of(ring: Ring, hops: range, inputs: dict[str, Operand], cargo: tuple[str, ...] = ()) -> Route:
    """How the keys among a kernel's inputs travel, and what is collected for them."""
    load = Channel(ring.axis_name, tuple(name for name in TRAVELLING if name in inputs), "load")
    return Route(len(hops), load, Channel(ring.axis_name, cargo, "cargo"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteRefs:
    """Refs of a kernel that sends keys on itself.

    Attributes:
        table: Tile pairs of all loads, in scalar memory.
        load: The keys that travel.
        cargo: What is collected for them; None where nothing is.
        arrays: Inputs and results in HBM, by name.
        scratch: Scratch memory of the kernels of tiles, by name.
    """

    table: Ref
    load: ChannelRefs
    cargo: ChannelRefs | None
    arrays: dict[str, Ref]
    scratch: dict[str, Any]

    @classmethod
    def of(cls, route: Route, scratch: Collection[str], *, table: Ref, neighbours: Ref, **named: Any) -> Self:
        """Returns the refs of what is named; `scratch` are the names of scratch memory of the kernels of tiles."""
        load = route.load.bind(named, neighbours)
        cargo = route.cargo.bind(named, neighbours) if route.cargo.names else None
        scratch_memory = {name: named.pop(name) for name in scratch}
        return cls(table=table, load=load, cargo=cargo, arrays=named, scratch=scratch_memory)


def slots_of(lane: Channel, inputs: dict[str, Operand]) -> dict[str, Operand]:
    """Returns the slots of what moves."""
    arrays = {name: inputs[name].array for name in lane.names}
    return {f"{name}_slots": Operand(jax.ShapeDtypeStruct((2, *x.shape), x.dtype)) for name, x in arrays.items()}


def neighbours(ring: Ring, hops: range) -> jax.Array:
    """Returns the devices that loads come from and go to, int32 [2]."""
    return (lax.axis_index(ring.axis_name) + jnp.asarray([-hops.step, hops.step], jnp.int32)) % ring.size


def remote_options(ring: Ring, hops: range) -> dict[str, Any]:
    """Returns what the compiler is told of a kernel that sends to other devices.

    Devices meet at a semaphore by its number: neighbours along other axes, or in the other direction, have another.
    """
    number = zlib.crc32(ring.axis_name.encode()) % 2**12 * 2 + (hops.step < 0)
    return {"has_side_effects": True, "collective_id": number}


def in_hbm(operands: dict[str, Operand]) -> dict[str, Operand]:
    """Returns the arrays, where they lie: a kernel's own pipelines copy their blocks."""
    return {name: Operand(x.array) for name, x in operands.items()}


def run_pipeline(
    tile: Callable[[Arrays], None],
    refs: RemoteRefs,
    load: Arrays,
    operands: tuple[Operands, Operands],
    grid: tuple[Any, ...],
    where: Callable[..., Any],
) -> None:
    """One pipeline over a load's tiles, with the next tiles on their way.

    Args:
        tile: Called with blocks of inputs and results, and of results before it, by name.
        refs: The kernel's.
        load: Arrays of the load, in place of those of the same name.
        operands: Inputs, and results, which are read where they are written: tiles add to what is there.
        grid: Steps along each axis.
        where: The coordinates of a grid step.
    """
    inputs, results = operands
    names = (*inputs, *(f"{name}_before" for name in results), *results)
    arrays = {**refs.arrays, **load}
    arrays |= {f"{name}_before": arrays[name] for name in results}
    pltpu.emit_pipeline(
        lambda *blocks: tile(dict(zip(names, blocks, strict=True))),
        grid=grid,
        in_specs=[x.spec(where) for x in (*inputs.values(), *results.values())],
        out_specs=[x.spec(where) for x in results.values()],
    )(*(arrays[name] for name in names))


def tables(plan: RingPlan, spec: TiledSpec, shard: TiledAttention, hops: range, list_pairs: Lister) -> jax.Array:
    """Returns the tile pairs of every load: int32 [loads, B|1, 1, steps].

    Of other devices' segments and positions it takes the smallest and the largest in every tile of keys.
    """
    ring = plan.ring
    sources = (lax.axis_index(ring.axis_name) - jnp.asarray(hops)) % ring.size
    extremes = {
        name: _extremes(x, spec.block_kv)
        for name in ("kv_segment_ids", "kv_positions")
        if (x := getattr(plan.record, name)) is not None
    }
    every = lax.all_gather(extremes, ring.axis_name)
    extremes_spec = dataclasses.replace(spec, keys=2 * (spec.keys // spec.block_kv), block_kv=2)

    def of(source: jax.Array) -> Any:
        if plan.indexed:
            return plan.pairs(shard, spec, source, list_pairs)
        their_extremes = {name: x[source] for name, x in every.items()}
        return list_pairs(
            dataclasses.replace(shard, key=shard.key[:, : extremes_spec.keys], **their_extremes), extremes_spec
        )

    listed = jnp.asarray(jax.vmap(of)(sources))
    if listed.size > MAX_PAIRS:
        raise ValueError(f"tiles: {listed.size} tile pairs, wants at most {MAX_PAIRS}: choose larger tiles")
    return listed


def _extremes(x: jax.Array, block: int) -> jax.Array:
    """Returns [B|1, S] -> [B|1, 2 a tile]: its smallest and its largest value."""
    cut = x.reshape(x.shape[0], -1, block)
    return jnp.stack([cut.min(axis=2), cut.max(axis=2)], axis=2).reshape(x.shape[0], -1)
