"""Ring attention in Mosaic TPU: the tiles of tiled attention, over one device's keys after the other.

`pallas_tpu_ring` is one kernel a device and pass, which sends keys on while it works on them. It wants parts of whole
tiles. `pallas_tpu` lets keys travel by collectives, between kernels, and serves everything.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.ring_attention import FAMILY, axis_size
from ejkernel.families.tiled_attention import MASKS, SOFTMAX
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_pallas.tpu.interpret import devices
from ejkernel_pallas.tpu.ring_attention import tiles
from ejkernel_pallas.tpu.tiled_attention.spec import LANES, Blocks
from ejkernel_pallas.tpu.tiled_attention.tiles import READS

DTYPES = frozenset({"bfloat16", "float32"})
SIZES = range(1, 257)
VISITS = 2**15
"""Pairs of tiles of 512 by 512, or what divides a part, of all loads of a call, that a table has room for."""


def _empty(record: Any) -> Iterable[str]:
    if not (record.query.size and record.key.size and record.value.size):
        yield "an array is empty"


def _alone(record: Any) -> Iterable[str]:
    """Why one kernel a device cannot serve a record."""
    yield from _empty(record)
    parts = axis_size(record.axis_name)
    if parts == 1:
        yield "axis_name: the whole sequence is on one device"
    for name, x in (("query", record.query), ("key", record.key)):
        if x.shape[1] % (2 * LANES if record.causal else LANES):
            yield f"{name}: a device's part of {x.shape[1]} tokens is not made of whole tiles of {LANES}"
    rows = [getattr(record, name) for name in ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")]
    batch = max(1 if x is None else x.shape[0] for x in rows)
    blocks = tiles.fitted(record, Blocks(512, 512, 512, 512))
    visits = parts * batch * -(-record.query.shape[1] // blocks.queries) * -(-record.key.shape[1] // blocks.keys)
    if visits > VISITS:
        yield f"query, key: {visits} pairs of tiles in a call, a kernel's table has room for {VISITS}"


def implementations() -> tuple[Implementation, ...]:
    """What this package registers for `ring_attention`."""
    collectives = Requires(
        devices=devices(), dtypes=DTYPES, head_dims=SIZES, handles=MASKS | SOFTMAX | {"bias"}, extra=_empty
    )
    alone = Requires(
        devices=frozenset({"tpu"}),
        dtypes=DTYPES,
        head_dims=SIZES,
        handles=(MASKS | SOFTMAX) - {"mask"},
        extra=_alone,
    )
    return (
        _implementation("pallas_tpu_ring", "remote", "remote_backward", alone, priority=20),
        _implementation("pallas_tpu", "forward", "backward", collectives, priority=10),
    )


def _implementation(name: str, forward: str, backward: str, requires: Requires, priority: int) -> Implementation:
    return Implementation(
        op="ring_attention",
        name=name,
        platform="pallas",
        backend="tpu",
        forward=f"ejkernel_pallas.tpu.ring_attention.{forward}:forward",
        backward=f"ejkernel_pallas.tpu.ring_attention.{backward}:backward",
        gradients=frozenset(FAMILY.differentiable) & (requires.handles | {"query", "key", "value"}),
        requires=requires,
        config=ConfigSpace(reads=READS, heuristic=tiles.heuristic, candidates=tiles.candidates),
        priority=priority,
    )
