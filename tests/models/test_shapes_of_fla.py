"""The recurrences at the shapes and within the tolerances of flash-linear-attention's own unit tests.

`fla_shapes.toml` lists them. What dispatch chooses on this device is compared with the reference, token by token in
float32, and with its gradients. A CPU takes the shapes that are small enough, and a GPU all of them.
"""

import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import kda_decay
from ejkernel.ops.plugins import registry

GROUPS = tomllib.loads(Path(__file__).with_name("fla_shapes.toml").read_text(encoding="utf-8"))["group"]
SMALL = 5_000_000
"""State elements that a CPU updates, one token after the other, in a second."""

Arrays = dict[str, Any]


def rows() -> list[dict[str, Any]]:
    """Every row, with what its group says."""
    settings = ({name: x for name, x in group.items() if name not in ("columns", "rows")} for group in GROUPS)
    return [
        {"H": 1, "B": 1, **setting, **dict(zip(group["columns"], row, strict=True))}
        for group, setting in zip(GROUPS, settings, strict=True)
        for row in group["rows"]
    ]


def tokens(row: dict[str, Any]) -> int:
    return row["bounds"][-1] if "bounds" in row else row["T"]


def heads(row: dict[str, Any]) -> int:
    return row.get("HV", row["H"])


def is_small(row: dict[str, Any]) -> bool:
    return row["B"] * tokens(row) * heads(row) * row["D"] ** 2 <= SMALL


def name(row: dict[str, Any]) -> str:
    sizes = "-".join(
        f"{letter}{row[letter]}" for letter in ("B", "H", "HV", "D", "gate", "scale", "mask") if letter in row
    )
    return f"{row['source']}-T{tokens(row)}-{sizes}-{row['dtype']}"


def random(key: jax.Array, kind: str, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Numbers of a distribution: "normal", "uniform" or "zeros"."""
    if kind == "zeros":
        return jnp.zeros(shape, dtype)
    draw = jax.random.uniform if kind == "uniform" else jax.random.normal
    return draw(key, shape).astype(dtype)


def of_length_one(x: jax.Array) -> jax.Array:
    """x over its length, in its dtype."""
    wide = x.astype(jnp.float32)
    return (wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)).astype(x.dtype)


def inputs(row: dict[str, Any]) -> tuple[Arrays, Arrays]:
    """The differentiable arguments of a row's call, and all others."""
    keys = iter(jax.random.split(jax.random.key(42), 10))
    dtype, shape = jnp.dtype(row["dtype"]), (row["B"], tokens(row))
    numbers = row["numbers"]
    key_shape, value_shape = (*shape, row["H"], row["D"]), (*shape, heads(row), row["D"])
    arrays = {field: random(next(keys), numbers, key_shape, dtype) for field in ("query", "key")}
    arrays["value"] = random(next(keys), numbers, value_shape, dtype)
    options: Arrays = {"return_state": True, "softmax_scale": row.get("scale", 0) or row["D"] ** -0.5}
    if "delta" in row["operation"]:
        normalised = row["normalised"]
        if normalised:
            arrays |= {field: of_length_one(arrays[field]) for field in ("query", "key")}
        options["use_qk_l2norm"] = not normalised
        kind = "uniform" if row["gates"].startswith("uniform") else "normal"
        arrays["beta"] = jax.nn.sigmoid(random(next(keys), kind, value_shape[:3]))
    arrays |= gates(row, value_shape, next(keys))
    count = len(row["bounds"]) - 1 if "bounds" in row else row["B"]
    kind = row.get("state", "uniform" if row["gates"] == "uniform channels" else "normal")
    arrays["initial_state"] = random(next(keys), kind, (count, heads(row), row["D"], row["D"]))
    if "bounds" in row:
        options["cu_seqlens"] = jnp.array(row["bounds"], jnp.int32)
    if row["operation"] == "lightning_attention":
        options |= {"layer_idx": 1, "num_layers": 4}
    return arrays, options


def gates(row: dict[str, Any], shape: tuple[int, ...], key: jax.Array) -> Arrays:
    """The log gates of a row, under the name that its operation has for them."""
    kind, operation = row["gates"], row["operation"]
    if kind == "none" or operation == "lightning_attention":
        return {}
    channels = operation == "kernel_delta_attention" or kind.endswith("channels")
    draw, mask, rates = jax.random.split(key, 3)
    shape = shape if channels else shape[:3]
    raw = random(draw, kind.split()[0], shape)
    if row.get("layer"):
        rate, bias = random(rates, "normal", shape[2:3]), random(mask, "normal", shape[2:])
        gate = kda_decay(raw, rate, bias, lower_bound=-5.0 if row["safe"] else None)
    else:
        gate = jax.nn.log_sigmoid(raw) / row.get("gate", 1)
        gate = jnp.where(jax.random.uniform(mask, shape) >= row.get("mask", 0), gate, 0)
        gate = jnp.maximum(gate, -5) if row.get("safe") else gate
    return {"decay" if "delta" in operation else "g": gate}


def with_gradients(call: Any, arrays: Arrays, cotangents: tuple[jax.Array, jax.Array]) -> Arrays:
    """Output, state and the gradients of all arrays."""

    @jax.jit
    def run(arrays: Arrays) -> Arrays:
        (output, state), pull = jax.vjp(call, arrays)
        (grads,) = pull(tuple(g.astype(x.dtype) for g, x in zip(cotangents, (output, state), strict=True)))
        return {"output": output, "state": state, **grads}

    return run(arrays)


def error(expected: jax.Array, got: jax.Array) -> tuple[float, float]:
    """The root mean square of the error over that of the result, and the largest error."""
    want, have = (np.asarray(x, np.float64) for x in (expected, got))
    difference = have - want
    return float(np.sqrt((difference**2).mean()) / (np.sqrt((want**2).mean()) + 1e-8)), float(np.abs(difference).max())


SEGMENT = 256
"""Tokens whose states the reference's gradients hold at a time."""


def in_segments(call: Any, arrays: Arrays, packed: bool) -> Any:
    """Output and state of a call, segment by segment where rows are multiples of these: its gradients store the states
    of one segment, where those of 2048 tokens with K and V of 256 took 20 GiB.
    """
    count, left_over = divmod(arrays["query"].shape[1], SEGMENT)
    if packed or left_over or count < 2:
        return call(arrays)
    rest = {field: x for field, x in arrays.items() if field != "initial_state"}
    segments = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], count, SEGMENT, *x.shape[2:]), 1, 0), rest)

    @jax.checkpoint
    def step(state: jax.Array, segment: Arrays) -> tuple[jax.Array, jax.Array]:
        output, state = call({**segment, "initial_state": state})
        return state, output

    state, outputs = jax.lax.scan(step, arrays["initial_state"], segments)
    output = jnp.moveaxis(outputs, 0, 1)
    return output.reshape(output.shape[0], -1, *output.shape[3:]), state


@pytest.mark.parametrize("operation", ["gated_linear_attention", "gated_delta_rule"])
def test_a_reference_in_segments_is_the_reference(operation: str) -> None:
    row = next(row for row in rows() if row["operation"] == operation and "bounds" not in row)
    row = {**row, "B": 1, "T": 2 * SEGMENT, "H": 1, "D": 4, "dtype": "float32"}
    row.pop("HV", None)
    op, (arrays, options) = registry().ops[operation], inputs(row)
    keys = jax.random.split(jax.random.key(7))
    cotangents = tuple(
        jax.random.normal(k, x.shape) for k, x in zip(keys, (arrays["value"], arrays["initial_state"]), strict=True)
    )

    def whole(arrays: Arrays) -> Any:
        return op.reference(op.arguments(**arrays, **options))

    want = with_gradients(whole, arrays, cotangents)
    got = with_gradients(lambda arrays: in_segments(whole, arrays, packed=False), arrays, cotangents)
    for field, expected in want.items():
        np.testing.assert_allclose(got[field], expected, rtol=1e-4, atol=1e-4, err_msg=field)


def compare(row: dict[str, Any]) -> None:
    """Compares a row's call with the reference."""
    op, (arrays, options) = registry().ops[row["operation"]], inputs(row)
    wide = {field: x.astype(jnp.float32) for field, x in arrays.items()}
    keys = jax.random.split(jax.random.key(7))
    cotangents = tuple(
        jax.random.normal(k, x.shape) for k, x in zip(keys, (arrays["value"], arrays["initial_state"]), strict=True)
    )

    def reference(arrays: Arrays) -> Any:
        return in_segments(lambda arrays: op.reference(op.arguments(**arrays, **options)), arrays, "bounds" in row)

    def call(arrays: Arrays) -> Any:
        return op.function(**arrays, **options)

    if set(row["tolerance"]) <= {"output", "state"}:
        want, got = (
            dict(zip(("output", "state"), jax.jit(function)(values), strict=True))
            for function, values in ((reference, wide), (call, arrays))
        )
    else:
        want = with_gradients(reference, wide, cotangents)
        got = with_gradients(call, arrays, cotangents)
    for field, tolerance in row["tolerance"].items():
        ratio, largest = error(want[field], got[field])
        least = row.get("atol", {}).get(field, 1e-6)
        assert largest <= least or ratio < tolerance, f"{field}: error {ratio:.5f}, largest {largest:.2e}"


@pytest.mark.parametrize("row", [pytest.param(row, id=name(row)) for row in rows() if is_small(row)])
def test_a_small_shape_of_fla_is_within_its_tolerance(row: dict[str, Any]) -> None:
    compare(row)


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("row", [pytest.param(row, id=name(row)) for row in rows() if not is_small(row)])
def test_a_shape_of_fla_is_within_its_tolerance(row: dict[str, Any]) -> None:
    compare(row)
