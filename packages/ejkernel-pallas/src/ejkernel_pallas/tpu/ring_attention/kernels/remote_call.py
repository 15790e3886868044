"""Shared by the kernels that send keys with remote copies: their refs, pipelines and tables."""

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
from ejkernel_pallas.tpu.ring_attention.kernels.remote_copies import Channel, ChannelRefs, RefsByName, RingRoute
from ejkernel_pallas.tpu.ring_attention.plan import PairLister, RingPlan
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

MAX_TABLE_PAIRS = 2**16
"""The largest number of tile pairs of all loads; scalar memory has room for their table."""

OperandsByName = dict[str, Operand]
ROTATING_FIELDS = ("key", "value", "k_ids", "k_positions")


def make_route(
    ring: Ring, ring_steps: range, inputs: dict[str, Operand], carried_gradients: tuple[str, ...] = ()
) -> RingRoute:
    """Returns how the keys among a kernel's inputs travel, and which gradients travel with them."""
    load = Channel(ring.axis_name, tuple(name for name in ROTATING_FIELDS if name in inputs), "load")
    return RingRoute(len(ring_steps), load, Channel(ring.axis_name, carried_gradients, "gradients"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteRefs:
    """Refs of a kernel that sends keys to the next device.

    Attributes:
        table: Tile pairs of all loads, in scalar memory.
        load: The keys that travel.
        carried_gradients: The gradients that travel after the keys; None if there are none.
        arrays: Inputs and results in HBM, by name.
        scratch: Scratch memory of the tile kernels, by name.
    """

    table: Ref
    load: ChannelRefs
    carried_gradients: ChannelRefs | None
    arrays: dict[str, Ref]
    scratch: dict[str, Any]

    @classmethod
    def of(
        cls, route: RingRoute, scratch: Collection[str], *, table: Ref, neighbours: Ref, **refs_by_name: Any
    ) -> Self:
        """Returns the refs among `refs_by_name`; `scratch` has the names of the tile kernels' scratch memory."""
        load = route.load.bind_refs(refs_by_name, neighbours)
        carried_gradients = (
            route.carried_gradients.bind_refs(refs_by_name, neighbours) if route.carried_gradients.array_names else None
        )
        scratch_memory = {name: refs_by_name.pop(name) for name in scratch}
        return cls(
            table=table, load=load, carried_gradients=carried_gradients, arrays=refs_by_name, scratch=scratch_memory
        )


def make_slot_buffers(channel: Channel, inputs: dict[str, Operand]) -> dict[str, Operand]:
    """Returns the slots of the arrays that travel."""
    arrays = {name: inputs[name].array for name in channel.array_names}
    return {f"{name}_slots": Operand(jax.ShapeDtypeStruct((2, *x.shape), x.dtype)) for name, x in arrays.items()}


def neighbour_indices(ring: Ring, ring_steps: range) -> jax.Array:
    """Returns the devices that loads come from and go to, int32 [2]."""
    return (lax.axis_index(ring.axis_name) + jnp.asarray([-ring_steps.step, ring_steps.step], jnp.int32)) % ring.size


def remote_compiler_options(ring: Ring, ring_steps: range) -> dict[str, Any]:
    """Returns the compiler parameters of a kernel that sends to other devices.

    Devices synchronise at a barrier semaphore, identified by a number, which differs between mesh axes and directions.
    """
    load_index = zlib.crc32(ring.axis_name.encode()) % 2**12 * 2 + (ring_steps.step < 0)
    return {"has_side_effects": True, "collective_id": load_index}


def hbm_operands(operands: dict[str, Operand]) -> dict[str, Operand]:
    """Returns the arrays as operands in HBM, from which the kernel's own pipelines copy blocks."""
    return {name: Operand(x.array) for name, x in operands.items()}


def run_pipeline(
    process_tile: Callable[[RefsByName], None],
    refs: RemoteRefs,
    load: RefsByName,
    operands: tuple[OperandsByName, OperandsByName],
    grid: tuple[Any, ...],
    tile_coordinates: Callable[..., Any],
) -> None:
    """Runs a pipeline over a load's tiles, which prefetches the next tiles.

    Args:
        process_tile: Called with blocks of inputs and results, and of the results' earlier values, by name.
        refs: The kernel's refs.
        load: Arrays of the load, which replace those of the same name.
        operands: Inputs, and results, which are read and written in place: tiles add to earlier values.
        grid: The number of steps along each axis.
        tile_coordinates: Returns the coordinates of a grid step.
    """
    inputs, results = operands
    names = (*inputs, *(f"{name}_before" for name in results), *results)
    arrays = {**refs.arrays, **load}
    arrays |= {f"{name}_before": arrays[name] for name in results}
    pltpu.emit_pipeline(
        lambda *blocks: process_tile(dict(zip(names, blocks, strict=True))),
        grid=grid,
        in_specs=[x.spec(tile_coordinates) for x in (*inputs.values(), *results.values())],
        out_specs=[x.spec(tile_coordinates) for x in results.values()],
    )(*(arrays[name] for name in names))


def make_pair_tables(
    plan: RingPlan, spec: TiledSpec, shard_record: TiledAttention, ring_steps: range, list_pairs: PairLister
) -> jax.Array:
    """Returns the tile pairs of every load: int32 [loads, B|1, 1, steps].

    For the segments and positions of other devices, it gathers the smallest and the largest value in every tile of
    keys.
    """
    ring = plan.ring
    sources = (lax.axis_index(ring.axis_name) - jnp.asarray(ring_steps)) % ring.size
    extremes = {
        name: _min_and_max_per_tile(x, spec.block_kv)
        for name in ("kv_segment_ids", "kv_positions")
        if (x := getattr(plan.record, name)) is not None
    }
    every = lax.all_gather(extremes, ring.axis_name)
    tiled_spec_of_extremes = dataclasses.replace(spec, num_keys=2 * (spec.num_keys // spec.block_kv), block_kv=2)

    def of(source: jax.Array) -> Any:
        if plan.causal_by_shard_index:
            return plan.tile_pairs(shard_record, spec, source, list_pairs)
        their_extremes = {name: x[source] for name, x in every.items()}
        return list_pairs(
            dataclasses.replace(
                shard_record, key=shard_record.key[:, : tiled_spec_of_extremes.num_keys], **their_extremes
            ),
            tiled_spec_of_extremes,
        )

    listed = jnp.asarray(jax.vmap(of)(sources))
    if listed.size > MAX_TABLE_PAIRS:
        raise ValueError(f"tiles: {listed.size} tile pairs, wants at most {MAX_TABLE_PAIRS}: choose larger tiles")
    return listed


def _min_and_max_per_tile(x: jax.Array, block: int) -> jax.Array:
    """Maps [B|1, S] to [B|1, 2 per tile]: the smallest and the largest value of each tile."""
    cut = x.reshape(x.shape[0], -1, block)
    return jnp.stack([cut.min(axis=2), cut.max(axis=2)], axis=2).reshape(x.shape[0], -1)
