"""The selective scan of Mamba-1 on a CPU against `lax.scan` and `lax.associative_scan` over the tokens.

python benchmarks/selective_scan/selective_scan_cpu.py [--quick]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.modules import state_space_v1

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides


def scan(x, a, b, c, d, dt):
    """Token by token, as anyone would write it."""

    def step(state, token):
        x, b, c, dt = token
        state = jnp.exp(dt[..., None] * a) * state + (dt * x)[..., None] * b[:, None]
        return state, jnp.einsum("bie,be->bi", state, c)

    start = jnp.zeros((x.shape[0], *a.shape))
    _, output = lax.scan(step, start, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (x, b, c, dt)))
    return jnp.moveaxis(output, 0, 1) + d * x


def tree(x, a, b, c, d, dt):
    """All tokens at once, with the states of all of them in memory."""
    fade, written = jnp.exp(dt[..., None] * a), (dt * x)[..., None] * b[:, :, None]

    def join(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    states = lax.associative_scan(join, (fade, written), axis=1)[1]
    return jnp.einsum("btie,bte->bti", states, c) + d * x


def main() -> None:
    options = shared.sides.parse_options(__doc__.splitlines()[0])
    sizes = [(1, 256, 128)] if options.quick else [(1, 2048, 768), (4, 512, 1536), (1, 8192, 256)]
    ours = lambda *arrays: state_space_v1(*arrays)[0]  # noqa: E731
    for name, other in (("lax.scan", scan), ("lax.associative_scan", tree)):
        shared.sides.print_table_header(name)
        for rows, tokens, channels in sizes:
            keys = jax.random.split(jax.random.key(0), 4)
            x, noise = (jax.random.normal(key, (rows, tokens, channels)) for key in keys[:2])
            b, c = (jax.random.normal(key, (rows, tokens, 16)) for key in keys[2:])
            a = -jnp.arange(1.0, 17.0) * jnp.ones((channels, 1))
            arrays = (x, a, b, c, jnp.ones(channels), jax.nn.softplus(noise - 4))
            size = f"{rows} x {tokens} x {channels} x 16"
            shared.sides.print_comparison(size, ours, other, arrays, range(6), 3 if options.quick else 5)
        print()


if __name__ == "__main__":
    main()
