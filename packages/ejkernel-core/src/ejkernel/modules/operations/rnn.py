"""Recurrent networks without gates."""

from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.families import recurrent_network
from ejkernel.families.recurrent_network import RecurrentNetwork
from ejkernel.modules.operations.cases import recurrent_network as cases
from ejkernel.modules.operations.configs import RNNConfig
from ejkernel.modules.operations.shared import recurrent_networks
from ejkernel.modules.operations.shared.conditions import conditions_of_row_lengths
from ejkernel.modules.operations.shared.paged_arguments import as_choice
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


@document_options
def rnn(
    x: Float[Array, "b t f"],
    weight_ih: Float[Array, "r g f"],
    weight_hh: Float[Array, "l r g u"],
    bias_ih: Float[Array, "l r g"] | None = None,
    bias_hh: Float[Array, "l r g"] | None = None,
    weight_ih_deep: Float[Array, "k r g w"] | None = None,
    initial_hidden: Float[Array, "s b u"] | None = None,
    seq_lengths: Integer[Array, " b"] | None = None,
    *,
    nonlinearity: Literal["tanh", "relu"] = "tanh",
    platform: str | None = None,
    cfg: RNNConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "b t w"], Float[Array, "s b u"]]:
    """Runs a recurrent network without gates (Elman 1990), as cuDNN and PyTorch define it.

    Shape letters: B rows, T tokens, F features, L layers, R directions (1, or 2 for a bidirectional network), H hidden
    size. The formula is in `ejkernel.families.recurrent_network`. Products that wait for no state are
    taken over several tokens at once, forward and backward.

    Over devices, rows can be split.

    Args:
        x: [B, T, F] float16, bfloat16, float32 or float64.
        weight_ih: [R, H, F] floating, of the first layer.
        weight_hh: [L, R, H, H] floating. L, R and H are read off it.
        bias_ih: [L, R, H] floating, added to what comes from the inputs.
        bias_hh: [L, R, H] floating, added to what comes from the state before.
        weight_ih_deep: [L - 1, R, H, R * H] floating, of the other layers; needed when L > 1.
        initial_hidden: [L * R, B, H] floating, the states before the first token, directions of a layer next to each
            other; None is zeros.
        seq_lengths: [B] int, tokens of each row, which padding follows; None is T. May be traced. The second direction
            starts at the last token of each row.
        nonlinearity: `"tanh"` or `"relu"`.

    Returns:
        Output [B, T, R * H] of the last layer in x's dtype, 0 in padding; the states after the last token
        [L * R, B, H] in float32 (float64 for float64).

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import rnn

        x = jax.random.normal(jax.random.key(0), (2, 10, 3))
        weight_ih = jax.random.normal(jax.random.key(1), (2, 5, 3))  # directions, units, features
        weight_hh = jax.random.normal(jax.random.key(2), (1, 2, 5, 5))
        output, hidden = rnn(x, weight_ih, weight_hh, seq_lengths=jnp.array([10, 7]))
        assert output.shape == (2, 10, 10) and hidden.shape == (2, 2, 5)
        assert not output[1, 7:].any() and jnp.allclose(hidden[0], output[jnp.arange(2), jnp.array([9, 6]), :5])
        ```
    """
    return run_operation(OP, locals())


class RNNArguments(ArgumentRecord, of=rnn):
    """The arguments of a call of `rnn`."""

    def __post_init__(self) -> None:
        as_choice("nonlinearity", self.nonlinearity, ("tanh", "relu"))


def validate(args: RNNArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    recurrent_networks.validate(args, args.nonlinearity)


def lower(args: RNNArguments) -> RecurrentNetwork:
    """Returns the network record of a call."""
    return recurrent_networks.lower(args, args.nonlinearity)


def reference(args: RNNArguments) -> tuple[jax.Array, ...]:
    """Returns the operation's meaning in plain jnp."""
    return recurrent_networks.reference(args, args.nonlinearity)


class RNN(Kernel[RNNConfig, tuple[Array, Array]]):
    """Wraps `rnn` in an object that an `Executor` can call."""


OP = Op(
    arguments=RNNArguments,
    family=recurrent_network.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions_of_row_lengths,
    reference=reference,
    cases=cases.cases(RNNArguments, "tanh"),
    tolerance=recurrent_networks.TOLERANCE,
    make_inputs=cases.make_inputs,
    axes={name: letters for name, letters in recurrent_networks.AXES_BY_ARGUMENT.items() if name != "initial_cell"},
)
RNN.op = OP
