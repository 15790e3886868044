"""The delta rule's Triton kernels on this device, stage by stage: what to run before their refusals are lifted.

    python benchmarks/delta_rule_checks_gpu.py             # every call below, with several launches of each stage
    python benchmarks/delta_rule_checks_gpu.py --channels  # those with gates of channels alone
    python benchmarks/delta_rule_checks_gpu.py --fused     # batched inverses and fused corrections, no default yet
    python benchmarks/delta_rule_checks_gpu.py --variants  # each with other tiles and precisions: minutes

Each stage runs 20 times on the same inputs, and the bits are compared: `runs that differ` must be 0 everywhere but in
packed calls, of whose tokens and chunks that belong to no sequence stages write nothing. Then
output, final state and all gradients are compared with the formula, token by token in float64: the largest relative
error of a field. `wrong code` are the stages whose machine code, as this Triton makes it for this chip, has what
`ahead.mixed_lanes` looks for: none, but in the variant `16 tokens a chunk`, which calls never get and which Triton 3.6
compiles wrongly. With that Triton its corrections must differ between runs, and in no other variant anything may. If
something does, the first stage whose runs differ is the kernel to look at, and `--variants` with fewer warps, without
tf32 and with one tile of key channels say where in it. With TRITON_INTERPRET=1 the same calls run on a CPU, `--tiny`
for the small ones alone.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import _report
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops.device import current_device
from ejkernel.ops.pullback import Pullback
from ejkernel_triton import ahead
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import collected, interpreting
from ejkernel_triton.linear_recurrence import config, delta, delta_gradients, stages
from ejkernel_triton.linear_recurrence.forward import initial_states
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall, RecurrenceSpec, state_dtype

COLUMNS = ("call", "variant", "wrong code", "runs that differ", "largest error", "field")
RUNS = 20
SUSPECT = "16 tokens a chunk"
"""Of the stages alone: what `delta.tokens_of_chunk` keeps from calls with gates of channels."""
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


SUSPECTED = Case(gates=16)
SMALL = (
    Case(),
    Case(gates=0),
    Case(packed=True, keys=20, values=24),
    SUSPECTED,
    Case(gates=8, keys=8, values=12, tokens=11, packed=True),
    Case(gates=16, strength=9.0),
    Case(gates=20, keys=20, values=24, tokens=63),
)
WIDE: dict[str, Any] = {"tokens": 300, "keys": 128, "values": 128}
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


def variants(case: Case, every: bool) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Name, what it changes of the configuration, and the precision of products if another.

    Each compiles all stages, which is what the time goes to: without `every`, the default, and of one call the suspect.
    """
    yield "default", {}, None
    if case == SUSPECTED or (every and case.gates > 1):
        yield SUSPECT, {}, None
    if not every:
        return
    yield "gradient_block_k=32", {"gradient_block_k": 32}, None
    if case.gates > 1:
        for warps in (1, 2, 8):
            yield f"score_warps={warps}", {"score_warps": warps}, None
        yield "ieee", {}, "ieee"
        yield "correction_block_k=16", {"correction_block_k": 16}, None


def steps(
    record: LinearRecurrence, chosen: config.DeltaPasses, precision: str | None, chunk: int
) -> dict[str, Callable[[], Any]]:
    """Each stage as a function of nothing, whose inputs are those that the stages before it made once."""
    full = stages.make_call(record, dataclasses.replace(chosen, splits=1), chunk)
    if precision is not None:
        full = dataclasses.replace(full, spec=dataclasses.replace(full.spec, PRECISION=precision))
    beta: Any = record.beta
    inside = jax.jit(lambda: _inside(record, full))
    made, arrays = inside()
    # From fused corrections, the call for state passing and outputs has queries and keys with their decay.
    decayed = dataclasses.replace(full, **arrays, spec=_decayed_spec(record, full))
    full = dataclasses.replace(full, scores=decayed.scores)
    states = jax.jit(
        lambda: stages.pass_states(
            decayed,
            decayed.key,
            made.written,
            initial_states(record),
            dtype=state_dtype(record),
            correction=made.correction,
        )
    )
    before, final, value = states()
    written = dataclasses.replace(full, value=value)
    answered = dataclasses.replace(decayed, value=value)
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
        "corrections": inside,
        "states": states,
        "outputs": jax.jit(lambda: stages.make_outputs(answered, before)),
        "local": local,
        "walk": walk,
        "solve": solve,
        "keys": jax.jit(lambda: delta_gradients.key_gradients(written, beta, cotangent, solved, pair, gates=gates)),
    }


def _fused(record: LinearRecurrence, call: RecurrenceCall) -> bool:
    return delta_gradients.delta_config(call).fused and record.decay is not None and record.decay.shape[3] > 1


def _inside(record: LinearRecurrence, call: RecurrenceCall) -> tuple[Any, dict[str, Any]]:
    """Corrections, and the arrays of the call for state passing and outputs."""
    decay: Any = record.decay
    beta: Any = record.beta
    if _fused(record, call):
        inside, decayed = delta.fused_corrections(call, decay, beta, keep=True)
    else:
        decayed = dataclasses.replace(call, scores=stages.channel_scores(call))
        inside = delta.corrections(decayed, beta, keep=True)
    return inside, {name: getattr(decayed, name) for name in ("query", "key", "gates", "scores")}


def _decayed_spec(record: LinearRecurrence, call: RecurrenceCall) -> RecurrenceSpec:
    """Constants of that call."""
    if not _fused(record, call):
        return call.spec
    return dataclasses.replace(call.spec, DECAYED=True, HQ=call.spec.H, HK=call.spec.H)


def differing(run: Callable[[], Any], runs: int) -> int:
    """How many runs have other bits than the first."""

    def bits() -> list[bytes]:
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(run())]

    first = bits()
    return sum(bits() != first for _ in range(runs))


def wrong_code(run: Any) -> int:
    """Instructions of a jitted stage that `ahead.mixed_lanes` finds, compiled for the device in use."""
    if interpreting() or current_device().vendor != "nvidia":
        return 0
    with collected() as calls:
        jax.eval_shape(run.__wrapped__)  # what was jitted may be traced already, and collects nothing
    target = chip_of(current_device()).target
    return sum(len(ahead.mixed_lanes(ahead.compile_for(call, target).assembly)) for call in calls)


def formula(
    record: LinearRecurrence, names: list[str], cotangent: tuple[np.ndarray, ...]
) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """Output and final state, and the gradients of the named fields, in float64."""
    with jax.enable_x64(True):
        exact = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x), jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None), record
        )
        want, pull = jax.vjp(
            lambda fields: reference(dataclasses.replace(exact, **fields))[0], {n: getattr(exact, n) for n in names}
        )
        given = tuple(jnp.asarray(c, x.dtype) for c, x in zip(cotangent, want, strict=True))
        return tuple(map(np.asarray, want)), jax.tree.map(np.asarray, pull(given)[0])


def errors(record: LinearRecurrence, chosen: config.DeltaPasses) -> dict[str, float]:
    """Relative errors of output, final state and gradients against the formula in float64."""
    names = [name for name in FIELDS if getattr(record, name) is not None]
    shapes = jax.eval_shape(lambda record: delta.forward(record, chosen)[0], record)
    random = np.random.default_rng(1)
    cotangent = tuple(jnp.asarray(random.normal(size=x.shape), jnp.float32) for x in shapes)
    want, found = formula(record, names, tuple(map(np.asarray, cotangent)))

    @jax.jit
    def run(record: LinearRecurrence, cotangent: Any) -> Any:
        output, residuals, pocket = delta.forward(record, chosen)
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
    pairs |= {name: (gradients[name], found[name]) for name in names}
    return {name: _relative(*pair) for name, pair in pairs.items()}


def _relative(got: jax.Array, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def lines(case: Case, runs: int, every: bool, fused: bool) -> Iterator[tuple[str, ...]]:
    """A line for each variant of a call, of all variants or the default."""
    record = case.record()
    default = (config.fused_delta if fused else functools.partial(config.delta_heuristic, direction="both"))(
        record, current_device()
    )
    for name, changes, precision in variants(case, every):
        chosen = dataclasses.replace(default, **changes)
        chunk = config.MIN_TILE if name == SUSPECT else delta.tokens_of_chunk(record, chosen.chunk)
        made = steps(record, chosen, precision, chunk)
        wrong = {stage: wrong_code(run) for stage, run in made.items()}
        counts = {stage: differing(run, runs) for stage, run in made.items()}
        found = errors(record, chosen) if precision is None and name != SUSPECT else {}
        field, most = max(found.items(), key=lambda item: item[1]) if found else ("", float("nan"))
        yield str(case), name, _listed(wrong), _listed(counts), f"{most:.1e}", field


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{stage} {n}" for stage, n in counts.items() if n) or "0"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--channels", action="store_true", help="gates of channels alone")
    parser.add_argument("--variants", action="store_true", help="other tiles and precisions too")
    parser.add_argument("--fused", action="store_true", help="`config.fused_delta` in place of the default")
    parser.add_argument("--tiny", action="store_true", help="the small calls alone, two runs of each stage")
    options = parser.parse_args()
    print(_report.heading())
    print(_report.markdown_table(COLUMNS, ()), flush=True)
    for case in SMALL if options.tiny else (*SMALL, *LARGE):
        if options.channels and case.gates < 2:
            continue
        for line in lines(case, 2 if options.tiny else RUNS, options.variants, options.fused):
            print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
