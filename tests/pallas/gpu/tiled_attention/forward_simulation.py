"""Runs the code of the forward kernel for packed rows in a `batch_invariant` block in the model of `warpgroups.py`.

    scheduler    warpgroup 0 ── waits │ producer ── waits │ a copy is done │ warpgroup 1 ── waits │ ...

Producer, consumers, tile scheduler and operands are the kernel's; only the instructions are replaced. A copy reads and
writes when it is done, and a product reads its operands when it is awaited: the latest times that the hardware may
choose. So a stage that is freed too early, or read before its data have arrived, changes values. Rounding, layouts,
swizzles and fences between threads and copies are not simulated.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from tests.pallas.gpu.tiled_attention.warpgroups import Mbarriers, Ref, Simulation, Window

from ejkernel_pallas.gpu.hopper import arrays, tile_scheduler, wgmma
from ejkernel_pallas.gpu.tiled_attention import forward
from ejkernel_pallas.gpu.tiled_attention.kernels import (
    flash_forward,
    forward_call,
    forward_outputs,
    forward_producer,
    online_softmax,
    tile_masks,
)
from ejkernel_pallas.gpu.tiled_attention.plan import documents

THREAD_BLOCKS = 2
# Compiled once: op by op, planning takes longer than the simulation.
COMPILED = {
    "document_operands": jax.jit(documents.document_operands, static_argnums=(0, 2, 3)),
    "are_sorted": jax.jit(documents.are_sorted, static_argnums=(1, 2)),
}


class Instructions:
    """What replaces the modules `plgpu`, `pl` and `lax` in the kernel."""

    ds = Window
    div = staticmethod(lambda x, y: int(x) // int(y))
    rem = staticmethod(lambda x, y: int(x) % int(y))
    optimization_barrier = staticmethod(lambda x: x)
    set_max_registers = staticmethod(lambda *_, **__: None)
    commit_smem = staticmethod(lambda: None)

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.passes: dict[Any, int] = {}  # of ping-pong scheduling, by the warpgroup that waits for it
        self.num_tiles_taken = 0

    def axis_index(self, name: str) -> int:
        return self.simulation.local.name[name == "warpgroup"]

    def fori_loop(self, first: Any, end: Any, body: Any, state: Any) -> Any:
        for n in range(int(first), int(end)):
            state = body(n, state)
        return state

    def while_loop(self, condition: Any, body: Any, state: Any) -> Any:
        while condition(state):
            state = body(state)
        return state

    def when(self, condition: Any) -> Any:
        return lambda body: body() if condition else None

    def barrier_wait(self, barrier: Any) -> None:
        barriers, n = barrier if isinstance(barrier, tuple) else barrier[0]
        self.simulation.wait(barriers.start_wait(n, self.simulation.local.name))

    def barrier_arrive(self, barrier: Any) -> None:
        barriers, n = barrier
        barriers.arrive(n)

    def copy_gmem_to_smem(self, source: Ref, target: Ref, barrier: Any) -> None:
        assert source.shape == target.shape
        barriers, n = barrier if isinstance(barrier, tuple) else barrier[0]
        barriers.arrive(n, copies=1)

        def finish() -> None:
            target.write(source.read(clips=True))
            barriers.copies[n] -= 1
            barriers.end_phase(n)

        self.simulation.copies.append((None, finish))

    def copy_smem_to_gmem(self, source: Ref, target: Ref) -> None:
        write = lambda: target.write(source.read(), clips=True)  # noqa: E731
        self.simulation.copies.append((self.simulation.local.name, write))

    def wait_smem_to_gmem(self, _: int, wait_read_only: bool = False) -> None:
        name = self.simulation.local.name
        self.simulation.wait(lambda: all(owner != name for owner, _ in self.simulation.copies))

    def ping_pong_pass(self, num_warpgroups: int) -> None:
        block, warpgroup = self.simulation.local.name
        waiting = block, (warpgroup + 1) % num_warpgroups
        assert not self.passes.get(waiting), "passed twice"
        self.passes[waiting] = 1

    def ping_pong_wait(self, num_warpgroups: int) -> None:
        name = self.simulation.local.name
        self.simulation.wait(lambda: self.passes.get(name))
        self.passes[name] = 0

    def fetch_and_store_tile_index(self, schedule: Any, _: Any, target: Any) -> None:
        target[...] = schedule.num_blocks + self.num_tiles_taken
        self.num_tiles_taken += 1


# `einsum` adds in an order that depends on the contracted axis alone, and takes no threads of its own.
def issue_scores(*operands: Any) -> Any:
    """Returns a product that reads queries and keys when it is awaited."""
    pairs = [operands[:2], *operands[2:]]
    return lambda: sum(np.einsum("qd,kd->qk", queries.read(), keys.read()) for queries, keys in pairs)


def accumulate_product(acc: Any, weights: Any, values: Ref) -> Any:
    """Returns a sum that reads values, in chunks of columns, when it is awaited."""
    return lambda: acc + np.concatenate([np.einsum("qk,kd->qd", weights, chunk) for chunk in values.read()], axis=1)


def mask_outside_key_range(scores: Any, first: Any, last: Any, unsorted: Any, words: Any) -> Any:
    """Masks the columns before `first` and after `last`; None without a limit."""
    assert unsorted is None
    assert not words
    column, first = np.arange(scores.shape[1]), first[:, None]
    is_after = False if last is None else column > last[:, None]
    return np.where((column < first) | is_after, np.float32(-np.inf), scores)


def zero_padding_rows(tile: Ref, ids: Ref) -> None:
    tile.write(np.where(ids.read()[:, None] < 0, 0, tile.read()))


def simulated_forward(monkeypatch: Any, record: Any, params: Any, seed: int = 0) -> tuple[Any, Any]:
    """Returns output and lse of a record, in float32."""

    def launch(spec: Any, tile: Any, schedule: Any, operands: Any, batch_size: int) -> tuple[Any, ...]:
        schedule = dataclasses.replace(schedule, num_blocks=min(THREAD_BLOCKS, schedule.num_items))
        return _launch(monkeypatch, (dataclasses.replace(spec, dtype=np.float32), tile, schedule), operands, seed)

    with monkeypatch.context() as patch:
        patch.setattr(forward, "launch_forward_kernel", launch)
        patch.setattr(forward, "run_with_batch_rows", lambda run, operands, batch: run(operands, batch))
        for name, function in COMPILED.items():
            patch.setattr(forward, name, function)
        patch.setattr(jax.lax, "cond", lambda condition, yes, no, x: yes(x) if condition else no(x))
        output, residuals = forward.forward(record, params)
    return np.asarray(output), np.asarray(residuals.lse)


def _launch(monkeypatch: Any, constants: Any, operands: dict[str, Any], seed: int) -> tuple[Any, ...]:
    (spec, tile, schedule), simulation = constants, Simulation(seed)
    assert spec.lists_first_keys
    refs = {name: Ref(np.asarray(x, np.int32 if x.dtype == np.int32 else np.float32)) for name, x in operands.items()}
    batch, queries, heads = operands["q"].shape[:3]
    outputs = (
        Ref(np.full((batch, queries, heads, spec.value_dim), np.nan, np.float32)),
        Ref(np.full((batch, heads, schedule.tiles_per_head * tile.block_q), np.nan, np.float32)),
    )
    blocks = [
        forward_call.Call(spec, tile, schedule, refs, outputs, _shared_memory(spec, tile), None)
        for _ in range(schedule.num_blocks)
    ]
    with monkeypatch.context() as patch:
        _replace_instructions(patch, Instructions(simulation))
        simulation.run(
            {
                (n, warpgroup): lambda call=call: flash_forward.forward_kernel(call)
                for n, call in enumerate(blocks)
                for warpgroup in range(tile.consumer_warpgroups + 1)
            }
        )
    barriers = [x for call in blocks for x in vars(call.shared).values() if isinstance(x, Mbarriers)]
    assert not any(any(x.arrivals) for x in barriers), "half a phase is left at the end"
    return tuple(x.array for x in outputs)


def _shared_memory(spec: Any, tile: Any) -> forward_call.SharedMemory:
    """Returns shared memory full of NaN and -1, with the barriers of the kernel."""
    memory: dict[str, Any] = {}
    for name, x in forward._scratch(spec, tile, None).items():
        if hasattr(x, "num_arrivals"):
            memory[name] = Mbarriers(name, x.num_arrivals, int(np.prod(x.num_barriers)))
        elif hasattr(x, "refs"):  # two views of the same memory
            memory[name] = memory[f"{name}_rows"] = Ref(np.full(x.refs[0].shape, np.nan, np.float32))
        else:
            memory[name] = Ref(np.full(x.shape, -1, x.dtype))
    return forward_call.SharedMemory(**memory)


def _replace_instructions(patch: Any, instructions: Instructions) -> None:
    for module in (flash_forward, forward_call, forward_producer, forward_outputs, online_softmax, tile_scheduler):
        replaced = {name: instructions for name in ("plgpu", "pl", "lax")} | {"jnp": np, "I32": int}
        for name in replaced.keys() & vars(module).keys():
            patch.setattr(module, name, replaced[name])

    def broadcast_to_columns(rows: Any, shape: Any) -> Any:
        return np.broadcast_to(rows[:, None], shape)

    replacements = (
        (tile_scheduler, "fetch_and_store_tile_index", instructions.fetch_and_store_tile_index),
        (flash_forward, "ping_pong_pass", instructions.ping_pong_pass),
        (flash_forward, "ping_pong_wait", instructions.ping_pong_wait),
        (forward_producer, "zero_padding_rows", zero_padding_rows),
        (wgmma, "issue_scores", issue_scores),
        (wgmma, "accumulate_product", accumulate_product),
        (wgmma, "wait_for_products", lambda product, max_in_flight: product()),
        (tile_masks, "key_column_range", lambda *_: (None, None)),
        (tile_masks, "mask_outside_key_range", mask_outside_key_range),
        (flash_forward, "broadcast_to_columns", broadcast_to_columns),
        (online_softmax, "broadcast_to_columns", broadcast_to_columns),
        (online_softmax, "rescale_lazily", lambda acc, alpha: acc * alpha[:, None]),
        (online_softmax, "reduce_row_sum", lambda x: x),
        (online_softmax, "_thread_row_sum", lambda x: x.sum(axis=1)),
        (arrays, "fill_row_vector", lambda rows, value: np.full((rows,), value, np.float32)),
        (arrays, "zero_tile", lambda shape: np.zeros(shape, np.float32)),
        (arrays, "load_row_vector", lambda ref: ref.read()),
    )
    for module, name, value in replacements:
        patch.setattr(module, name, value)
