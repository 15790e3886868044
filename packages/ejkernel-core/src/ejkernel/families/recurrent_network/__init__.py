"""The recurrent network family: the record its operations lower to, its meaning and its residuals."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.recurrent_network.record import (
    GATES_PER_CELL,
    NetworkResiduals,
    RecurrentNetwork,
    State,
    accumulator,
    combine_gate_inputs,
    first_state,
    input_and_recurrent_cotangents,
    input_weights,
    layers_directions_and_state_size,
    real_tokens,
    split_gates,
    stack_states,
    state_after_token,
)
from ejkernel.families.recurrent_network.reference import reference
from ejkernel.planning.requests import PADDING

__all__ = [
    "FAMILY",
    "GATES_PER_CELL",
    "NetworkResiduals",
    "RecurrentNetwork",
    "State",
    "accumulator",
    "axes",
    "combine_gate_inputs",
    "first_state",
    "input_and_recurrent_cotangents",
    "input_weights",
    "layers_directions_and_state_size",
    "real_tokens",
    "reference",
    "requests",
    "split_gates",
    "stack_states",
    "state_after_token",
]


def axes(record: RecurrentNetwork) -> dict[str, Any]:
    """Returns axis letters of a record's fields and of its outputs, which end in the cells of a network
    that has them.
    """
    states = ("s b u", "s b u") if record.cell == "lstm" else ("s b u",)
    return {
        "x": "b t f",
        "weight_ih": "r g f",
        "weight_hh": "l r g u",
        "weight_ih_deep": "k r g w",
        "bias_ih": "l r g",
        "bias_hh": "l r g",
        "initial_hidden": "s b u",
        "initial_cell": "s b u",
        "seq_lengths": "b",
        "output": ("b t w", *states),
    }


def requests(record: RecurrentNetwork) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: the rows, and their padding."""
    (rows, tokens), row = record.x.shape[:2], np.arange(record.x.shape[0])
    lengths = np.full(rows, tokens) if record.seq_lengths is None else np.asarray(record.seq_lengths)
    return ({"b": row, "b t": np.where(np.arange(tokens) < lengths[:, None], row[:, None], PADDING)},)


def invariances(record: RecurrentNetwork) -> frozenset[str]:
    """Returns what the rows of a record may depend on: a network that reads backwards cannot continue a call."""
    chunking = ("chunking",) if record.weight_hh.shape[1] == 1 else ()
    return frozenset({"batch", "padding", *chunking})


FAMILY = Family(
    name="recurrent_network",
    record=RecurrentNetwork,
    differentiable=(
        "x",
        "weight_ih",
        "weight_hh",
        "weight_ih_deep",
        "bias_ih",
        "bias_hh",
        "initial_hidden",
        "initial_cell",
    ),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.weight_hh.shape[3],),
    axes=axes,
    # Each shard is a separate call, since rows are independent.
    shardable="b",
    reference=reference,
    requests=requests,
    invariances=invariances,
)
