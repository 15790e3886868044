"""Linear recurrences on a CPU against `lax.scan` over the tokens.

python benchmarks/linear_recurrence/linear_recurrence_cpu.py [--quick]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.modules import gated_delta_rule, gated_linear_attention, lightning_attention, state_space_v2
from ejkernel.modules.operations.lightning_attention import default_decay

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides


def scan(query, key, value, decay, beta=None):
    """The recurrence as anyone would write it; all arrays [B, T, H, ...]."""
    tokens = {"q": query, "k": key, "v": value, "g": jnp.broadcast_to(decay, key.shape)}
    tokens |= {} if beta is None else {"b": beta[..., None]}

    def step(state, x):
        state = state * jnp.exp(x["g"])[..., None]
        write = x["v"] if beta is None else x["b"] * (x["v"] - jnp.einsum("bhkv,bhk->bhv", state, x["k"]))
        state = state + x["k"][..., :, None] * write[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, x["q"])

    start = jnp.zeros((query.shape[0], *query.shape[2:], value.shape[3]))
    _, output = lax.scan(step, start, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(output, 0, 1) * query.shape[-1] ** -0.5


def scanned_lightning(query, key, value):
    return scan(query, key, value, default_decay(query.shape[2], 1, 12)[:, None])


def scanned_delta(query, key, value, beta, decay):
    norm = lambda x: x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)  # noqa: E731
    return scan(norm(query), norm(key), value, decay[..., None], beta)


def scanned_space(x, a, b, c, d, dt):
    heads = x.shape[2]
    key, query = (jnp.repeat(y, heads // y.shape[2], axis=2) for y in (b, c))
    output = scan(query * query.shape[-1] ** 0.5, key, x * dt[..., None], (a * dt)[..., None])
    return (output + d[:, None] * x).reshape(*x.shape[:2], -1)


def model(tokens):
    """Query, key, value and gate in the sizes of that model's layers: 4 heads, keys of 128, values of 256."""
    query, key, noise = jax.random.normal(jax.random.key(1), (3, 1, tokens, 4, 128))
    value = jax.random.normal(jax.random.key(2), (1, tokens, 4, 256))
    return query, key / 8, value, jax.nn.log_sigmoid(noise) / 16


def main() -> None:
    options = shared.sides.parse_options(__doc__.splitlines()[0])
    tokens, repeats = (512, 3) if options.quick else (4096, 7)
    shared.sides.print_table_header("lax.scan")
    query, key, value, noise = jax.random.normal(jax.random.key(0), (4, 1, tokens, 8, 64))
    gate = jax.nn.log_sigmoid(noise) / 16
    beta, decay = jax.nn.sigmoid(noise[..., 0]), gate[..., 1]
    qkv = query, key / 8, value
    ours = lambda *x: lightning_attention(*x, layer_idx=1, num_layers=12)  # noqa: E731
    shared.sides.print_comparison(f"lightning, {tokens}", ours, scanned_lightning, qkv, (0, 1, 2), repeats)
    by_head = lambda q, k, v, g: scan(q, k, v, g[..., None])  # noqa: E731
    shared.sides.print_comparison(
        f"GLA, heads, {tokens}", gated_linear_attention, by_head, (*qkv, decay), range(4), repeats
    )
    shared.sides.print_comparison(
        f"GLA, channels, {tokens}", gated_linear_attention, scan, (*qkv, gate), range(4), repeats
    )
    shared.sides.print_comparison(f"GLA 340M, {tokens}", gated_linear_attention, scan, model(tokens), range(4), repeats)
    arrays = (*qkv, beta, decay)
    shared.sides.print_comparison(
        f"gated delta rule, {tokens}", gated_delta_rule, scanned_delta, arrays, range(5), repeats
    )
    b, c = key[:, :, :1] / 8, query[:, :, :1]
    space = value, -jnp.arange(1.0, 9.0), b, c, jnp.ones(8), jax.nn.softplus(noise[..., 0])
    mamba = lambda *x: state_space_v2(*x)[0]  # noqa: E731
    shared.sides.print_comparison(f"state space v2, {tokens}", mamba, scanned_space, space, range(6), repeats)


if __name__ == "__main__":
    main()
