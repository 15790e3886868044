"""Trains a small transformer by tensor parallelism with collective products, and compares its losses with one device's.

    python examples/tensor_parallel.py --steps 20           # on all devices; on a CPU, eight of its own

Tokens are split over the devices between the products, and features within a layer:

    x [tokens / P, D] -> norm -> all_gather_matmul [tokens, features / P] -> attention of H / P heads, or GELU
                                                     -> reduce_scatter_matmul [tokens / P, D] -> + x

The vocabulary is split too. Each device has all hidden states and its part of the head, and `fused_cross_entropy`
computes one block of logits at a time: no device ever has the logits of all tokens, or of all entries.

Sources: Korthikanti et al. 2022, arXiv:2205.05198 (sequence parallelism); Wang et al. 2023, ASPLOS (overlap).
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX looks for devices

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import all_gather_matmul, flash_attention, fused_cross_entropy, reduce_scatter_matmul

AXIS = "tp"
Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its batches; heads, inner, vocabulary and tokens of a batch divide among devices."""

    vocabulary: int = 64
    width: int = 32
    heads: int = 8
    head_dim: int = 8
    inner: int = 128
    layers: int = 2
    batch: int = 4
    length: int = 32


SPECS: Weights = {
    "qkv": P(None, None, AXIS),  # every device has queries, keys and values of its heads
    "out": P(None, AXIS),
    "up": P(None, AXIS),
    "down": P(None, AXIS),
}


def specs_of_model(sizes: Sizes) -> Weights:
    """How the weights are split: features and vocabulary over the axis."""
    return {"embedding": P(), "head": P(None, AXIS), "layers": [SPECS] * sizes.layers}


def init(key: jax.Array, sizes: Sizes) -> Weights:
    """Normal weights. Those of a product's output are [D, features], as `reduce_scatter_matmul` takes them."""
    d, heads = sizes.width, sizes.heads * sizes.head_dim
    shapes = {"qkv": (d, 3, heads), "out": (d, heads), "up": (d, sizes.inner), "down": (d, sizes.inner)}

    def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape) * fan_in**-0.5

    def layer(key: jax.Array) -> Weights:
        keys = jax.random.split(key, len(shapes))
        fan_in = {"qkv": d, "up": d, "out": heads, "down": sizes.inner}
        return {name: normal(k, shapes[name], fan_in[name]) for k, name in zip(keys, shapes, strict=True)}

    keys = jax.random.split(key, sizes.layers + 2)
    return {
        "embedding": normal(keys[0], (sizes.vocabulary, d), 1),
        "head": normal(keys[1], (d, sizes.vocabulary), d),
        "layers": [layer(k) for k in keys[2:]],
    }


def norm(x: jax.Array) -> jax.Array:
    """Root mean square normalisation of every token."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@dataclasses.dataclass(frozen=True)
class Products:
    """The three steps that communicate between devices: both products of a layer, and the loss.

    Attributes:
        gather: (x, weight [D, features]) -> all tokens' features.
        scatter: (features, weight [D, features]) -> this device's tokens of the sum.
        loss: (hidden states, head, targets of all tokens) -> their mean cross-entropy.
    """

    gather: Callable[[jax.Array, jax.Array], jax.Array]
    scatter: Callable[[jax.Array, jax.Array], jax.Array]
    loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _loss_over_devices(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    hidden = lax.all_gather(hidden, AXIS, axis=0, tiled=True)
    return fused_cross_entropy(hidden=hidden, lm_head_weight=head, targets=targets, vocab_parallel_axis=AXIS).loss


def _plain_loss(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ head, targets).mean()


PARALLEL = Products(
    gather=lambda x, w: all_gather_matmul(x, w, AXIS),
    scatter=lambda x, w: reduce_scatter_matmul(x, w, AXIS),
    loss=_loss_over_devices,
)
PLAIN = Products(gather=jnp.matmul, scatter=lambda x, w: x @ w.T, loss=_plain_loss)


def attention(x: jax.Array, layer: Weights, sizes: Sizes, products: Products) -> jax.Array:
    """Causal attention of the heads that are here, of whole sequences."""
    qkv = layer["qkv"]
    projected = products.gather(norm(x), qkv.reshape(qkv.shape[0], -1))
    query, key, value = jnp.moveaxis(projected.reshape(sizes.batch, sizes.length, 3, -1, sizes.head_dim), 2, 0)
    heads = flash_attention(query, key, value, causal=True)
    return x + products.scatter(heads.reshape(projected.shape[0], -1), layer["out"])


def feed_forward(x: jax.Array, layer: Weights, products: Products) -> jax.Array:
    """Two products with GELU between."""
    return x + products.scatter(jax.nn.gelu(products.gather(norm(x), layer["up"])), layer["down"])


def loss_of(weights: Weights, tokens: jax.Array, targets: jax.Array, sizes: Sizes, products: Products) -> jax.Array:
    """The mean cross-entropy of a batch.

    Args:
        weights: Of the model, or a device's part.
        tokens: [B T], or a device's part.
        targets: [B T], all of them.
        sizes: Of the model.
        products: Of one device, or of several.
    """
    x = weights["embedding"][tokens]
    for layer in weights["layers"]:
        x = feed_forward(attention(x, layer, sizes, products), layer, products)
    return products.loss(norm(x), weights["head"], targets)


def make_loss(sizes: Sizes, mesh: Mesh | None) -> Callable[[Weights, jax.Array, jax.Array], jax.Array]:
    """The loss over the devices of a mesh, or on one device."""
    if mesh is None:
        return functools.partial(loss_of, sizes=sizes, products=PLAIN)
    call = functools.partial(loss_of, sizes=sizes, products=PARALLEL)
    return jax.shard_map(call, mesh=mesh, in_specs=(specs_of_model(sizes), P(AXIS), P()), out_specs=P())


def batch_of(key: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Tokens [B T] and their targets, the next ones: each row counts up by a step of its own."""
    start, step = jax.random.randint(key, (2, sizes.batch, 1), 0, sizes.vocabulary // 4)
    rows = (start + (1 + step) * jnp.arange(sizes.length + 1)) % sizes.vocabulary
    return rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1)


def train(sizes: Sizes, steps: int, mesh: Mesh | None, seed: int = 0) -> list[float]:
    """The loss at every step, over the devices of a mesh or on one."""
    weights, optimizer, compute_loss = init(jax.random.key(seed), sizes), optax.adam(1e-2), make_loss(sizes, mesh)
    if mesh is not None:
        is_spec = functools.partial(lambda kind, x: isinstance(x, kind), P)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of_model(sizes), is_leaf=is_spec)
        weights = jax.device_put(weights, shardings)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Weights, state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(compute_loss)(weights, *batch_of(key, sizes))
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, loss

    losses = []
    for key in jax.random.split(jax.random.key(seed + 1), steps):
        weights, state, loss = step(weights, state, key)
        losses.append(float(loss))
    return losses


def main(arguments: list[str] | None = None) -> int:
    """Trains both; returns 1 if their losses differ."""
    parser = argparse.ArgumentParser(description="Trains a transformer over all devices, and on one.")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    # GPUs and TPUs round the factors of float32 products unless told otherwise.
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), (AxisType.Auto,))
    parallel, plain = (train(Sizes(), options.steps, over) for over in (mesh, None))
    print(f"| step | {mesh.size} devices | one |\n|---|---|---|")
    for step, pair in enumerate(zip(parallel, plain, strict=True)):
        print("| {} | {:.5f} | {:.5f} |".format(step, *pair))
    return int(max(abs(a - b) for a, b in zip(parallel, plain, strict=True)) > 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
