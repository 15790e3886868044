"""A small decoder: RMS norms, rotary positions, grouped queries and gated feed-forward layers, with random weights."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import chunked_prefill_paged_decode, flash_attention, grouped_matmul

Weights = dict[str, Any]
Cache = tuple[jax.Array, jax.Array]


class ByteTokenizer:
    """Text as the bytes of its UTF-8, and one more token for the beginning of a text."""

    begin = 256
    size = 257

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [self.begin, *text.encode()]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become replacement characters."""
        return bytes(i for i in ids if i < self.begin).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder with RMS norms, rotary positions, grouped queries and gated feed-forward layers."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 128
    vocabulary: int = ByteTokenizer.size
    dtype: str = "float32"
    cache: str = ""
    invariant: bool = False

    @property
    def scale(self) -> float | None:
        """The scale of keys and values in an 8-bit cache, None in others; a real server measures it."""
        return 1 / 16 if self.cache else None

    def weights(self, key: jax.Array) -> list[Weights]:
        """Random weights of all layers and, last, of the embedding."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "query": (self.width, q),
            "key": (self.width, kv),
            "value": (self.width, kv),
            "output": (q, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        layers = [self._normal(k, shapes) for k in jax.random.split(key, self.layers)]
        return [*layers, self._normal(key, {"embedding": (self.vocabulary, self.width)})]

    def _normal(self, key: jax.Array, shapes: dict[str, tuple[int, int]]) -> Weights:
        # Scaled by the size of the contracted axis: the rows of a layer's matrices, the columns of the embedding.
        keys = jax.random.split(key, len(shapes))
        return {
            name: (jax.random.normal(k, shape) * shape[int(name == "embedding")] ** -0.5).astype(self.dtype)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def caches(self, pages: int, slots: int) -> list[Cache]:
        """Empty key and value caches [pages, slots, KV heads, head size] of all layers."""
        shape = (pages, slots, self.kv_heads, self.head_dim)
        dtype = self.cache or self.dtype
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(self.layers)]


MODELS = {
    "small": Model(),
    "large": Model(layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, hidden=8192),
}


def product(model: Model, x: jax.Array, weights: jax.Array, transpose: bool = False) -> jax.Array:
    """Rows x [T, n] times a matrix [n, m], or [m, n] with `transpose`, in float32.

    The bits of a row of XLA's product depend on the number of rows: one or several on a CPU, any number on a GPU. Those
    of a grouped matmul with one group, in a `batch_invariant` block, do not.
    """
    if not model.invariant:
        return jnp.dot(x, weights.T if transpose else weights, preferred_element_type=jnp.float32)
    rows = jnp.full(1, x.shape[0], jnp.int32)
    return grouped_matmul(x, weights[None], rows, transpose_rhs=transpose, preferred_element_type=jnp.float32)


def norm(model: Model, x: jax.Array) -> jax.Array:
    """x divided by its root mean square (RMS norm without weights)."""
    x32 = x.astype(jnp.float32)
    square = x32 * x32
    if model.invariant:  # XLA sums a row in an order that depends on the number of rows; `product` does not
        mean = product(model, square, jnp.full((x.shape[1], 8), 1 / x.shape[1]))[:, :1]
    else:
        mean = jnp.mean(square, axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): x [T, H, D], its two halves rotated by position [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None].astype(jnp.float32) * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1).astype(x.dtype)


def layer(model: Model, weights: Weights, x: jax.Array, positions: jax.Array, attend: Any) -> tuple[jax.Array, Any]:
    """One layer on rows [T, width]; `attend(query, key, value)` returns the output of attention and its new cache."""
    rows, normed = x.shape[0], norm(model, x)
    query, key, value = (
        product(model, normed, weights[name]).astype(x.dtype).reshape(rows, -1, model.head_dim)
        for name in ("query", "key", "value")
    )
    attended, cache = attend(rotate(query, positions), rotate(key, positions), value)
    x = x + product(model, attended.reshape(rows, -1), weights["output"]).astype(x.dtype)
    normed = norm(model, x)
    gate, up = (product(model, normed, weights[name]).astype(x.dtype) for name in ("gate", "up"))
    return x + product(model, jax.nn.silu(gate) * up, weights["down"]).astype(x.dtype), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(
    model: Model, weights: list[Weights], caches: list[Cache], tokens: jax.Array, positions: jax.Array, batch: Any
) -> tuple[jax.Array, list[Cache]]:
    """One step of the server: runs all rows through all layers, and writes their keys and values into the pages.

    Args:
        model: The sizes.
        weights: The weights.
        caches: The caches, which are updated in place.
        tokens: [T], the token of each row; rows after those of the last sequence are padding.
        positions: [T], the position of each token in its sequence.
        batch: Lengths [N], block tables [N, K] and starts [N + 1], as `chunked_prefill_paged_decode` takes them; its
            keyword arguments; and the rows [N, R] whose logits are computed.

    Returns:
        Logits [N, R, vocabulary], and the caches.
    """
    *layers, last_weights = weights
    (metadata, options, logit_rows), scale = batch, model.scale
    x = last_weights["embedding"][tokens]
    new_caches: list[Cache] = []
    for layer_weights, cache in zip(layers, caches, strict=True):

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, cache: Cache = cache) -> tuple[jax.Array, Cache]:
            key, value = ((x / scale if scale else x).astype(cache[0].dtype) for x in (key, value))
            scales = {"k_scale": scale, "v_scale": scale}
            output, *pages = chunked_prefill_paged_decode(query, key, value, *cache, *metadata, **options, **scales)
            return output, (pages[0], pages[1])

        x, new_cache = layer(model, layer_weights, x, positions, attend)
        new_caches.append(new_cache)
    logits = logits_of(model, x[logit_rows.reshape(-1)], last_weights)
    return logits.reshape(*logit_rows.shape, -1), new_caches


def logits_of(model: Model, x: jax.Array, weights: Weights) -> jax.Array:
    """Logits [T, vocabulary] of rows [T, width], float32."""
    return product(model, norm(model, x), weights["embedding"], transpose=True)


@functools.partial(jax.jit, static_argnums=0)
def full_logits(model: Model, weights: list[Weights], tokens: jax.Array) -> jax.Array:
    """Logits [T, vocabulary] of a whole sequence by flash attention, with which those of the server are compared."""
    *layers, last_weights = weights
    x, positions = last_weights["embedding"][tokens], jnp.arange(tokens.shape[0])

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        return flash_attention(query[None], key[None], value[None], causal=True)[0], None

    for layer_weights in layers:
        x, _ = layer(model, layer_weights, x, positions, attend)
    return logits_of(model, x, last_weights)
