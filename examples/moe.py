"""A mixture-of-experts layer without capacity or dropped tokens, on one device and over an expert-parallel mesh axis.

    python examples/moe.py                  # a small layer, on one device and on all there are, with gradients

    tokens -> top-k experts and weights -> rows sorted by expert -> two grouped products
           -> weighted sum of the k rows of each token, wherever they are

On a GPU the first product gathers its rows and gates its results, so that neither rows nor products are in memory.

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

from ejkernel.modules import expert_routing, gated_grouped_matmul, gather_reduce, grouped_matmul


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where the rows of T tokens with k experts each go; R = T k pairs of a token and one of its experts.

    Attributes:
        weights: [T, k], which sum to 1.
        experts: [T, k] int32.
        places: [T, k] int32, the row of each pair.
        order: [R] int32, the pair of each row.
        sizes: [E] int32, how many rows each expert has.
    """

    weights: jax.Array
    experts: jax.Array
    places: jax.Array
    order: jax.Array
    sizes: jax.Array


def route(layer: Experts, tokens: jax.Array) -> Routing:
    """Every token to the experts with its largest logits, by the softmax of these."""
    logits = tokens @ layer.router
    experts, places, order, sizes = expert_routing(logits, layer.top_k)
    weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=1).astype(jnp.float32))
    return Routing(weights, experts, places, order, sizes)


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


def multiplied(layer: Experts, rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows that are sorted by expert, each times its expert's matrix."""
    return grouped_matmul(rows, matrices, sizes, preferred_element_type=rows.dtype, platform=layer.platform)


def mlp(layer: Experts, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """The experts' gated MLP of rows that are sorted by expert."""
    return multiplied(layer, gated(multiplied(layer, rows, layer.gate_up, sizes)), layer.down, sizes)


@functools.partial(jax.checkpoint, prevent_cse=False)
def gated(rows: jax.Array) -> jax.Array:
    """SwiGLU: the first half of the columns gates the second. A gradient keeps rows, and computes the rest again."""
    gate, up = jnp.split(rows, 2, axis=-1)
    return jax.nn.silu(gate) * up


def moe(layer: Experts, tokens: jax.Array) -> jax.Array:
    """The layer on one device, [T, D]."""
    to = route(layer, tokens)
    rows = rows_of(layer, tokens, to.order, to.places, to.sizes)
    return combine(rows, to.weights, to.order, to.places)


def rows_of(layer: Experts, tokens: jax.Array, order: jax.Array, places: jax.Array, sizes: jax.Array) -> jax.Array:
    """What the experts make of the tokens, [R, D]; of arguments as `dispatch` and `mlp` take them."""
    if not gathers(layer):
        return mlp(layer, dispatch(tokens, order, places), sizes)
    return multiplied(layer, hidden(layer, tokens, order, places, sizes), layer.down, sizes)


def gathers(layer: Experts) -> bool:
    """Whether the first product gathers its rows and gates its results: GPUs have a kernel that does both."""
    return layer.platform is None and jax.default_backend() == "gpu"


@jax.custom_vjp
def hidden(layer: Experts, tokens: jax.Array, order: jax.Array, places: jax.Array, sizes: jax.Array) -> jax.Array:
    """The inner rows, [R, F], in one call. A gradient needs what that call leaves out, so there are three then."""
    return gated_grouped_matmul(tokens, layer.gate_up, sizes, order // places.shape[1])


def _hidden_forward(layer: Experts, tokens: jax.Array, order: jax.Array, places: jax.Array, sizes: jax.Array) -> Any:
    def apart(layer: Experts, tokens: jax.Array) -> jax.Array:
        return gated(multiplied(layer, dispatch(tokens, order, places), layer.gate_up, sizes))

    return jax.vjp(apart, layer, tokens)


def _hidden_backward(pullback: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    return (*pullback(cotangent), None, None, None)


hidden.defvjp(_hidden_forward, _hidden_backward)


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
    to = route(layer, tokens)
    everyone = functools.partial(lax.all_gather, axis_name=axis, tiled=True)
    tokens, experts, weights = everyone(tokens), everyone(to.experts), everyone(to.weights)
    local = experts - lax.axis_index(axis) * own
    here = (local >= 0) & (local < own)
    order, inverse, sizes = sort_by(jnp.where(here, local, own).reshape(-1), own)
    pairs = order.shape[0]
    inverse = jnp.where(here, inverse.reshape(experts.shape), pairs)
    order = jnp.where(jnp.arange(pairs) < jnp.sum(sizes), order, pairs)  # the others' rows are no pair's
    made = combine(rows_of(layer, tokens, order, inverse, sizes), weights, order, inverse)
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
    to = route(layer, tokens)
    slots = to.order.shape[0]
    per_device = jnp.sum(to.sizes.reshape(devices, own), axis=1)
    place, back = _places(per_device, slots)
    received = _exchange(permute(dispatch(tokens, to.order, to.places), place, back), axis, devices)
    counts = _exchange(to.sizes, axis, devices).reshape(devices, own)
    key = _expert_of_place(counts, slots)
    order_here, inverse_here, _ = sort_by(key, own)
    made = mlp(layer, permute(received, order_here, inverse_here), jnp.sum(counts, axis=0))
    made = _exchange(permute(made, inverse_here, order_here), axis, devices)
    return combine(permute(made, back, place), to.weights, to.order, to.places)


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
