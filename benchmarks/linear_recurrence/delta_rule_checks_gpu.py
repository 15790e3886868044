"""The delta rule's Triton kernels on this device, stage by stage: what to run before a new kernel is a default.

    # every call below, with several launches of each stage
    python benchmarks/linear_recurrence/delta_rule_checks_gpu.py
    python benchmarks/linear_recurrence/delta_rule_checks_gpu.py --channels  # those with gates of channels alone
    python benchmarks/linear_recurrence/delta_rule_checks_gpu.py --variants  # each with other tiles and warps: minutes

Each stage runs 20 times on the same inputs, and the bits are compared: `runs that differ` must be 0 everywhere but in
packed calls, of whose tokens and chunks that belong to no sequence stages write nothing. Then
output, final state and all gradients are compared with the formula, token by token in float64: the largest relative
error of a field. `wrong code` are the stages whose machine code, as this Triton makes it for this chip, has what
`ahead.miscompiled_shifts` looks for: none. If anything differs, the first stage whose runs do is the kernel to look at,
and `--variants` with fewer warps and with one tile of key channels say where in it. With TRITON_INTERPRET=1 the same
calls run on a CPU, `--tiny` for the small ones alone.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton import ahead
from ejkernel_triton.launch import collect_launches, is_interpreting
from ejkernel_triton.linear_recurrence import plan
from ejkernel_triton.linear_recurrence.chunked import forward as chunked_forward
from ejkernel_triton.linear_recurrence.delta import backward as delta_backward
from ejkernel_triton.linear_recurrence.delta import config as delta_config
from ejkernel_triton.linear_recurrence.delta import forward as delta_forward
from ejkernel_triton.linear_recurrence.spec import state_dtype

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("call", "variant", "wrong code", "runs that differ", "largest error", "field")
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


def variants(case: Case, chosen: delta_config.DeltaRuleConfig, every: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, and what it changes of the configuration; without `every`, nothing.

    Each compiles all stages, which is what the time goes to.
    """
    yield "default", {}
    if not every:
        return
    yield f"fused={not chosen.fused}, segments=3", {"fused": not chosen.fused, "segments": 3}
    yield "gradient_block_k=32", {"gradient_block_k": 32}
    if case.gates > 1:
        yield "wy_block_k=16", {"wy_block_k": 16}


def steps(record: LinearRecurrence, chosen: delta_config.DeltaRuleConfig) -> dict[str, Callable[[], Any]]:
    """Each stage as a function of nothing, whose inputs are those that the stages before it made once."""
    beta: Any = record.beta
    raw = plan.make_call(record, chosen, chosen.chunk)

    def corrected() -> Any:
        made, call = delta_forward.wy_form(record, chosen, chosen.chunk, store_inverse=True)
        return made, delta_forward.arrays_from_wy_kernels(call)

    inside = jax.jit(corrected)
    made, arrays = inside()
    call = delta_forward.replace_arrays(raw, arrays)
    segments = jax.jit(lambda: delta_forward.compute_segment_states(record, call, made, keep_transitions=True))
    starts = segments()
    states = jax.jit(lambda: delta_forward.chunk_states(record, call, made, starts))
    before, final, value = states()
    fused = dataclasses.replace(call, value=made.u)
    cotangent = jnp.ones((*record.query.shape[:2], raw.spec.H, raw.spec.V), record.query.dtype)
    local = jax.jit(lambda: delta_backward.chunk_bwd_dv_local(call, cotangent))
    within = local()
    dtype = state_dtype(record)
    reverse = jax.jit(lambda: delta_backward.pass_state_gradients(call, made.w, cotangent, within, final, dtype))
    walk = functools.partial(chunked_forward.fused_chunk_scan, fused, starts.starts, w=made.w)
    gone = reverse()
    solve = jax.jit(lambda: delta_backward.gradients_through_inverse(call, beta, made.inverse, gone.dv_new))
    solved = solve()[1]
    written, pair = dataclasses.replace(raw, value=value), (before, gone.dstates)
    gates = None if record.decay is None else jnp.float32
    return {
        "corrections": inside,
        "segments": segments,
        "states": states,
        "outputs": jax.jit(lambda: chunked_forward.chunk_outputs(dataclasses.replace(call, value=value), before)),
        "fused": jax.jit(lambda: walk()),
        "local": local,
        "reverse": reverse,
        "solve": solve,
        "keys": jax.jit(
            lambda: delta_backward.key_gradients(written, beta, cotangent, solved, pair, dgates_dtype=gates)
        ),
    }


def differing(run: Callable[[], Any], runs: int) -> int:
    """How many runs have other bits than the first."""

    def bits() -> list[bytes]:
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(run())]

    first = bits()
    return sum(bits() != first for _ in range(runs))


def wrong_code(run: Any) -> int:
    """Instructions of a jitted stage that `ahead.miscompiled_shifts` finds, compiled for the device in use."""
    if is_interpreting() or current_device().vendor != "nvidia":
        return 0
    with collect_launches() as calls:
        jax.eval_shape(run.__wrapped__)  # what was jitted may be traced already, and collects nothing
    target = gpu_of(current_device()).target
    return sum(len(ahead.miscompiled_shifts(ahead.compile_for_chip(call, target).assembly)) for call in calls)


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


def errors(record: LinearRecurrence, chosen: delta_config.DeltaRuleConfig) -> dict[str, float]:
    """Relative errors of output, final state and gradients against the formula in float64."""
    names = [name for name in FIELDS if getattr(record, name) is not None]
    shapes = jax.eval_shape(lambda record: delta_forward.forward(record, chosen)[0], record)
    random = np.random.default_rng(1)
    cotangent = tuple(jnp.asarray(random.normal(size=x.shape), jnp.float32) for x in shapes)
    want, found = formula(record, names, tuple(map(np.asarray, cotangent)))

    @jax.jit
    def run(record: LinearRecurrence, cotangent: Any) -> Any:
        output, residuals, private = delta_forward.forward(record, chosen)
        start = Pullback(
            record=record,
            residuals=residuals,
            output=output,
            cotangent=(cotangent[0].astype(output[0].dtype), cotangent[1]),
            grad_fields=frozenset(names),
            private_residuals=private,
        )
        return output, delta_backward.backward(start, chosen)

    output, gradients = run(record, cotangent)
    pairs = {"output": (output[0], want[0]), "final state": (output[1], want[1])}
    pairs |= {name: (gradients[name], found[name]) for name in names}
    return {name: _relative(*pair) for name, pair in pairs.items()}


def _relative(got: jax.Array, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def lines(case: Case, runs: int, every: bool) -> Iterator[tuple[str, ...]]:
    """A line for each variant of a call, of all variants or the default."""
    record = case.record()
    default = delta_config.heuristic(record, current_device(), "both")
    for name, changes in variants(case, default, every):
        chosen = dataclasses.replace(default, **changes)
        made = steps(record, chosen)
        wrong = {stage: wrong_code(run) for stage, run in made.items()}
        counts = {stage: differing(run, runs) for stage, run in made.items()}
        found = errors(record, chosen)
        field, most = max(found.items(), key=lambda item: item[1])
        yield str(case), name, _listed(wrong), _listed(counts), f"{most:.1e}", field


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{stage} {n}" for stage, n in counts.items() if n) or "0"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--channels", action="store_true", help="gates of channels alone")
    parser.add_argument("--variants", action="store_true", help="other tiles and precisions too")
    parser.add_argument("--tiny", action="store_true", help="the small calls alone, two runs of each stage")
    parser.add_argument("--part", default="0/1", help="n/m: every m-th call from the nth on, for m processes")
    options = parser.parse_args()
    print(shared.report.heading())
    print(shared.report.markdown_table(COLUMNS, ()), flush=True)
    first, step = map(int, options.part.split("/"))
    cases = [c for c in (SMALL if options.tiny else (*SMALL, *LARGE)) if c.gates > 1 or not options.channels]
    for case in cases[first::step]:
        for line in lines(case, 2 if options.tiny else RUNS, options.variants):
            print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
