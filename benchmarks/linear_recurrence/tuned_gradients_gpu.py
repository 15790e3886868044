"""Every tile that ships for linear recurrences on this GPU, both passes against the formula in float64.

    python benchmarks/linear_recurrence/tuned_gradients_gpu.py  # the tables in this source tree
    # tables that `ejkernel tune --export DIR` wrote
    python benchmarks/linear_recurrence/tuned_gradients_gpu.py --tuned DIR
    python benchmarks/linear_recurrence/tuned_gradients_gpu.py --rules  # also what the rules choose for the same calls
    python benchmarks/linear_recurrence/tuned_gradients_gpu.py --part 0/4  # every fourth line, for four processes

An entry of a table holds for a kind of calls. Each is checked with 300 tokens, which fill no chunk, in bfloat16 and
float16, with weak gates and strong ones, states to begin with: output, final state and all gradients. The line has the
largest relative error of a field; `spilled` and `wrong code` are of its kernels, as this Triton makes them for this
chip, in bytes a thread and in instructions that `ahead.miscompiled_shifts` finds.
"""

import argparse
import importlib.resources
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.config.table import decode, entry_config_part, table_name
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback
from ejkernel_triton import ahead
from ejkernel_triton.launch import collect_launches, is_interpreting

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from linear_recurrence.delta_rule_checks_gpu import formula

COLUMNS = ("table", "kind", "call", "spilled", "wrong code", "largest error", "field")
TOKENS, HEADS = 300, 4
FIELDS = ("query", "key", "value", "decay", "beta", "initial_state")


def entries(folder: Path, rules: bool) -> Iterator[tuple[str, str, Any, Any]]:
    """Operation, kind, implementation and configuration of every entry of this device's tables."""
    found = registry()
    for path in sorted((folder / table_name(current_device().kind, "x")).parent.glob("*.json")):
        if path.stem not in found.ops or found.ops[path.stem].family.name != "linear_recurrence":
            continue
        for key, entry in decode(path.read_bytes()).items():
            name, kind = (key.split(" | ")[n] for n in (1, 5))
            (made,) = (i for i in found.implementations[path.stem] if i.name == name)
            part = entry_config_part(entry, made.config.forward, key)
            if part is None:
                raise SystemExit(f"{path}: {key} has another configuration's fields")
            yield path.stem, kind, made, part
            if rules:
                yield f"{path.stem}, the rule", kind, made, None


def record_of(kind: str, implementation: Any, dtype: Any, strength: float) -> LinearRecurrence:
    """A small call of a kind; keys have length 1, as delta rules want."""
    words, random = kind.split(), np.random.default_rng(0)
    keys, values = map(int, words[2].split("x"))
    gates = {"no": 0, "head": 1, "channel": keys}[words[3]]
    shared = 1 if "shared keys" in kind else HEADS

    def normal(*shape: int, of: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), of)

    key, fields = normal(2, TOKENS, shared, keys), {}
    if gates:
        fields["decay"] = -strength * jnp.abs(normal(2, TOKENS, HEADS, gates))
    if implementation.name == "triton_delta":
        fields["beta"] = jax.nn.sigmoid(normal(2, TOKENS, HEADS)).astype(dtype)
    return LinearRecurrence(
        query=normal(2, TOKENS, shared, keys, of=dtype),
        key=(key / jnp.linalg.norm(key, axis=-1, keepdims=True)).astype(dtype),
        value=normal(2, TOKENS, HEADS, values, of=dtype),
        softmax_scale=0.3,
        initial_state=normal(2, HEADS, keys, values),
        **fields,
    )


def both_passes(implementation: Any, config: Any, record: LinearRecurrence, names: list[str], cotangent: Any) -> Any:
    """Output and final state, and the gradients of the named fields."""
    output, residuals, private = implementation.function("forward")(record, config)
    start = Pullback(
        record=record,
        residuals=residuals,
        output=output,
        cotangent=tuple(c.astype(x.dtype) for c, x in zip(cotangent, output, strict=True)),
        grad_fields=frozenset(names),
        private_residuals=private,
    )
    return output, implementation.function("backward")(start, config)


def errors(implementation: Any, config: Any, record: LinearRecurrence) -> dict[str, float]:
    """Relative errors of output, final state and gradients against the formula in float64."""
    names = [name for name in FIELDS if getattr(record, name) is not None]
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda record: implementation.function("forward")(record, config)[0], record)
    cotangent = tuple(jnp.asarray(random.normal(size=x.shape), jnp.bfloat16).astype(jnp.float32) for x in shapes)
    want, found = formula(record, names, tuple(map(np.asarray, cotangent)))
    output, gradients = jax.jit(lambda r, c: both_passes(implementation, config, r, names, c))(record, cotangent)
    pairs = {"output": (output[0], want[0]), "final state": (output[1], want[1])}
    pairs |= {name: (gradients[name], found[name]) for name in names}
    off = {name: np.asarray(got, np.float64) - exact for name, (got, exact) in pairs.items()}
    return {name: float(np.linalg.norm(x) / np.linalg.norm(pairs[name][1])) for name, x in off.items()}


def code(implementation: Any, config: Any, record: LinearRecurrence) -> tuple[int, int]:
    """Bytes that a thread spills at most, and instructions that `ahead.miscompiled_shifts` finds, of all kernels."""
    if is_interpreting() or current_device().vendor != "nvidia":
        return 0, 0
    names = [name for name in FIELDS if getattr(record, name) is not None]
    states = jax.ShapeDtypeStruct(record.initial_state.shape, jnp.float32)  # pyright: ignore[reportOptionalMemberAccess]
    shapes = (jax.ShapeDtypeStruct(record.value.shape, record.query.dtype), states)
    with collect_launches() as calls:
        jax.eval_shape(lambda r, c: both_passes(implementation, config, r, names, c), record, shapes)
    made = [ahead.compile_for_chip(call, gpu_of(current_device()).target) for call in calls]
    return max(x.spilled_bytes for x in made), sum(len(ahead.miscompiled_shifts(x.assembly)) for x in made)


def lines(options: argparse.Namespace) -> Iterator[list[str]]:
    """A line for each call of each entry."""
    calls = [
        (entry, dtype, strength)
        for entry in entries(options.tuned, options.rules)
        for dtype in (jnp.bfloat16, jnp.float16)
        for strength in ((0.0,) if "no gates" in entry[1] else (0.05, 4.0))
    ]
    first, every = map(int, options.part.split("/"))
    for (table, kind, implementation, part), dtype, strength in calls[first::every]:
        record = record_of(kind, implementation, dtype, strength)
        config = part or implementation.config.heuristic(record, current_device(), "both")
        field, most = max(errors(implementation, config, record).items(), key=lambda item: item[1])
        spilled, wrong = code(implementation, config, record)
        call = f"{jnp.dtype(dtype).name}, gates x {strength}"
        yield [table, kind, call, str(spilled), str(wrong), f"{most:.1e}", field]


def main() -> None:
    """Prints the table."""
    shipped = Path(str(importlib.resources.files("ejkernel_triton").joinpath("tuned")))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tuned", type=Path, default=shipped, help="folder of tables")
    parser.add_argument("--rules", action="store_true", help="the rules' configurations, too")
    parser.add_argument("--part", default="0/1", help="n/m: every m-th line from the nth on")
    options = parser.parse_args()
    if shared.report.has_gpu():
        shared.report.print_rows_as_measured(COLUMNS, lines(options))


if __name__ == "__main__":
    main()
