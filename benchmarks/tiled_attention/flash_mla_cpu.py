"""Latent attention on a CPU against the same written in jnp: time, and temporary memory.

    python benchmarks/tiled_attention/flash_mla_cpu.py  # sequences of 2048 and 4096, caches of 8192; takes some minutes
    python benchmarks/tiled_attention/flash_mla_cpu.py --quick  # 512, caches of 1024

`flash_mla` against keys and values of all heads and a matrix of scores; `mla_decode` against the same for one query a
row, which is what a model without absorbed weights does.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_mla, mla_decode

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides

HEADS, LATENT, NOPE, ROPE, VALUE = 8, 128, 64, 32, 64


def arrays(rows: int, length: int) -> tuple[jax.Array, ...]:
    """Query, latent vectors, rotary keys and the two weights."""
    keys = jax.random.split(jax.random.key(0), 5)
    query = jax.random.normal(keys[0], (rows, length, HEADS, NOPE + ROPE))
    latent = jax.random.normal(keys[1], (rows, length, LATENT))
    rope = jax.random.normal(keys[2], (rows, length, ROPE))
    w_kc, w_vc = (
        jax.random.normal(key, (LATENT, HEADS, n)) * LATENT**-0.5
        for key, n in zip(keys[3:], (NOPE, VALUE), strict=True)
    )
    return query, latent, rope, w_kc, w_vc


def expanded(
    query: jax.Array, latent: jax.Array, rope: jax.Array, w_kc: jax.Array, w_vc: jax.Array, allowed: jax.Array
):
    """Attention with keys and values of all heads, under a mask that broadcasts to [B, H, T, S]."""
    key = jnp.einsum("bsr,rhn->bshn", latent, w_kc)
    rope = jnp.broadcast_to(rope[:, :, None], (*key.shape[:3], rope.shape[2]))
    value = jnp.einsum("bsr,rhn->bshn", latent, w_vc)
    scores = jnp.einsum("bthd,bshd->bhts", query, jnp.concatenate([key, rope], axis=-1)) * query.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def main() -> None:
    options = shared.sides.parse_options(__doc__.splitlines()[0])
    shared.sides.print_table_header("jnp")
    repeats = 3 if options.quick else 5
    for length in (512,) if options.quick else (2048, 4096):

        def ours(query: jax.Array, latent: jax.Array, rope: jax.Array, w_kc: jax.Array, w_vc: jax.Array):
            return flash_mla(query, latent, w_kc, w_vc, None, rope, causal=True)

        def theirs(*inputs: jax.Array):
            return expanded(*inputs, jnp.tril(jnp.ones((inputs[0].shape[1],) * 2, bool)))

        shared.sides.print_comparison(f"{length}, causal", ours, theirs, arrays(1, length), range(5), repeats)

    size = 1024 if options.quick else 8192
    query, latent, rope, w_kc, w_vc = arrays(4, size)
    lengths = jnp.array([size, size // 2, size, size // 4])
    one = (query[:, 0], jnp.concatenate([latent, rope], axis=-1), w_kc, w_vc)

    def decode(query: jax.Array, cache: jax.Array, w_kc: jax.Array, w_vc: jax.Array):
        return mla_decode(query, cache, None, w_kc, w_vc, lengths)

    def decode_expanded(query: jax.Array, cache: jax.Array, w_kc: jax.Array, w_vc: jax.Array):
        inside = (jnp.arange(size) < lengths[:, None])[:, None, None]
        latent, rope = cache[..., :LATENT], cache[..., LATENT:]
        return expanded(query[:, None], latent, rope, w_kc, w_vc, inside)[:, 0]

    shared.sides.print_comparison(f"one query, cache of {size}", decode, decode_expanded, one, range(4), repeats)


if __name__ == "__main__":
    main()
