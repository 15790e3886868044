"""Rings of two devices whose steps are interpreted Triton kernels, against one; run by `test_ring_attention.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention, ring_attention
from ejkernel.ops import explain
from ejkernel.types import MaskInfo

T = 32
IDS = jnp.array([[0] * 11 + [1] * 15 + [-1] * 6], jnp.int32)
PLACES = MaskInfo(q_positions=jnp.arange(T)[None, ::-1], kv_positions=jnp.arange(T)[None])
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "zig-zag": (("softmax_aux",), {"causal": True, "mask_info": MaskInfo.from_segments(IDS)}),
    "banded": ((), {"sliding_window": (5, 2)}),
    "positioned": (("bias",), {"causal": True, "mask_info": PLACES}),
}
SHAPES = {"query": (1, T, 2, 16), "key": (1, T, 1, 16), "value": (1, T, 1, 16)}
SHAPES |= {"softmax_aux": (2, 1), "bias": (1, 1, 1, T)}


def graded(call, arrays):
    """Output and gradients of all arrays."""
    output, pull = jax.vjp(lambda given: call(**given), arrays)
    return output, pull(jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape))[0]


def main():
    mesh, part = jax.make_mesh((2,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:2]), P(None, "sp")
    placed = {"mesh": mesh, "in_specs": (part,) * 3, "out_specs": part, "axis_name": "sp", "platform": "triton"}
    rng = np.random.default_rng(0)
    for name, (more, options) in CASES.items():
        arrays = {x: jnp.asarray(rng.normal(size=SHAPES[x]), jnp.float32) for x in (*list(SHAPES)[:3], *more)}
        around = functools.partial(ring_attention, **placed, **options)
        decision = explain(ring_attention, **arrays, **placed, **options)
        assert decision.backward.implementation.name == "triton", decision
        got = jax.jit(functools.partial(graded, around))(arrays)
        want = jax.jit(functools.partial(graded, functools.partial(flash_attention, platform="xla", **options)))(arrays)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=name)


if __name__ == "__main__":
    main()
