"""Fused cross-entropy and KL divergence on a GPU: the output layer of Llama 3, and its logits.

    python benchmarks/cross_entropy/fused_cross_entropy_gpu.py                 # the tables
    python benchmarks/cross_entropy/fused_cross_entropy_gpu.py --quick         # fewer rounds
    python benchmarks/cross_entropy/fused_cross_entropy_gpu.py --candidates    # also configurations worth measuring
    TRITON_INTERPRET=1 python benchmarks/cross_entropy/fused_cross_entropy_gpu.py --check    # no times: anywhere

The first table compares losses and gradients with NumPy's in float64, for a vocabulary of 151936 entries. The second
has times: all sides get the same bfloat16 arrays and targets drawn at random, sides are interleaved, several calls a
sample, and medians are printed. Memory is what a side takes next to arguments and gradients. The three products are
those of the logits and of the two gradients, alone. Logits are donated, and each call gets the gradient of the call
before.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import fused_cross_entropy, fused_kl_divergence
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback, run_both_passes

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from selective_scan.selective_scan_gpu import Side, compiled, error, medians

OP = registry().ops["fused_cross_entropy"]
Arrays = tuple[jax.Array, ...]


def head_inputs(tokens: int, channels: int, entries: int) -> Arrays:
    """Hidden states, matrix and targets."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, channels), jnp.bfloat16)
    head = jax.random.normal(keys[1], (channels, entries), jnp.bfloat16) * (2 * channels**-0.5)
    return hidden, head.astype(jnp.bfloat16), jax.random.randint(keys[2], (tokens,), 0, entries)


def head_step(platform: str) -> Callable[..., Any]:
    """(hidden, head, targets) -> loss and gradients."""

    def step(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> Any:
        def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
            return fused_cross_entropy(hidden=hidden, lm_head_weight=head, targets=targets, platform=platform).loss

        return jax.value_and_grad(loss, (0, 1))(hidden, head)

    return step


def configured_step(config: Any) -> Callable[..., Any]:
    """The same by Triton's kernels with a configuration."""
    (kernel,) = (i for i in registry().implementations[OP.name] if i.name == "triton")

    def step(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> Any:
        record = OP.lower(OP.arguments(hidden=hidden, lm_head_weight=head, targets=targets))
        zeros = jnp.zeros(hidden.shape[0])
        cotangent = (jnp.ones(1), zeros, zeros, zeros)
        fields = frozenset({"inputs", "lm_head"})
        start = Pullback(record=record, residuals=None, output=None, cotangent=cotangent, grad_fields=fields)
        output, gradients = run_both_passes(kernel.function("forward"), kernel.function("backward"), start, config)
        return output[0][0], (gradients["inputs"], gradients["lm_head"])

    return step


def configured_steps(arrays: Arrays, everything: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Triton's kernels with sums in bfloat16, with logits in float32, or with every configuration worth measuring."""
    (kernel,) = (i for i in registry().implementations[OP.name] if i.name == "triton")
    hidden, head, targets = arrays
    record, device = OP.lower(OP.arguments(hidden=hidden, lm_head_weight=head, targets=targets)), current_device()
    default = kernel.config.heuristic(record, device, "forward")
    # Eight blocks, as many as of the times.
    narrow = dataclasses.replace(default, float32_sums=False, block_t=max(1, hidden.shape[0] // 8))
    yield "ejkernel triton, sums in bfloat16", configured_step(narrow)
    yield "ejkernel triton, logits in float32", configured_step(dataclasses.replace(default, float32_logits=True))
    for config in kernel.config.candidates(record, device, "forward") if everything else ():
        yield str(config), configured_step(config)


def three_products(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> Any:
    """The products of the loss and its gradients, of all tokens at once."""
    logits = hidden @ head
    return logits @ head.T, hidden.T @ logits


def float64_step(arrays: Arrays) -> list[np.ndarray]:
    """Loss and gradients in float64."""
    hidden, head, targets = (np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x) for x in arrays)
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    logits = hidden @ head
    largest = logits.max(axis=1, keepdims=True)
    lse = np.log(np.exp(logits - largest).sum(axis=1, keepdims=True)) + largest
    rows = np.arange(len(targets))
    loss = np.mean(lse[:, 0] - logits[rows, targets])
    gradient = np.exp(logits - lse)
    gradient[rows, targets] -= 1
    gradient /= len(targets)
    return [np.asarray(loss), gradient @ head.T, hidden.T @ gradient]


def accuracy(options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side: relative errors of the loss and the gradients."""
    arrays = head_inputs(24, 16, 301) if options.check else head_inputs(1024, 512, 151936)
    want = float64_step(arrays)
    steps = {f"ejkernel {name}": head_step(name) for name in ("triton", "xla")}
    steps |= dict(configured_steps(arrays, options.candidates or options.check))
    for name, step in steps.items():
        loss, gradients = jax.jit(step)(*arrays)
        made = [np.asarray(x.astype(jnp.float32), np.float64) for x in (loss, *gradients)]
        yield [name, *(f"{error([x], [y]):.1e}" for x, y in zip(made, want, strict=True))]


def tokamax_step() -> Callable[..., Any]:
    """Tokamax's loss with gradients; on a GPU it has an implementation in XLA."""
    import tokamax
    from absl import flags

    flags.FLAGS(sys.argv[:1])  # else Tokamax parses the options of this script

    def step(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> Any:
        def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
            return tokamax.linear_softmax_cross_entropy_loss(
                hidden, targets, head, reduction="mean", implementation="xla"
            )

        return jax.value_and_grad(loss, (0, 1))(hidden, head)

    return step


def liger_side(arrays: Arrays) -> Side:
    """Liger's fused loss of PyTorch, with gradients."""
    import torch

    # jax-triton turned Triton's cache off for the whole process, and PyTorch's kernels need one.
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    hidden, head, targets = (torch.from_dlpack(x) for x in arrays)
    hidden = hidden.clone().requires_grad_()
    weight = head.t().contiguous().requires_grad_()
    targets = targets.long()

    def run() -> Any:
        hidden.grad = weight.grad = None
        result = liger_fused_linear_cross_entropy(hidden, weight, targets)
        (result[0] if isinstance(result, tuple) else result).backward()
        torch.cuda.synchronize()

    run()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return Side(run, torch.cuda.max_memory_allocated() - before)


def head_sides(options: argparse.Namespace, arrays: Arrays) -> Iterator[tuple[str, Side]]:
    """The sides of the loss from hidden states."""
    yield "three products", compiled(three_products, *arrays)
    for name in ("triton", "xla"):
        yield f"ejkernel {name}", compiled(head_step(name), *arrays)
    for name, step in configured_steps(arrays, options.candidates):
        yield name, compiled(step, *arrays)
    if importlib.util.find_spec("tokamax"):
        yield "tokamax xla", compiled(tokamax_step(), *arrays)
    if importlib.util.find_spec("liger_kernel") and importlib.util.find_spec("torch"):
        yield "Liger", liger_side(arrays)


def logits_side(step: Callable[..., Any], logits: jax.Array, donates: bool, *others: jax.Array) -> Side:
    """A call on logits; if it donates them, each call gets the gradient of the one before."""
    program = jax.jit(step, donate_argnums=(0,) if donates else ()).lower(logits, *others).compile()
    state = [logits + 0 if donates else logits]

    def run() -> Any:
        loss, *gradient = program(state[0], *others)
        if donates:
            state[0] = gradient[0]
        return loss

    analysis = program.memory_analysis()
    return Side(run, None if analysis is None else analysis.temp_size_in_bytes)


def logits_sides(gradients: bool, logits: jax.Array, targets: jax.Array) -> Iterator[tuple[str, str, float, Side]]:
    """(call, side, arrays of logits that it has to read and write, how it runs) of losses of logits."""

    def cross_entropy(logits: jax.Array, targets: jax.Array, platform: str) -> jax.Array:
        return fused_cross_entropy(logits, targets, platform=platform).loss

    def divergence(direction: Any, logits: jax.Array, teacher: jax.Array, platform: str) -> jax.Array:
        return fused_kl_divergence(logits, teacher, direction=direction, temperature=2.0, platform=platform).loss

    losses: dict[str, tuple[Callable[..., Any], jax.Array, float, float]] = {
        "cross-entropy": (cross_entropy, targets, 1, 3),
        "KL forward": (functools.partial(divergence, "forward"), logits * 0.5, 2, 5),
        "KL reverse": (functools.partial(divergence, "reverse"), logits * 0.5, 2, 5),
        "JSD": (functools.partial(divergence, "jsd"), logits * 0.5, 2, 5),
    }
    for call, (loss, other, forward_arrays, all_arrays) in losses.items():
        for name in ("triton", "xla"):
            function = functools.partial(loss, platform=name)
            step = jax.value_and_grad(function) if gradients else lambda *arrays, f=function: (f(*arrays),)
            side = logits_side(step, logits, gradients, other)
            yield call, f"ejkernel {name}", all_arrays if gradients else forward_arrays, side


def timed(options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side of each call."""
    rounds = 3 if options.quick else 7
    arrays = head_inputs(32768, 4096, 128256)
    sides = dict(head_sides(options, arrays))
    found = medians(sides, rounds)
    products = found["three products"]
    for name, seconds in found.items():
        memory = f"{(sides[name].memory or 0) / 1e9:.2f} GB"
        words = ["T32768 D4096 V128256", "from hidden states", "with gradients", name]
        yield [*words, f"{seconds * 1e3:.2f}", f"{seconds / products:.3f} of the products", memory]
    del arrays, sides
    tokens, entries = 8192, 128256
    logits = (2 * jax.random.normal(jax.random.key(0), (tokens, entries))).astype(jnp.bfloat16)
    targets = jax.random.randint(jax.random.key(1), (tokens,), 0, entries)
    for gradients in (False, True):
        for call, name, moved, side in logits_sides(gradients, logits, targets):
            (seconds,) = medians({name: side}, rounds).values()
            rate = f"{moved * logits.nbytes / seconds / 1e9:.0f} GB/s"
            words = [f"T{tokens} V{entries}", f"{call} of logits", "with gradients" if gradients else "forward", name]
            yield [*words, f"{seconds * 1e3:.3f}", rate, f"{(side.memory or 0) / 1e9:.2f} GB"]
    seconds = medians({"copy": compiled(lambda x: -x, logits)}, rounds)["copy"]
    yield [
        f"T{tokens} V{entries}",
        "copy",
        "",
        "copy",
        f"{seconds * 1e3:.3f}",
        f"{2 * logits.nbytes / seconds / 1e9:.0f} GB/s",
        "",
    ]


def main() -> None:
    """Prints the tables."""
    options = shared.report.parse_options(
        __doc__,
        {
            "--quick": "fewer rounds",
            **shared.report.CANDIDATES_FLAG,
            "--check": "small sizes on any device, no times",
        },
    )
    shared.report.print_rows_as_measured(("side", "error of the loss", "of dx", "of dW"), accuracy(options))
    if not options.check:
        columns = ("shape", "call", "pass", "side", "ms", "rate", "memory")
        shared.report.print_rows_as_measured(columns, timed(options))


if __name__ == "__main__":
    main()
