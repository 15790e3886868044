"""Scans that load ahead give the reference's numbers and gradients; interpreted, run by `test_selective_scan.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families import selective_scan
from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.device import DeviceInfo
from ejkernel.types.pullback import Pullback
from ejkernel_triton.selective_scan import DIFFERENTIABLE_FIELDS, config
from ejkernel_triton.selective_scan.backward import backward
from ejkernel_triton.selective_scan.forward import forward

DEVICE = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
TOKENS, CHANNELS = 72, 40  # more than an interval, more than a tile of 32


def record(size):
    """A scan with an initial state; of 4 numbers, tokens and states fill tiles, so that loads have no mask."""
    keys = jax.random.split(jax.random.key(size), 6)
    token, column = (1, TOKENS if size == 4 else TOKENS - 3, CHANNELS), (1, TOKENS if size == 4 else TOKENS - 3, size)
    return SelectiveScan(
        x=jax.random.normal(keys[0], token),
        step=jax.nn.softplus(jax.random.normal(keys[1], token) - 2),
        decay=-jnp.exp(jax.random.normal(keys[2], (CHANNELS, size))),
        write=jax.random.normal(keys[3], column),
        read=jax.random.normal(keys[4], column),
        skip=jnp.ones(CHANNELS),
        initial_state=jax.random.normal(keys[5], (1, CHANNELS, size)),
    )


for size in (4, 5):
    scan = record(size)
    wanted = jax.tree.leaves(selective_scan.reference(scan))
    tried = [tiles for tiles in config.candidates(scan, DEVICE, "forward") if tiles.bc_prefetch_distance]
    for tiles in tried if size == 4 else tried[:1]:
        made = jax.tree.leaves(forward(scan, dataclasses.replace(tiles, splits=2 if size == 4 else 1)))
        for x, y in zip(made, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        print(size, tiles, "right")

scan = record(4)
(output, residuals), pull = jax.vjp(selective_scan.reference, scan)
cotangent = (jnp.cos(output[0]), jnp.sin(output[1]))
(wanted,) = pull((cotangent, jax.tree.map(jnp.zeros_like, residuals)))
saved = Pullback(
    record=scan, residuals=residuals, output=output, cotangent=cotangent, grad_fields=DIFFERENTIABLE_FIELDS
)
for tiles in config.candidates(scan, DEVICE, "backward"):
    if tiles.prefetch_states or tiles.prefetch_recomputed_b:
        for name, made in backward(saved, tiles).items():
            np.testing.assert_allclose(made, getattr(wanted, name), rtol=1e-3, atol=1e-3)
        print(tiles, "gradients right")
