"""The delta rule's Triton kernels on this device, stage by stage: what to run before their refusals are lifted.

    python benchmarks/delta_rule_checks_gpu.py             # every call below, with several launches of each stage
    python benchmarks/delta_rule_checks_gpu.py --channels  # those with gates of channels alone

Each stage runs 20 times on the same inputs, and the bits are compared: `runs that differ` must be 0 everywhere. Then
output, final state and all gradients are compared with the formula, token by token in float32: the largest relative
error of a field. With gates of channels, float32 and small heads an H200 with Triton 3.6 gave other numbers in each
run; the first stage whose runs differ is the kernel to look at, and the variants with fewer warps, without tf32 and
with one tile of key channels say where in it. The kernels are called directly, so no refusal is in the way. With
TRITON_INTERPRET=1 the same calls run on a CPU, `--tiny` for the small ones alone.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import _report
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops.device import current_device
from ejkernel.ops.pullback import Pullback
from ejkernel_triton.linear_recurrence import config, delta, delta_gradients, stages
from ejkernel_triton.linear_recurrence.forward import initial_states
from ejkernel_triton.linear_recurrence.spec import state_dtype

COLUMNS = ("call", "variant", "runs that differ", "largest error", "field")
RUNS = 20
FIELDS = ("query", "key", "value", "decay", "beta", "initial_state", "sequence_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call; `gates` is the width of its gates and `strength` the size of their logarithms."""

    tokens: int = 40
    heads: int = 2
    shared: int = 1
    keys: int = 16
    values: int = 16
    gates: int = 1
    strength: float = 1.0
    packed: bool = False
    dtype: Any = jnp.float32

    def record(self) -> LinearRecurrence:
        """Normal numbers, keys of length 1, states to begin with."""
        random = np.random.default_rng(0)

        def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
            return jnp.asarray(random.normal(size=shape), dtype)

        t, h = self.tokens, self.heads
        key = normal(1, t, self.shared, self.keys)
        fields: dict[str, Any] = {}
        if self.gates:
            fields["decay"] = -self.strength * jnp.abs(normal(1, t, h, self.gates))
        if self.packed:
            fields["cu_seqlens"] = jnp.array([0, 7, 7, t - 3], jnp.int32)
            fields["sequence_state"] = normal(3, h, self.keys, self.values)
        else:
            fields["initial_state"] = normal(1, h, self.keys, self.values)
        return LinearRecurrence(
            query=normal(1, t, h, self.keys, dtype=self.dtype),
            key=(key / jnp.linalg.norm(key, axis=-1, keepdims=True)).astype(self.dtype),
            value=normal(1, t, self.shared, self.values, dtype=self.dtype),
            softmax_scale=0.3,
            beta=jax.nn.sigmoid(normal(1, t, h)).astype(self.dtype),
            **fields,
        )

    def __str__(self) -> str:
        words = [jnp.dtype(self.dtype).name, f"T{self.tokens} K{self.keys} V{self.values}"]
        words += [f"gates {self.gates} x {self.strength}"] + ["packed"] * self.packed
        return " ".join(words)


SMALL = (
    Case(),
    Case(gates=0),
    Case(packed=True, keys=20, values=24),
    Case(gates=16),
    Case(gates=16, strength=9.0),
    Case(gates=20, keys=20, values=24, tokens=63),
    Case(gates=16, packed=True),
)
WIDE = {"tokens": 300, "keys": 128, "values": 128}
LARGE = (
    Case(**WIDE, strength=0.1, dtype=jnp.bfloat16),
    Case(**WIDE, strength=0.1, dtype=jnp.bfloat16, packed=True),
    Case(**WIDE, gates=0, dtype=jnp.bfloat16),
    Case(**WIDE, strength=0.1, dtype=jnp.float16),
    Case(**WIDE),
    Case(tokens=300, keys=256, values=96, strength=0.1, dtype=jnp.bfloat16),
    Case(**WIDE, gates=128, strength=0.05, dtype=jnp.bfloat16),
    Case(**WIDE, gates=128, strength=4.0, dtype=jnp.bfloat16),
    Case(**WIDE, gates=128, strength=0.05, dtype=jnp.float16),
    Case(**WIDE, gates=128, strength=4.0),
)


def variants(case: Case) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Name, what it changes of the configuration, and the precision of products if another."""
    yield "default", {}, None
    yield "gradient_block_k=32", {"gradient_block_k": 32}, None
    if case.gates > 1:
        for warps in (1, 2, 8):
            yield f"score_warps={warps}", {"score_warps": warps}, None
        yield "ieee", {}, "ieee"
        yield "score_block_k=16", {"score_block_k": 16}, None


def steps(record: LinearRecurrence, chosen: config.DeltaPasses, precision: str | None) -> dict[str, Callable[[], Any]]:
    """Each stage as a function of nothing, whose inputs are those that the stages before it made once."""
    call = stages.make_call(record, dataclasses.replace(chosen, splits=1), chosen.chunk)
    if precision is not None:
        call = dataclasses.replace(call, spec=dataclasses.replace(call.spec, PRECISION=precision))
    beta: Any = record.beta
    scores = jax.jit(lambda: stages.channel_scores(call))
    full = dataclasses.replace(call, scores=scores())
    inside = jax.jit(lambda: delta.corrections(full, beta, keep=True))
    made = inside()
    states = jax.jit(
        lambda: stages.pass_states(
            full,
            record.key,
            made.written,
            initial_states(record),
            dtype=state_dtype(record),
            correction=made.correction,
        )
    )
    before, final, value = states()
    written = dataclasses.replace(full, value=value)
    cotangent = jnp.ones((*record.query.shape[:2], full.spec.H, full.spec.V), record.query.dtype)
    local = jax.jit(lambda: delta_gradients.intra_chunk(full, cotangent))
    within = local()
    walk = jax.jit(
        lambda: delta_gradients.pass_state_gradients(
            full, made.correction, cotangent, within, final, state_dtype(record)
        )
    )
    walked = walk()
    solve = jax.jit(lambda: delta_gradients.inverse_gradients(full, beta, made.inverse, walked.dwritten))
    solved = solve()[1]
    pair = (before, walked.dstates)
    gates = None if record.decay is None else jnp.float32
    return {
        "scores": scores,
        "corrections": inside,
        "states": states,
        "outputs": jax.jit(lambda: stages.make_outputs(written, before)),
        "local": local,
        "walk": walk,
        "solve": solve,
        "keys": jax.jit(lambda: delta_gradients.key_gradients(written, beta, cotangent, solved, pair, gates=gates)),
    }


def differing(run: Callable[[], Any], runs: int) -> int:
    """How many runs have other bits than the first."""

    def bits() -> list[bytes]:
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(run())]

    first = bits()
    return sum(bits() != first for _ in range(runs))


def errors(record: LinearRecurrence, chosen: config.DeltaPasses) -> dict[str, float]:
    """Relative errors of output, final state and gradients against the formula in float32."""
    names = [name for name in FIELDS if getattr(record, name) is not None]
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, record)
    want, pull = jax.vjp(
        lambda fields: reference(dataclasses.replace(exact, **fields))[0], {n: getattr(exact, n) for n in names}
    )
    random = np.random.default_rng(1)
    cotangent = tuple(jnp.asarray(random.normal(size=x.shape), x.dtype) for x in want)

    @jax.jit
    def run(record: LinearRecurrence, cotangent: Any) -> Any:
        output, residuals, pocket = delta.forward_with_pocket(record, chosen)
        start = Pullback(
            record=record,
            residuals=residuals,
            output=output,
            cotangent=(cotangent[0].astype(output[0].dtype), cotangent[1]),
            wanted=frozenset(names),
            pocket=pocket,
        )
        return output, delta.backward(start, chosen)

    output, gradients = run(record, cotangent)
    pairs = {"output": (output[0], want[0]), "final state": (output[1], want[1])}
    found = pull(cotangent)[0]
    pairs |= {name: (gradients[name], found[name]) for name in names}
    return {name: _relative(*pair) for name, pair in pairs.items()}


def _relative(got: jax.Array, want: jax.Array) -> float:
    return float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))


def lines(case: Case, runs: int) -> Iterator[tuple[str, ...]]:
    """A line for each variant of a call."""
    record = case.record()
    default = config.delta_pair_heuristic(record, current_device(), "both")
    for name, changes, precision in variants(case):
        chosen = dataclasses.replace(default, **changes)
        counts = {stage: differing(run, runs) for stage, run in steps(record, chosen, precision).items()}
        found = errors(record, chosen) if precision is None else {}
        field, most = max(found.items(), key=lambda item: item[1]) if found else ("", float("nan"))
        unequal = ", ".join(f"{stage} {n}" for stage, n in counts.items() if n) or "0"
        yield str(case), name, unequal, f"{most:.1e}", field


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", action="store_true", help="gates of channels alone")
    parser.add_argument("--tiny", action="store_true", help="the small calls alone, two runs of each stage")
    options = parser.parse_args()
    print(_report.heading())
    print(_report.markdown_table(COLUMNS, ()), flush=True)
    for case in SMALL if options.tiny else (*SMALL, *LARGE):
        if options.channels and case.gates < 2:
            continue
        for line in lines(case, 2 if options.tiny else RUNS):
            print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
