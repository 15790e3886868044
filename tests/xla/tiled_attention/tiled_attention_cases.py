"""Records for the tests of tiled attention, and both ways to evaluate them."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import TiledAttention, reference
from ejkernel.types.pullback import Pullback
from ejkernel_xla.tiled_attention.backward import backward
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax
from ejkernel_xla.tiled_attention.forward import forward

DIFFERENTIABLE = ("query", "key", "value", "bias", "softmax_aux")

OPTIONS: dict[str, tuple[Any, ...]] = {
    "shape": ((37, 53, 8, 6), (20, 70, 4, 8), (33, 1, 5, 5), (1, 40, 8, 8)),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "blocks": ((16, 16), (8, 32), (512, 512)),
    "mask": (None, "keys", "pairs", "rows"),
    "bias": (None, "pairs", "rows"),
    "band": ({}, {"causal": True}, {"sliding_window": (5, 3)}, {"causal": True, "sliding_window": (None, 2)}),
    "segments": (False, True),
    "positions": (False, True),
    "extra": (
        {},
        {"logits_soft_cap": 2.0, "softmax_aux": True},
        {"dropout_prob": 0.3, "softmax_aux": True},
        {"normalize_output": False, "dropout_prob": 0.3},
        {"normalize_output": False, "softmax_aux": True, "logits_soft_cap": 3.0},
    ),
}


def covering(options: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Combinations that hold every pair of values of every two options, chosen greedily."""
    names, counts = list(options), [range(len(values)) for values in options.values()]
    pairs = list(itertools.combinations(range(len(names)), 2))
    missing = {(a, i, b, j) for a, b in pairs for i in counts[a] for j in counts[b]}
    random, rows = np.random.default_rng(0), []
    while missing:
        trials = [tuple(int(random.integers(len(n))) for n in counts) for _ in range(500)]
        covered = {row: {(a, row[a], b, row[b]) for a, b in pairs} & missing for row in trials}
        best = max(covered, key=lambda row: len(covered[row]))
        missing -= covered[best]
        rows.append({name: options[name][i] for name, i in zip(names, best, strict=True)})
    return rows


def make(
    shape: tuple[int, int, int, int] = (37, 53, 8, 6),
    heads: tuple[int, int] = (4, 2),
    *,
    batch: int = 2,
    dtype: Any = jnp.float32,
    mask: str | None = None,
    bias: str | None = None,
    band: dict[str, Any] | None = None,
    segments: bool = False,
    positions: bool = False,
    extra: dict[str, Any] | None = None,
    seed: int = 0,
) -> TiledAttention:
    """A record of random values; shape is (T, S, D, Dv), heads (H, Hk)."""
    random, (t, s, d, dv), (h, hk) = np.random.default_rng(seed), shape, heads

    def normal(*dims: int) -> jax.Array:
        return jnp.asarray(random.normal(size=dims), dtype)

    arrays: dict[str, Any] = {"query": normal(batch, t, h, d)}
    arrays |= {"key": normal(batch, s, hk, d), "value": normal(batch, s, hk, dv)}
    dims = {"keys": (batch, 1, 1, s), "pairs": (1, h, t, s), "rows": (batch, h, t, 1)}
    options = {**(band or {}), **(extra or {})}
    if mask:
        arrays["mask"] = jnp.asarray(random.random(dims[mask]) < 0.7)
    if bias:
        arrays["bias"] = normal(*dims[bias])
    if segments:
        arrays["q_segment_ids"] = _sorted_ints(random, batch, t, -1, 3)
        arrays["kv_segment_ids"] = _sorted_ints(random, batch, s, -1, 3)
    if positions:
        arrays["q_positions"] = _sorted_ints(random, 1, t, 0, 40)
        arrays["kv_positions"] = _sorted_ints(random, batch, s, 0, 40)
    if options.pop("softmax_aux", False):
        arrays["softmax_aux"] = jnp.asarray(random.normal(size=h), jnp.float32)
    if "dropout_prob" in options:
        arrays["dropout_seed"] = jnp.uint32(seed + 7)
    return TiledAttention(**arrays, **options, softmax_scale=d**-0.5)


def _sorted_ints(random: np.random.Generator, rows: int, n: int, low: int, high: int) -> jax.Array:
    return jnp.asarray(np.sort(random.integers(low, high, (rows, n)), axis=-1), jnp.int32)


def differentiable(record: TiledAttention) -> frozenset[str]:
    return frozenset(name for name in DIFFERENTIABLE if getattr(record, name) is not None)


def cotangent_of(record: TiledAttention) -> jax.Array:
    shape = (*record.query.shape[:3], record.value.shape[3])
    return jnp.asarray(np.random.default_rng(99).normal(size=shape), record.query.dtype)


QUICK = {"xla_backend_optimization_level": 0}
"""Most of these tests' time would go into optimising code that runs once."""


@functools.partial(jax.jit, static_argnames=("blocks", "grad_fields"), compiler_options=QUICK)
def tiled(record: TiledAttention, cotangent: jax.Array, *, blocks: tuple[int, int], grad_fields: frozenset[str]) -> Any:
    """(output, residuals, gradients) of the implementation."""
    q, kv = blocks
    output, residuals = forward(record, ChunkedSoftmax(block_q=q, block_kv=kv))
    pullback = Pullback(record=record, residuals=residuals, output=output, cotangent=cotangent, grad_fields=grad_fields)
    return output, residuals, backward(pullback, ChunkedSoftmax(block_q=q, block_kv=kv))


@functools.partial(jax.jit, static_argnames=("grad_fields",), compiler_options=QUICK)
def expected(record: TiledAttention, cotangent: jax.Array, *, grad_fields: frozenset[str]) -> Any:
    """(output, residuals, gradients) by definition and by JAX's differentiation of it."""
    fields = {name: getattr(record, name) for name in grad_fields}
    output, pull, residuals = jax.vjp(lambda f: reference(dataclasses.replace(record, **f)), fields, has_aux=True)
    return output, residuals, pull(cotangent)[0]


def attend(record: TiledAttention, blocks: tuple[int, int] = (512, 512)) -> jax.Array:
    """The output, differentiable with the two passes joined the way the engine joins them."""
    grad_fields = differentiable(record)

    @jax.custom_vjp
    def call(fields: dict[str, jax.Array], rest: TiledAttention) -> jax.Array:
        return forward_pass(fields, rest)[0]

    def forward_pass(fields: dict[str, jax.Array], rest: TiledAttention) -> Any:
        full = dataclasses.replace(rest, **fields)
        output, residuals = forward(full, ChunkedSoftmax(block_q=blocks[0], block_kv=blocks[1]))
        return output, (full, residuals, output)

    def backward_pass(saved: Any, cotangent: jax.Array) -> Any:
        full, residuals, output = saved
        pullback = Pullback(
            record=full, residuals=residuals, output=output, cotangent=cotangent, grad_fields=grad_fields
        )
        return backward(pullback, ChunkedSoftmax(block_q=blocks[0], block_kv=blocks[1])), None

    call.defvjp(forward_pass, backward_pass)
    return call(
        {name: getattr(record, name) for name in grad_fields}, dataclasses.replace(record, **dict.fromkeys(grad_fields))
    )


def assert_close(actual: Any, desired: Any, tolerance: float = 2e-5) -> None:
    """Same structure, dtypes and shapes, no NaN, and values within tolerance of the largest one."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(desired), strict=True):
        name = jax.tree_util.keystr(path)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = max(1.0, np.abs(y, where=np.isfinite(y), out=np.zeros_like(y)).max(initial=0))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=name, equal_nan=False)


def abstract(length: int, heads: int = 8, kv_heads: int = 8, **options) -> TiledAttention:
    query = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
    key = jax.ShapeDtypeStruct((1, length, kv_heads, 64), jnp.float32)
    return TiledAttention(query=query, key=key, value=key, softmax_scale=0.125, **options)
