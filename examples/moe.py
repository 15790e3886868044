"""A mixture-of-experts layer without capacity or dropped tokens, on one device and over an expert-parallel mesh axis.

    python examples/moe.py                  # a small layer, on one device and on all there are, with gradients

    tokens -> top-k experts and weights -> rows sorted by expert -> two grouped products
           -> weighted sum of the k rows of each token, wherever they are

On a GPU the first product gathers its rows and gates its results, so that neither rows nor products are in memory.

Over a mesh axis every device has a share of tokens and experts. Rows go to the devices of their experts and back by
two all-to-alls. Where a token has as many experts as there are devices, or more, nearly every device needs it: then
each gets all tokens and sends back sums; `XLA_FLAGS=--xla_gpu_collective_permute_mode=peer` copies without a kernel.

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
    return routed(layer, tokens @ layer.router)


def routed(layer: Experts, logits: jax.Array) -> Routing:
    """`route`, of the tokens' logits [T, E]."""
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


def multiplied(layer: Experts, rows: jax.Array, matrices: jax.Array, sizes: jax.Array, **options: Any) -> jax.Array:
    """Rows that are sorted by expert, each times its expert's matrix."""
    return grouped_matmul(rows, matrices, sizes, preferred_element_type=rows.dtype, platform=layer.platform, **options)


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
    return sums_of(layer, tokens, route(layer, tokens))


def sums_of(layer: Experts, tokens: jax.Array, to: Routing) -> jax.Array:
    """What the experts make of the tokens, added up, [T, D]."""
    return combine(rows_of(layer, tokens, to.order, to.places, to.sizes), to.weights, to.order, to.places)


def rows_of(layer: Experts, tokens: jax.Array, order: jax.Array, places: jax.Array, sizes: jax.Array) -> jax.Array:
    """What the experts make of the tokens, [R, D]; rows of no expert, which `combine` does not read, are undefined."""
    if not gathers(layer):
        return mlp(layer, dispatch(tokens, order, places), sizes)
    return multiplied(layer, hidden(layer, tokens, order, places, sizes), layer.down, sizes, left_over="undefined")


def gathers(layer: Experts) -> bool:
    """Whether the first product gathers its rows and gates its results: GPUs have a kernel that does both."""
    return layer.platform is None and jax.default_backend() == "gpu"


@jax.custom_vjp
def hidden(layer: Experts, tokens: jax.Array, order: jax.Array, places: jax.Array, sizes: jax.Array) -> jax.Array:
    """The inner rows, [R, F], in one call. A gradient needs what that call leaves out, so there are three then."""
    return gated_grouped_matmul(tokens, layer.gate_up, sizes, order // places.shape[1], left_over="undefined")


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
    return (tokens_travel if layer.top_k >= lax.axis_size(axis) else rows_travel)(axis, layer, tokens)


def tokens_travel(axis: str, layer: Experts, tokens: jax.Array) -> jax.Array:
    """The layer inside `shard_map`, where nearly every device needs every token.

    logits of this device's tokens        to all others: every device routes all tokens in the same way
    tokens                                to all others, while they are routed
    rows of this device's experts         lie together in the order; the others are rows of no group
    sums of other devices' tokens         to their devices, while the sums of this one's are made
    """
    # Logits first: with them there, routing needs no tokens.
    tokens, logits = lax.optimization_barrier((tokens, everyone(axis, tokens @ layer.router)))
    to = routed(layer, logits)
    # The same on every device, so that all take the same branch.
    most = jnp.max(jnp.sum(to.sizes.reshape(lax.axis_size(axis), -1), axis=1))
    return own_experts(axis, layer, tokens, _own_rows(axis, layer, to), most)


def everyone(axis: str, x: jax.Array) -> jax.Array:
    """This device's x, after it the next device's, and so on."""
    return jnp.concatenate([x, *(_sent(axis, x, -n) for n in range(1, lax.axis_size(axis)))])


def _sent(axis: str, x: jax.Array, distance: int) -> jax.Array:
    """x, sent `distance` devices further: what this device gets."""
    devices = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(n, (n + distance) % devices) for n in range(devices)])


def _own_rows(axis: str, layer: Experts, to: Routing) -> Routing:
    """The rows of this device's experts, which come first; pairs without one name row R, rows of others pair R."""
    own, pairs = layer.gate_up.shape[0], to.order.shape[0]
    first = lax.axis_index(axis) * own
    begin = jnp.sum(jnp.where(jnp.arange(to.sizes.shape[0]) < first, to.sizes, 0))
    sizes = lax.dynamic_slice_in_dim(to.sizes, first, own)
    places, rows = to.places - begin, jnp.sum(sizes)
    places = jnp.where((places >= 0) & (places < rows), places, pairs)
    order = jnp.where(jnp.arange(pairs) < rows, jnp.roll(to.order, -begin), pairs)
    return Routing(to.weights, to.experts, places, order, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def own_experts(axis: str, layer: Experts, tokens: jax.Array, to: Routing, most: jax.Array) -> jax.Array:
    """What the experts of all devices make of this device's tokens, [T, D].

    `to` is of all tokens, this device's first, and of the rows that `_own_rows` leaves. `most` is the most rows of any
    device, which the gradient asks for.
    """
    return to_owners(axis, rows_of(layer, everyone(axis, tokens), to.order, to.places, to.sizes), to)


def to_owners(axis: str, made: jax.Array, to: Routing) -> jax.Array:
    """The sums of this device's tokens, [T, D]: those of its own rows and of every other device's."""
    devices = lax.axis_size(axis)
    count, top_k = to.places.shape[0] // devices, to.places.shape[1]

    def sums(n: int) -> jax.Array:
        part = slice(n * count, (n + 1) * count)
        return combine(made, to.weights[part], to.order - n * count * top_k, to.places[part])

    # They travel while the next ones are made. This device's own come last.
    return _added(*(_sent(axis, sums(n), n) for n in range(1, devices)), sums(0))


def _added(*parts: jax.Array) -> jax.Array:
    """The sum of arrays, in float32."""
    return sum(x.astype(jnp.float32) for x in parts).astype(parts[0].dtype)


# Kernels take time for rows of no group, too, and a device may need rows for all pairs. So both passes of a gradient
# have two branches: one whose arrays have a quarter more rows than a device's share, and one for any number of rows.


def set_aside(devices: int, pairs: int) -> int:
    """The rows of the first branch."""
    return min(pairs, -(-5 * pairs // (4 * devices * 128)) * 128)


def _first_rows(axis: str, to: Routing) -> Routing:
    return dataclasses.replace(to, order=to.order[: set_aside(lax.axis_size(axis), to.order.size)])


def _own_forward(axis: str, layer: Experts, tokens: jax.Array, to: Routing, most: jax.Array) -> Any:
    """`own_experts`, and what the first branch of its gradient needs; the second one computes everything again."""
    few, arrived = _first_rows(axis, to), everyone(axis, tokens)

    def first() -> Any:
        rows = dispatch(arrived, few.order, few.places)
        products = multiplied(layer, rows, layer.gate_up, few.sizes)
        made = multiplied(layer, gated(products), layer.down, few.sizes)
        return to_owners(axis, made, few), (rows, products, made)

    def second() -> Any:
        nothing = (lax.pcast(jnp.zeros(x.shape, x.dtype), axis, to="varying") for x in jax.eval_shape(first)[1])
        return to_owners(axis, rows_of(layer, arrived, to.order, to.places, to.sizes), to), tuple(nothing)

    output, kept = lax.cond(most <= few.order.size, first, second)
    return output, (layer, tokens, to, most, kept)


def _own_backward(axis: str, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    layer, tokens, to, most, kept = saved
    few, cotangents = _first_rows(axis, to), everyone(axis, cotangent)

    def run(branch: Any) -> Any:
        *matrices, of_tokens, of_weights = branch()
        own, *others = jnp.split(of_tokens, lax.axis_size(axis))
        return *matrices, _added(own, *(_sent(axis, x, n) for n, x in enumerate(others, 1))), of_weights

    def first() -> Any:
        rows, products, made = kept
        inner, of_gate = jax.vjp(gated, products)
        of_combine = jax.vjp(lambda x, weights: combine(x, weights, few.order, few.places), made, few.weights)[1]
        of_down = jax.vjp(lambda x, down: multiplied(layer, x, down, few.sizes), inner, layer.down)[1]
        of_gate_up = jax.vjp(lambda x, matrices: multiplied(layer, x, matrices, few.sizes), rows, layer.gate_up)[1]
        of_dispatch = jax.vjp(lambda x: dispatch(x, few.order, few.places), jnp.zeros_like(cotangents))[1]
        grad_made, grad_weights = of_combine(cotangents)
        grad_inner, grad_down = of_down(grad_made)
        grad_rows, grad_gate_up = of_gate_up(*of_gate(grad_inner))
        return grad_gate_up, grad_down, *of_dispatch(grad_rows), grad_weights

    def second() -> Any:
        of_layer, of_tokens, of_to = jax.vjp(sums_of, layer, everyone(axis, tokens), to)[1](cotangents)
        return of_layer.gate_up, of_layer.down, of_tokens, of_to.weights

    grads = lax.cond(most <= few.order.size, lambda: run(first), lambda: run(second))
    # None where nothing depends on an array, or where it holds integers.
    of_layer = dataclasses.replace(layer, router=None, gate_up=grads[0], down=grads[1])
    return of_layer, grads[2], Routing(grads[3], None, None, None, None), None


own_experts.defvjp(_own_forward, _own_backward)


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

    def passes(call: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(call(*x) ** 2), (0, 1)))(layer, tokens)

    one, many = passes(moe), passes(functools.partial(sharded, mesh, "experts"))
    assert all(jax.tree.leaves(jax.tree.map(functools.partial(jnp.allclose, rtol=1e-4, atol=1e-4), one, many)))
    print(f"{tokens.shape[0]} tokens, {layer.gate_up.shape[0]} experts: one device and {devices} agree, gradients too")


if __name__ == "__main__":
    main()
