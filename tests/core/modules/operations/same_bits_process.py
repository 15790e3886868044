"""Digests of outputs and gradients of operations, computed on the first or, with `last`, on the last device."""

import dataclasses
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.call import call
from ejkernel.ops.plugins import registry
from ejkernel.types.arguments import array_fields

DEVICE = jax.devices()[-1 if "last" in sys.argv[1:] else 0]
CHOSEN = [word for word in sys.argv[1:] if word != "last"]


def digest(name: str) -> str:
    """Of all bits that the operation's first case makes, gradients of all floating arrays included."""
    op = registry().op(name)
    case = next(case for case in op.cases if "ci" in case.tags)
    args = jax.device_put(case.make(jax.random.key(0)), DEVICE)
    floating = {k: x for k, x in array_fields(args).items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def made(floating: dict[str, jax.Array]) -> list[jax.Array]:
        out = jax.tree.leaves(call(op, dataclasses.replace(args, **floating)))
        return [x for x in out if jnp.issubdtype(x.dtype, jnp.floating)]

    def cotangent(x: jax.Array) -> jax.Array:
        return jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape).astype(x.dtype)

    output, pull = jax.vjp(jax.jit(made), floating)
    gradients = jax.jit(pull)([jax.device_put(cotangent(x), DEVICE) for x in output])
    bits = hashlib.sha256()
    for x in jax.tree.leaves((output, gradients)):
        assert x.devices() == {DEVICE}
        bits.update(np.asarray(x).tobytes())
    return bits.hexdigest()


for name in CHOSEN:
    print(name, digest(name))
