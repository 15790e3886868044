"""Ring attention on four CPU devices against gathering all keys: time, and temporary memory of a device.

    python benchmarks/ring_attention/ring_attention_cpu.py            # sequences of 4096 and 8192; takes some minutes
    python benchmarks/ring_attention/ring_attention_cpu.py --quick    # 1024

The other side is what one would write otherwise: every device gathers the keys and values of all, then calls
`flash_attention` with the positions of its own queries. The devices are forced host devices, which share the cores of
one machine: times say how much work there is in all, not how it would be spread over real ones.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention, ring_attention
from ejkernel.types import MaskInfo

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides

SPREAD = P(None, "sp")
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal, window 512": {"causal": True, "sliding_window": (512, 0)},
}


def ring(query: jax.Array, key: jax.Array, value: jax.Array, *, mesh: Mesh, **mask: Any) -> jax.Array:
    return ring_attention(
        query, key, value, axis_name="sp", mesh=mesh, in_specs=(SPREAD,) * 3, out_specs=SPREAD, **mask
    )


def gathering(query: jax.Array, key: jax.Array, value: jax.Array, *, mesh: Mesh, **mask: Any) -> jax.Array:
    def part(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        keys, values = (jax.lax.all_gather(x, "sp", axis=1, tiled=True) for x in (key, value))
        first = jax.lax.axis_index("sp") * query.shape[1]
        places = jnp.arange(query.shape[1], dtype=jnp.int32)[None] + first
        info = MaskInfo(q_positions=places, kv_positions=jnp.arange(keys.shape[1], dtype=jnp.int32)[None])
        return flash_attention(query, keys, values, mask_info=info, **mask)

    return jax.shard_map(part, mesh=mesh, in_specs=(SPREAD,) * 3, out_specs=SPREAD, check_vma=False)(query, key, value)


def main() -> None:
    options = shared.sides.parse_options("Ring attention against gathering all keys, on four CPU devices.")
    mesh = Mesh(jax.devices()[:4], ("sp",))
    shared.sides.print_table_header("gathering")
    for length in (1024,) if options.quick else (4096, 8192):
        arrays = tuple(jax.random.normal(jax.random.key(0), (3, 1, length, 4, 64)))
        for name, mask in MASKS.items():
            sides = (functools.partial(side, mesh=mesh, **mask) for side in (ring, gathering))
            shared.sides.print_comparison(f"{length}, {name}", *sides, arrays, (0, 1, 2), 3 if options.quick else 5)


if __name__ == "__main__":
    main()
