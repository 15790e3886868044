"""A mixture-of-experts layer without capacity or dropped tokens, on one device and over an expert-parallel mesh axis.

    python examples/moe.py                  # a small layer, on one device and on all there are, with gradients

    tokens -> top-k experts and weights -> rows sorted by expert -> two grouped products
           -> weighted sum of the k rows of each token, wherever they are

Over a mesh axis every device has a share of the tokens and of the experts. Rows go to the devices of their experts by
one all-to-all, and come back by another. Where a token has as many experts as there are devices, or more, nearly every
device needs it: then tokens are gathered, and every device adds up what its experts make.

Source: Gale et al. 2022, arXiv:2211.15841 (MegaBlocks).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.modules import gather_reduce, grouped_matmul


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["router", "gate_up", "down"], meta_fields=["top_k", "platform"]
)
@dataclasses.dataclass(frozen=True)
class Experts:
    """A layer of E experts, each a gated MLP.

    Attributes:
        router: [D, E].
        gate_up: [E, D, 2 F], the gate's columns first.
        down: [E, F, D].
        top_k: Experts a token.
        platform: Of the grouped products; None for the best there is.
    """

    router: jax.Array
    gate_up: jax.Array
    down: jax.Array
    top_k: int
    platform: str | None = None


def init(key: jax.Array, experts: int, size: int, inner: int, top_k: int, dtype: Any = jnp.float32) -> Experts:
    """A layer with normal weights."""
    keys = jax.random.split(key, 3)
    shapes = (size, experts), (experts, size, 2 * inner), (experts, inner, size)
    made = (jax.random.normal(k, s, dtype) * s[-2] ** -0.5 for k, s in zip(keys, shapes, strict=True))
    return Experts(*made, top_k=top_k)


def route(layer: Experts, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts of every token, [T, k] int32, and their weights, which sum to 1."""
    scores = jax.nn.softmax((tokens @ layer.router).astype(jnp.float32))
    weights, experts = lax.top_k(scores, layer.top_k)
    return experts, weights / jnp.sum(weights, axis=-1, keepdims=True)


def permute(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """`rows[order]`, whose gradient is a gather too; an index beyond the rows gives zeros.

    Args:
        rows: [R, D].
        order: [S], for each row of the result its row in `rows`.
        inverse: [R], for each row of `rows` its row in the result.
    """
    return gather_reduce(rows, order[:, None], inverse[:, None])


def sort_by(key: jax.Array, bins: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The stable order of keys 0 to `bins`, its inverse, and how many there are of each below `bins`."""
    order = jnp.argsort(key, stable=True)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype), unique_indices=True)
    sizes = jnp.sum(key[:, None] == jnp.arange(bins), axis=0, dtype=jnp.int32)
    return order, inverse, sizes


def mlp(layer: Experts, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """The experts' gated MLP of rows that are sorted by expert."""
    product = functools.partial(grouped_matmul, preferred_element_type=rows.dtype, platform=layer.platform)
    return product(gated(product(rows, layer.gate_up, sizes)), layer.down, sizes)


def gated(rows: jax.Array) -> jax.Array:
    """SwiGLU: the first half of the columns gates the second."""
    gate, up = jnp.split(rows, 2, axis=-1)
    return jax.nn.silu(gate) * up


def moe(layer: Experts, tokens: jax.Array) -> jax.Array:
    """The layer on one device, [T, D]."""
    experts, weights = route(layer, tokens)
    order, inverse, sizes = sort_by(experts.reshape(-1), layer.gate_up.shape[0])
    inverse = inverse.reshape(experts.shape)
    return combine(mlp(layer, dispatch(tokens, order, inverse), sizes), weights, order, inverse)


def dispatch(tokens: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """The rows of the experts, [R, D]: each is the token that it was made of.

    Args:
        tokens: [T, D].
        order: [R], for each row which of the T k pairs of a token and one of its experts it is, or T k for none.
        inverse: [T, k], the row of each pair, or R for none.
    """
    return gather_reduce(tokens, order[:, None] // inverse.shape[1], inverse)


def combine(rows: jax.Array, weights: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """The weighted sum of the k rows of each token, [T, D], which are gathered as they are added.

    Args:
        rows: [R, D].
        weights: [T, k].
        order: As `dispatch` takes it.
        inverse: Likewise.
    """
    return gather_reduce(rows, inverse, order[:, None], weights)


def moe_over(axis: str, layer: Experts, tokens: jax.Array) -> jax.Array:
    """The layer inside `shard_map`: this device's tokens, and its share of the experts; `router` is whole."""
    devices = lax.axis_size(axis)
    return (tokens_travel if layer.top_k >= devices else rows_travel)(axis, layer, tokens)


def tokens_travel(axis: str, layer: Experts, tokens: jax.Array) -> jax.Array:
    """The layer inside `shard_map`, where nearly every device needs every token.

    tokens, their experts and weights     all-gather: every device has all
    rows of this device's experts         first in the order; the others are rows of no group, and 0
    sums of every token's rows            reduce-scatter: added up over devices, each keeps its own tokens
    """
    own = layer.gate_up.shape[0]
    experts, weights = route(layer, tokens)
    everyone = functools.partial(lax.all_gather, axis_name=axis, tiled=True)
    tokens, experts, weights = everyone(tokens), everyone(experts), everyone(weights)
    local = experts - lax.axis_index(axis) * own
    here = (local >= 0) & (local < own)
    order, inverse, sizes = sort_by(jnp.where(here, local, own).reshape(-1), own)
    pairs = order.shape[0]
    inverse = jnp.where(here, inverse.reshape(experts.shape), pairs)
    order = jnp.where(jnp.arange(pairs) < jnp.sum(sizes), order, pairs)  # the others' rows are no pair's
    made = combine(mlp(layer, dispatch(tokens, order, inverse), sizes), weights, order, inverse)
    return lax.psum_scatter(made, axis, tiled=True)


def rows_travel(axis: str, layer: Experts, tokens: jax.Array) -> jax.Array:
    """The layer inside `shard_map`, where a device needs few of the tokens.

    A device sends every other one as many places as it has rows, so that nothing is dropped however tokens choose;
    places that no row needs are zeros, and of no group.

        rows sorted by expert, so by device      | to 0 | to 1 |  to 2  | ...
        places [devices, slots]                    cut off at each device, and padded
        all-to-all                                 | from 0 | from 1 | ...   with how many rows each expert gets
        sorted by expert, multiplied, back the same way
    """
    devices, own = lax.axis_size(axis), layer.gate_up.shape[0]
    experts, weights = route(layer, tokens)
    order, inverse, sizes = sort_by(experts.reshape(-1), devices * own)
    pairs = inverse.reshape(experts.shape)
    slots = order.shape[0]
    per_device = jnp.sum(sizes.reshape(devices, own), axis=1)
    place, back = _places(per_device, slots)
    received = _exchange(permute(dispatch(tokens, order, pairs), place, back), axis, devices)
    counts = _exchange(sizes, axis, devices).reshape(devices, own)
    key = _expert_of_place(counts, slots)
    order_here, inverse_here, _ = sort_by(key, own)
    made = mlp(layer, permute(received, order_here, inverse_here), jnp.sum(counts, axis=0))
    made = _exchange(permute(made, inverse_here, order_here), axis, devices)
    return combine(permute(made, back, place), weights, order, pairs)


def _exchange(x: jax.Array, axis: str, devices: int) -> jax.Array:
    """Part n of every device's rows goes to device n."""
    parts = x.reshape(devices, -1, *x.shape[1:])
    return lax.all_to_all(parts, axis, split_axis=0, concat_axis=0).reshape(x.shape)


def _places(per_device: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """For every place its row, one beyond the last for none, and for every row its place."""
    starts = jnp.cumsum(per_device) - per_device
    slot = jnp.arange(slots)
    place = jnp.where(slot < per_device[:, None], starts[:, None] + slot, slots).reshape(-1)
    device = jnp.sum(slot[:, None] >= (starts + per_device), axis=1)
    return place, device * slots + slot - starts[device]


def _expert_of_place(counts: jax.Array, slots: int) -> jax.Array:
    """The local expert of every place that came from every device; one beyond the last for a place without a row."""
    ends = jnp.cumsum(counts, axis=1)
    return jnp.sum(jnp.arange(slots)[None, :, None] >= ends[:, None, :], axis=2).reshape(-1)


def sharded(mesh: jax.sharding.Mesh, axis: str, layer: Experts, tokens: jax.Array) -> jax.Array:
    """The layer over a mesh axis, whose devices share tokens and experts."""
    spec = jax.sharding.PartitionSpec
    specs = dataclasses.replace(layer, router=spec(), gate_up=spec(axis), down=spec(axis))
    run = functools.partial(moe_over, axis)
    return jax.shard_map(run, mesh=mesh, in_specs=(specs, spec(axis)), out_specs=spec(axis))(layer, tokens)


def main() -> None:
    """Compares the layer on one device with the layer on all devices, and their gradients."""
    devices = jax.device_count()
    layer = init(jax.random.key(0), 4 * devices, 64, 32, 2)
    tokens = jax.random.normal(jax.random.key(1), (64 * devices, 64))
    mesh = jax.make_mesh((devices,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(call: Any, layer: Experts, tokens: jax.Array) -> jax.Array:
        return jnp.sum(call(layer, tokens) ** 2)

    one = jax.jit(jax.value_and_grad(functools.partial(loss, moe)))(layer, tokens)
    all_of_them = functools.partial(sharded, mesh, "experts")
    many = jax.jit(jax.value_and_grad(functools.partial(loss, all_of_them)))(layer, tokens)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        assert jnp.allclose(x, y, rtol=1e-4, atol=1e-4)
    print(f"{tokens.shape[0]} tokens, {layer.gate_up.shape[0]} experts: one device and {devices} agree, gradients too")


if __name__ == "__main__":
    main()
