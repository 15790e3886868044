"""The stages of a linear recurrence one by one, each with many tiles: how the configurations that ship were found."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.device import current_device
from ejkernel_triton.linear_recurrence import plan
from ejkernel_triton.linear_recurrence.chunked import backward as chunked_backward
from ejkernel_triton.linear_recurrence.chunked import config as chunked_config
from ejkernel_triton.linear_recurrence.chunked import forward as chunked_forward
from ejkernel_triton.linear_recurrence.delta import config as delta_config
from ejkernel_triton.linear_recurrence.delta import forward as delta_forward
from ejkernel_triton.linear_recurrence.segments import forward as segments_forward
from ejkernel_triton.linear_recurrence.spec import state_dtype

FIELDS = ("block_k", "block_v", "warps", "stages")
TILES = {
    "state": ((32, 64, 3), (64, 64, 3), (64, 64, 4), (64, 128, 3), (128, 64, 2)),
    "fused": ((64, 3), (64, 2), (32, 3), (32, 2), (16, 3)),
    "score": ((32,), (64,), (16,)),
    "output": ((64, 64, 4, 2), (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 8, 2), (32, 128, 4, 3), (128, 128, 8, 1)),
    "gradient": ((64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2), (32, 64, 4, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
}


def measure(cell: Any, record: Any, sample: Callable[..., float], part: tuple[int, int] = (0, 1)) -> None:
    """Prints milliseconds of every stage of a cell, and every tile.

    Args:
        cell: What is measured.
        record: Its arrays.
        sample: Seconds of a call, from the call.
        part: (n, all): compiles and measures only every `all`-th, from the nth on.
    """
    for length in (64,) if cell.kind in ("gla", "kda", "gated delta") else (64, 128):
        base = chunked_config.make_chunked_config(record, current_device(), length)
        found = _delta_stages(record) if record.beta is not None else _stages(cell, record, base)
        for number, (name, function, *arrays) in enumerate(found):
            if number % part[1] != part[0]:
                continue
            try:
                compiled = jax.jit(function).lower(*arrays).compile()
                ms = f"{1e3 * min(sample(lambda c=compiled, a=arrays: c(*a)) for _ in range(2)):.3f}"
            except Exception as error:  # noqa: BLE001  a tile that does not fit
                ms = f"{type(error).__name__}"
            print(f"| {cell} | {length} | {name} | {ms} |", flush=True)


def _stages(cell: Any, record: Any, base: Any) -> Iterator[tuple[Any, ...]]:
    dtype, gates = state_dtype(record), jnp.float32 if "decay" in cell.grad_fields else None
    call = jax.jit(lambda r: _arrays(plan.make_call(r, base, base.chunk)))(record)
    yield "gates", lambda r: plan.make_call(r, base, base.chunk).gates, record

    def full(r: Any, arrays: Any, chosen: Any) -> Any:
        made = plan.make_call(r, chosen, chosen.chunk, arrays["gates"])
        return dataclasses.replace(made, scores=arrays["scores"])

    call["scores"] = None
    if record.decay is not None and record.decay.shape[3] > 1:
        for tile in TILES["score"]:
            chosen = _with(base, "score", zip(("block_k",), tile, strict=True))
            yield (
                f"scores {tile}",
                lambda r, a, c=chosen: chunked_forward.intra_chunk_scores(full(r, a, c)),
                record,
                call,
            )
        call["scores"] = jax.jit(lambda r, a: chunked_forward.intra_chunk_scores(full(r, a, base)))(record, call)
    for reverse, tile in itertools.product((False, True), TILES["state"]):
        chosen = _with(base, "state", zip(("block_k", "block_v", "stages"), tile, strict=True))

        def states(r: Any, a: Any, c: Any = chosen, back: bool = reverse) -> Any:
            left, right = (r.query, r.value) if back else (r.key, r.value)
            return segments_forward.pass_states(full(r, a, c), left, right, None, dtype=dtype, reverse=back)[:2]

        yield f"states {'reverse ' if reverse else ''}{tile}", states, record, call
    made = jax.jit(lambda r, a: segments_forward.pass_states(full(r, a, base), r.key, r.value, None, dtype=dtype)[0])(
        record, call
    )
    cotangent = jnp.ones((*record.value.shape[:2], cell.heads, cell.values), record.value.dtype)
    for tile in TILES["output"]:
        chosen = _with(base, "output", zip(FIELDS, tile, strict=True))
        yield (
            f"outputs {tile}",
            lambda r, a, s, c=chosen: chunked_forward.chunk_outputs(full(r, a, c), s),
            record,
            call,
            made,
        )
        yield (
            f"value gradients {tile}",
            lambda r, a, o, s, c=chosen: chunked_backward.value_gradients(full(r, a, c), o, s),
            record,
            call,
            cotangent,
            made,
        )
    for tile in TILES["gradient"]:
        chosen = _with(base, "gradient", zip(FIELDS, tile, strict=True))

        def keys(r: Any, a: Any, o: Any, s: Any, c: Any = chosen) -> Any:
            return chunked_backward.key_gradients(full(r, a, c), o, s, s, dgates_dtype=gates)

        yield f"key gradients {tile}", keys, record, call, cotangent, made


def _delta_stages(record: Any) -> Iterator[tuple[Any, ...]]:
    """The stages of the delta rule's forward pass; outputs also as one walk, which makes states too."""
    chosen = delta_config.heuristic(record, current_device(), "both")

    def call(r: Any, arrays: Any) -> Any:
        return delta_forward.replace_arrays(plan.make_call(r, chosen, chosen.chunk, compute_gate_cumsum=False), arrays)

    def inside(r: Any) -> Any:
        made, full = delta_forward.wy_form(r, chosen, chosen.chunk, store_inverse=True)
        return made, delta_forward.arrays_from_wy_kernels(full)

    def states(r: Any, made: Any, a: Any) -> Any:
        return delta_forward.chunk_states(r, call(r, a), made, delta_forward.SegmentStates(None, None))

    def outputs(r: Any, a: Any, value: Any, before: Any) -> Any:
        return chunked_forward.chunk_outputs(dataclasses.replace(call(r, a), value=value), before)

    def walk(r: Any, made: Any, a: Any, tile: Any = None) -> Any:
        full = dataclasses.replace(call(r, a), value=made.u)
        if tile is not None:
            full = dataclasses.replace(
                full, config=_with(chosen, "fused", zip(("block_v", "stages"), tile, strict=True))
            )
        return chunked_forward.fused_chunk_scan(full, None, w=made.w)

    yield "gates and corrections", inside, record
    made, arrays = jax.jit(inside)(record)
    yield "states", states, record, made, arrays
    before, _, value = jax.jit(states)(record, made, arrays)
    yield "outputs", outputs, record, arrays, value, before
    for tile in TILES["fused"]:
        yield f"walk {tile}", functools.partial(walk, tile=tile), record, made, arrays


def _arrays(call: Any) -> dict[str, Any]:
    return {"gates": call.gates}


def _with(base: Any, part: str, tile: Iterable[tuple[str, int]]) -> Any:
    return dataclasses.replace(base, **{f"{part}_{name}": value for name, value in tile})
