"""One direction of one layer: its weights, and what its tokens get from inputs and states by matrix products."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.recurrent_network import (
    RecurrentNetwork,
    State,
    accumulator,
    first_state,
    input_weights,
    layers_directions_and_state_size,
    real_tokens,
)
from ejkernel.planning.precision import product_precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Direction:
    """One direction of a layer. Its weights are cut out once: in a loop over tokens, every token would copy them.

    Attributes:
        record: The network.
        index: Place among all directions of all layers.
        backwards: Whether it reads from the last token to the first.
        weight_ih: [G * H, inputs].
        weight_hh: [G * H, H].
        bias_ih: [G * H] in the accumulator's dtype, or None.
        bias_hh: [G * H] in the accumulator's dtype, or None.
    """

    record: RecurrentNetwork
    index: int
    backwards: bool
    weight_ih: jax.Array
    weight_hh: jax.Array
    bias_ih: jax.Array | None
    bias_hh: jax.Array | None

    @classmethod
    def of(cls, record: RecurrentNetwork, layer: int, direction: int) -> "Direction":
        """Returns one direction of a layer: 0 reads forwards, 1 backwards."""
        biases = (record.bias_ih, record.bias_hh)
        bias_ih, bias_hh = (None if x is None else x[layer, direction].astype(accumulator(record)) for x in biases)
        return cls(
            record=record,
            index=layer * layers_directions_and_state_size(record)[1] + direction,
            backwards=direction == 1,
            weight_ih=input_weights(record, layer)[direction],
            weight_hh=record.weight_hh[layer, direction],
            bias_ih=bias_ih,
            bias_hh=bias_hh,
        )

    def input_projection(self, inputs: jax.Array) -> jax.Array:
        """Returns W_ih x + b_ih of every token, [T, B, G * H], from inputs [T, B, inputs]."""
        return _add_bias(product(self.record, inputs, self.weight_ih.T), self.bias_ih)

    def state_projection(self, hidden: jax.Array) -> jax.Array:
        """Returns W_hh h + b_hh, [..., G * H], from states [..., H]."""
        return _add_bias(product(self.record, hidden, self.weight_hh.T), self.bias_hh)

    def first_state(self) -> State:
        """Returns the state before the first token."""
        return first_state(self.record, self.index)

    def zeros(self) -> dict[str, jax.Array]:
        """Returns a zero for every weight, in the accumulator's dtype; for biases also where there are none."""
        weights = {"weight_ih": self.weight_ih, "weight_hh": self.weight_hh}
        every = {**weights, "bias_ih": self.weight_hh[:, 0], "bias_hh": self.weight_hh[:, 0]}
        return {name: jnp.zeros(x.shape, accumulator(self.record)) for name, x in every.items()}


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias


def product(record: RecurrentNetwork, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns a matrix product in the accumulator's dtype."""
    dtype = accumulator(record)
    if left.dtype != right.dtype:
        left, right = left.astype(dtype), right.astype(dtype)
    return jnp.matmul(left, right, precision=precision(record), preferred_element_type=dtype)


def precision(record: RecurrentNetwork) -> lax.Precision | None:
    """Returns precision of the matrix products: 16-bit inputs do not need float32's last digits, others do."""
    return product_precision(record.x.dtype)


def time_major(x: jax.Array) -> jax.Array:
    """Returns [B, T, ...] to [T, B, ...], or back."""
    return jnp.swapaxes(x, 0, 1)


def valid_tokens(record: RecurrentNetwork) -> jax.Array | None:
    """Returns which tokens are no padding, bool [T, B, 1]; None for all."""
    tokens = real_tokens(record)
    return None if tokens is None else time_major(tokens)[..., None]


def keep_state_in_padding(valid_tokens: jax.Array | None, new: State, old: State) -> State:
    """Returns `new` where tokens are real, `old` elsewhere."""
    return new if valid_tokens is None else tuple(jnp.where(valid_tokens, n, o) for n, o in zip(new, old, strict=True))


def concatenate_directions(hidden: list[jax.Array], valid_tokens: jax.Array | None) -> jax.Array:
    """Returns output of a layer, [T, B, R * H]: its directions side by side, and 0 in padding."""
    outputs = jnp.concatenate(hidden, axis=-1)
    return outputs if valid_tokens is None else jnp.where(valid_tokens, outputs, 0)
