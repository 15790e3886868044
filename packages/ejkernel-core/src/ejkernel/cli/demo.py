"""Implements `ejkernel demo`."""

import functools
import platform
from collections.abc import Callable
from typing import Any

import click
import jax
import jax.numpy as jnp
from rich.console import Console

from ejkernel._version import __version__
from ejkernel.cli.devices import find_devices
from ejkernel.cli.measuring import interleaved_medians, temporary_bytes
from ejkernel.cli.tables import (
    format_megabytes,
    format_milliseconds,
    open_console,
    print_decision,
    print_table,
    print_unmarked_text,
)
from ejkernel.modules import flash_attention
from ejkernel.ops.explain import explain
from ejkernel.ops.plugins import registry

HEADS, KV_HEADS, HEAD_DIM, REPEATS = 8, 2, 64, 2
# Relative to the largest entry. By default, only CPUs multiply float32 matrices in full float32.
MAX_ERROR_BY_PLATFORM = {"cpu": 1e-4}
MAX_ERROR_ELSEWHERE = 2e-2


@click.command()
@click.option(
    "--length", type=click.IntRange(min=1), default=2048, show_default=True, help="Length of the sequence in tokens."
)
@click.pass_context
def demo(ctx: click.Context, length: int) -> None:
    """Run flash attention on this machine and check the result.

    Computes attention and its gradients as any program does, through plugins, dispatch and the configuration chain, and
    compares them with the textbook formula. The exit status is 1 if they differ.
    """
    out = open_console()
    find_devices()
    _print_introduction(out)
    inputs = _make_inputs(length)
    query = "x".join(map(str, inputs[0].shape))
    call = f"causal attention, {HEADS} query heads, {KV_HEADS} KV heads, query {query}"
    print_unmarked_text(out, f"2. Which implementation runs a call: {call}", "bold")
    decision = explain(flash_attention, *inputs[:3], causal=True)
    print_decision(out, decision)
    if decision.forward.implementation is None or decision.backward.implementation is None:
        ctx.exit(1)
    our_attention, naive_attention = (
        _compile_with_gradients(attention, inputs) for attention in (_ejkernel_attention, _naive_attention)
    )
    matches = _check_result(out, our_attention(*inputs), naive_attention(*inputs))
    _compare_times(out, [("ejkernel", our_attention), ("the textbook formula", naive_attention)], inputs)
    print_unmarked_text(
        out,
        "The results agree." if matches else "WRONG: the results differ by more than rounding.",
        "bold green" if matches else "bold red",
    )
    if not matches:
        ctx.exit(1)


def _print_introduction(out: Console) -> None:
    registered = registry()
    kinds = sorted({f"{device.device_kind} ({device.platform})" for device in jax.devices()})
    print_unmarked_text(out, "1. Versions, devices and backends", "bold")
    versions = f"ejkernel {__version__}, JAX {jax.__version__}, Python {platform.python_version()}"
    print_unmarked_text(out, f"{versions}; {len(jax.devices())} device(s): {', '.join(kinds)}")
    rows = [(p.name, p.distribution, p.error or "loaded") for p in registered.plugins]
    print_table(out, "", "backend", "distribution", "status", rows=rows, folded_columns=["status"])


def _make_inputs(length: int) -> tuple[jax.Array, ...]:
    """Makes query, key, value, and the cotangent of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return tuple(jax.random.normal(k, (1, length, h, HEAD_DIM)) for k, h in zip(keys, heads, strict=True))


def _ejkernel_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return flash_attention(query, key, value, causal=True)


def _naive_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes attention as textbooks write it, with all scores at once, [H, T, T]."""
    einsum_highest = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    scores = einsum_highest("bthd,bshd->bhts", query, key) * HEAD_DIM**-0.5
    is_causal_pair = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return einsum_highest("bhts,bshd->bthd", jax.nn.softmax(jnp.where(is_causal_pair, scores, -jnp.inf)), value)


def _compile_with_gradients(attention_function: Callable[..., jax.Array], inputs: tuple[jax.Array, ...]) -> Any:
    """Compiles a function that returns the output and the gradients of query, key and value."""

    def output_and_gradients(
        query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array
    ) -> dict[str, jax.Array]:
        output, pull = jax.vjp(attention_function, query, key, value)
        gradients = zip(("query", "key", "value"), pull(cotangent), strict=True)
        return {"output": output} | {f"gradient of {name}": gradient for name, gradient in gradients}

    return jax.jit(output_and_gradients).lower(*inputs).compile()


def _check_result(out: Console, got: dict[str, jax.Array], expected: dict[str, jax.Array]) -> bool:
    print_unmarked_text(out, "3. Largest differences from the textbook formula", "bold")
    allowed = MAX_ERROR_BY_PLATFORM.get(jax.devices()[0].platform, MAX_ERROR_ELSEWHERE)
    rows, matches = list[Any](), True
    for name in sorted(expected, reverse=True):
        largest = float(jnp.max(jnp.abs(expected[name])))
        error = float(jnp.max(jnp.abs(got[name] - expected[name])))
        right = error <= allowed * largest  # False for NaN
        matches &= right
        verdict = ("yes", "green") if right else ("NO", "bold red")
        rows.append((name, f"{error:.1e}", f"{largest:.2f}", f"{allowed * largest:.1e}", verdict))
    headings = ("result", "largest error", "largest entry", "allowed error", "within it")
    print_table(out, "", *headings, rows=rows, right_aligned_columns=headings[1:4])
    return matches


def _compare_times(out: Console, compiled_functions: list[tuple[str, Any]], inputs: tuple[jax.Array, ...]) -> None:
    print_unmarked_text(out, "4. Time and memory of the forward and backward pass", "bold")
    times = interleaved_medians(
        [functools.partial(compiled, *inputs) for _, compiled in compiled_functions], REPEATS, is_already_warm=True
    )
    rows = [
        (name, format_milliseconds(seconds), format_megabytes(temporary_bytes(compiled)))
        for (name, compiled), seconds in zip(compiled_functions, times, strict=True)
    ]
    print_table(out, "", "", "ms", "temporary MB", rows=rows, right_aligned_columns=["ms", "temporary MB"])
