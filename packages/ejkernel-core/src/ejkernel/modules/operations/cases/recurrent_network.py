"""Inputs for `rnn`, `gru` and `lstm`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.recurrent_network import GATES_PER_CELL
from ejkernel.modules.operations.cases.tables import fill_arguments, tagged_case
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class NetworkSizes:
    """Shape of a network: rows, tokens, features, layers, directions, hidden size."""

    b: int = 2
    t: int = 20
    f: int = 12
    l: int = 1  # noqa: E741
    r: int = 1
    h: int = 16
    dtype: Any = jnp.float32

    def shapes(self, gates: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all arrays but the lengths."""
        z, rows = self, gates * self.h
        return {
            "x": (z.b, z.t, z.f),
            "weight_ih": (z.r, rows, z.f),
            "weight_hh": (z.l, z.r, rows, z.h),
            "bias_ih": (z.l, z.r, rows),
            "bias_hh": (z.l, z.r, rows),
            "weight_ih_deep": (z.l - 1, z.r, rows, z.r * z.h),
            "initial_hidden": (z.l * z.r, z.b, z.h),
            "initial_cell": (z.l * z.r, z.b, z.h),
        }


BIAS_FIELDS = ("bias_ih", "bias_hh")
STATE_FIELDS = ("initial_hidden", "initial_cell")

# The name of a case, its sizes, its optional arguments (which are what the case tests), lengths, and further tags.
_Row = tuple[str, NetworkSizes, tuple[str, ...], tuple[int, ...] | None, tuple[str, ...]]
_CASE_TABLE: tuple[_Row, ...] = (
    ("plain", NetworkSizes(), (), None, ()),
    ("one token, states", NetworkSizes(b=1, t=1), STATE_FIELDS, None, ("awkward",)),
    ("lengths, both directions", NetworkSizes(b=3, r=2), BIAS_FIELDS, (20, 0, 7), ("awkward",)),
    ("everything", NetworkSizes(b=3, f=7, l=2, r=2), ("weight_ih_deep", *BIAS_FIELDS, *STATE_FIELDS), (1, 20, 13), ()),
    ("bfloat16", NetworkSizes(h=32, dtype=jnp.bfloat16), BIAS_FIELDS, None, ()),
    ("model", NetworkSizes(b=32, t=512, f=512, l=2, r=2, h=512), ("weight_ih_deep", *BIAS_FIELDS), None, ("bench",)),
    (
        "small model",
        NetworkSizes(b=4, t=128, f=128, l=2, r=2, h=128),
        ("weight_ih_deep", *BIAS_FIELDS),
        None,
        ("bench_cpu",),
    ),
)


def cases(record_type: type, cell: str) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    fields = {field.name for field in dataclasses.fields(record_type)}
    network_cases = [_make_case(record_type, row, cell, fields) for row in _CASE_TABLE]
    if "nonlinearity" not in fields:
        return tuple(network_cases)
    return (
        *network_cases,
        dataclasses.replace(network_cases[0], name="relu", make=_relu_input_maker(network_cases[0])),
    )


def _relu_input_maker(case: Case) -> Any:
    def make(key: jax.Array) -> Any:
        return dataclasses.replace(case.make(key), nonlinearity="relu")

    return make


def _make_case(record_type: type, row: _Row, cell: str, argument_names: set[str]) -> Case:
    name, sizes, optional, lengths, tags = row
    names = [field for field in ("x", "weight_ih", "weight_hh", *optional) if field in argument_names]

    def make(key: jax.Array) -> Any:
        shapes, keys = sizes.shapes(GATES_PER_CELL[cell]), jax.random.split(key, len(names))
        arrays = {field: _normal_array(field, shapes[field], k) for field, k in zip(names, keys, strict=True)}
        arrays = {field: x.astype(sizes.dtype) for field, x in arrays.items()}
        return record_type(**arrays, seq_lengths=None if lengths is None else jnp.array(lengths, jnp.int32))

    exercises = {field for field in optional if field in argument_names} | ({"seq_lengths"} if lengths else set())
    return tagged_case(name, make, exercises, tags)


def _normal_array(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Returns normal numbers, weights so small that states stay where the cells are not flat."""
    x = jax.random.normal(key, shape, jnp.float32)
    return x / shape[-1] ** 0.5 if name.startswith("weight") else x


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, rows without padding."""

    def make(name: str, shape: Any, key: jax.Array) -> jax.Array:
        if name == "seq_lengths":
            return jnp.full(shape.shape, args.x.shape[1], shape.dtype)
        return _normal_array(name, shape.shape, key).astype(shape.dtype)

    return fill_arguments(args, key, make)
