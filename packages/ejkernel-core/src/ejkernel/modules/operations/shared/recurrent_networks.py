"""The shared code of `rnn`, `gru` and `lstm`."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families import recurrent_network
from ejkernel.families.recurrent_network import GATES_PER_CELL, RecurrentNetwork
from ejkernel.modules.operations.shared.shapes import check_dtype, check_not_empty, check_shape
from ejkernel.ops.model import tolerances

AXES_BY_ARGUMENT = {
    "x": "b t f",
    "weight_ih": "r g f",
    "weight_hh": "l r g u",
    "bias_ih": "l r g",
    "bias_hh": "l r g",
    "weight_ih_deep": "k r g w",
    "initial_hidden": "s b u",
    "initial_cell": "s b u",
    "seq_lengths": "b",
}
TOLERANCE = tolerances(float64=1e-10, float32=3e-5, bfloat16=2e-2, float16=3e-3)
_SHAPE_BY_ARGUMENT = {
    "weight_ih": "R G*H F",
    "weight_hh": "L R G*H H",
    "bias_ih": "L R G*H",
    "bias_hh": "L R G*H",
    "weight_ih_deep": "L-1 R G*H R*H",
    "initial_hidden": "L*R B H",
    "initial_cell": "L*R B H",
}


def validate(args: Any, cell: str) -> None:
    """Raises ValueError for arrays that are wrong on every backend."""
    sizes: dict[str, int] = {}
    check_shape("x", args.x, "B T F", sizes)
    check_not_empty("x", args.x, "B T F", "T F")
    check_dtype("x", args.x, jnp.floating, "a floating dtype")
    check_shape("weight_hh", args.weight_hh, "L R G*H H", sizes)
    check_not_empty("weight_hh", args.weight_hh, "L R G*H H", "L H")
    layers, directions, rows, hidden = args.weight_hh.shape
    if rows != GATES_PER_CELL[cell] * hidden or directions not in (1, 2):
        wants = f"[L, 1 or 2, {GATES_PER_CELL[cell]} * H, H]"
        raise ValueError(f"weight_hh: got shape {tuple(args.weight_hh.shape)}, wants {wants}")
    sizes |= {"L-1": layers - 1, "L*R": layers * directions, "R*H": directions * hidden}
    for name, axes in _SHAPE_BY_ARGUMENT.items():
        array = getattr(args, name, None)
        if array is not None:
            check_shape(name, array, axes, sizes)
            check_dtype(name, array, jnp.floating, "a floating dtype")
    if layers > 1 and args.weight_ih_deep is None:
        raise ValueError(f"weight_ih_deep: got None with {layers} layers, wants the weights of all but the first")
    if args.seq_lengths is not None:
        check_shape("seq_lengths", args.seq_lengths, "B", sizes)
        check_dtype("seq_lengths", args.seq_lengths, jnp.integer, "an integer dtype")


def lower(args: Any, cell: str) -> RecurrentNetwork:
    """Returns the network record of a call."""
    lengths = args.seq_lengths
    deep = None if args.weight_hh.shape[0] == 1 else args.weight_ih_deep
    return RecurrentNetwork(
        x=args.x,
        weight_ih=args.weight_ih,
        weight_hh=args.weight_hh,
        cell=cell,
        weight_ih_deep=deep,
        bias_ih=args.bias_ih,
        bias_hh=args.bias_hh,
        initial_hidden=args.initial_hidden,
        initial_cell=getattr(args, "initial_cell", None),
        seq_lengths=None if lengths is None else jnp.clip(lengths.astype(jnp.int32), 0, args.x.shape[1]),
    )


def reference(args: Any, cell: str) -> tuple[jax.Array, ...]:
    """Returns an operation's meaning in plain jnp."""
    return recurrent_network.reference(lower(args, cell))[0]
