"""One process of a job of two, for `test_ring_attention_across_processes`: `python ring_process.py PORT RANK`.

Each has two of the four devices of a ring. Prints, as a line of JSON, how far the parts of output and gradients that
this process holds are from those of `flash_attention`, which it computes by itself.
"""

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import _compat
from ejkernel.modules import flash_attention, ring_attention
from ejkernel.types import MaskInfo

B, T, H, G, D = 2, 32, 4, 2, 8
WHERE = {
    "query": P(None, "sp"),
    "key": P(None, "sp"),
    "value": P(None, "sp"),
    "sinks": P(),
    "bias": P(None, None, "sp"),
}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"query": (B, T, H, D), "key": (B, T, G, D), "value": (B, T, G, D), "sinks": (H, 2), "bias": (1, H, T, T)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def graded(attention: Any) -> Any:
    """(arrays, segment ids) -> (output, gradients), compiled."""

    def loss(x: dict[str, jax.Array], ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        info = MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids)
        output = attention(x["query"], x["key"], x["value"], x["sinks"], x["bias"], mask_info=info, causal=True)
        return jnp.sum(output**2), output

    def both(x: dict[str, jax.Array], ids: jax.Array) -> dict[str, jax.Array]:
        (_, output), gradients = jax.value_and_grad(loss, has_aux=True)(x, ids)
        return {"output": output, **gradients}

    return jax.jit(both, compiler_options={"xla_backend_optimization_level": "0"})


def flash(query: Any, key: Any, value: Any, sinks: Any, bias: Any, **options: Any) -> jax.Array:
    return flash_attention(query, key, value, bias, None, None, sinks, **options)


def placed(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """An array of which every device holds its part."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def largest_error(got: jax.Array, want: np.ndarray) -> float:
    parts = [np.abs(np.asarray(part.data) - want[part.index]).max() for part in got.addressable_shards]
    return float(max(parts))


def main(port: str, rank: int) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    mesh = Mesh(np.array(jax.devices()), ("sp",))
    ids = np.array([[0] * 20 + [1] * 12, [0] * 27 + [-1] * 5], np.int32)
    given = {name: placed(x, mesh, WHERE[name]) for name, x in arrays().items()}
    with jax.set_mesh(mesh):
        got = graded(functools.partial(ring_attention, axis_name="sp"))(given, placed(ids, mesh, P(None, "sp")))
    with jax.default_device(jax.local_devices()[0]):
        want = {name: np.asarray(x) for name, x in graded(flash)(arrays(), ids).items()}
    found = {name: largest_error(got[name], want[name]) for name in want}
    parts = {name: len(x.addressable_shards) for name, x in got.items()}
    print(json.dumps({"devices": jax.device_count(), "own": len(jax.local_devices()), "errors": found, "parts": parts}))
    _compat.coordination_client().wait_at_barrier("done", 60_000)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
