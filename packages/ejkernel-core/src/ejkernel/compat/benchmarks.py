"""`ejkernel.benchmarks`: functions that compute the same, timed on the same inputs; `ejkernel bench` is newer."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Benchmark", "BenchmarkResult"]


@dataclasses.dataclass(frozen=True)
class BenchmarkResult:
    """Times of one function on one configuration, in milliseconds; those of the backward pass are None without one."""

    algorithm: str
    config: dict[str, Any]
    mean_ms: float
    std_ms: float
    min_ms: float
    max_ms: float
    median_ms: float
    mean_ms_bwd: float | None = None
    std_ms_bwd: float | None = None
    min_ms_bwd: float | None = None
    max_ms_bwd: float | None = None
    median_ms_bwd: float | None = None

    @property
    def throughput_estimate(self) -> float:
        """Returns GFLOP/s of dense attention of this size, 4 B H T^2 D operations; 0 where the configuration has no
        sizes.
        """
        names = [next((name for name in group if name in self.config), None) for group in _SIZE_NAMES]
        if None in names:
            return 0.0
        batch, heads, length, width = (self.config[name] for name in names if name is not None)
        return 4 * batch * heads * length**2 * width / (self.mean_ms * 1e6)

    @property
    def has_backward(self) -> bool:
        """Returns whether the backward pass was timed."""
        return self.mean_ms_bwd is not None


_SIZE_NAMES = (("batch", "batch_size"), ("heads", "num_heads"), ("seq", "seq_len"), ("dim", "head_dim"))


class Benchmark:
    """Times functions on the inputs of each configuration.

    Args:
        algorithms: Name -> function.
        configs: What `input_generator` is given, one after the other.
        input_generator: Makes the inputs of a configuration: a tuple or list, or one array.
        warmup: Calls before the timed ones.
        iterations: Timed calls.
        bench_bwd: Whether the gradient of the mean of the first output is timed too.
        unpack_inputs: Whether a tuple or list of inputs are positional arguments.
        static_kwargs: Names of arguments that are constants of the compiled function.
    """

    def __init__(
        self,
        algorithms: dict[str, Callable[..., Any]],
        configs: Sequence[dict[str, Any]],
        input_generator: Callable[[dict[str, Any]], Any],
        warmup: int = 5,
        iterations: int = 50,
        bench_bwd: bool = False,
        unpack_inputs: bool = True,
        static_kwargs: Sequence[str] | None = None,
    ) -> None:
        self.algorithms, self.configs, self.input_generator = algorithms, list(configs), input_generator
        self.warmup, self.iterations, self.bench_bwd = warmup, iterations, bench_bwd
        self.unpack_inputs, self.static_kwargs = unpack_inputs, tuple(static_kwargs or ())
        self.results: list[BenchmarkResult] = []

    def benchmark_single(self, algo_name: str, algo_fn: Callable[..., Any], config: dict[str, Any]) -> BenchmarkResult:
        """Times one function on one configuration."""
        inputs = self.input_generator(config)
        args = tuple(inputs) if self.unpack_inputs and isinstance(inputs, tuple | list) else (inputs,)
        forward = self._time_statistics(jax.jit(algo_fn, static_argnames=self.static_kwargs), args)
        backward: dict[str, float] = {}
        if self.bench_bwd:
            gradient = jax.grad(lambda *args: _mean_of_output(algo_fn(*args)))
            backward = self._time_statistics(jax.jit(gradient), args, "_bwd")
        return BenchmarkResult(algo_name, config, **forward, **backward)

    def run(self, verbose: bool = True) -> dict[str, Any]:
        """Times every function on every configuration.

        Args:
            verbose: Whether to print a table.

        Returns:
            What `analyze` returns.
        """
        pairs = [(config, name, function) for config in self.configs for name, function in self.algorithms.items()]
        self.results = [self.benchmark_single(name, function, config) for config, name, function in pairs]
        analysis = self.analyze()
        if verbose:
            self.print_analysis(analysis)
        return analysis

    def analyze(self) -> dict[str, Any]:
        """Returns mean times of each function, how often each was the fastest, and speed-ups over the first or over
        `"xla"`.
        """
        times: dict[str, list[float]] = {name: [] for name in self.algorithms}
        for result in self.results:
            times[result.algorithm].append(result.mean_ms)
        means = {name: statistics.fmean(values) for name, values in times.items() if values}
        baseline = "xla" if "xla" in means else next(iter(means), None)
        rounds = zip(*times.values(), strict=True)
        winners = [min(zip(each, times, strict=True))[1] for each in rounds]
        return {
            "mean_ms": means,
            "baseline": baseline,
            "speedup": {} if baseline is None else {name: means[baseline] / mean for name, mean in means.items()},
            "winners": winners,
        }

    def print_analysis(self, analysis: dict[str, Any]) -> None:
        """Prints what `analyze` returned."""
        from rich.console import Console
        from rich.table import Table

        table = Table("algorithm", "mean, ms", f"speed-up over {analysis['baseline']}", "fastest of")
        for name, mean in analysis["mean_ms"].items():
            fastest = f"{analysis['winners'].count(name)} of {len(analysis['winners'])}"
            table.add_row(name, f"{mean:.3f}", f"{analysis['speedup'][name]:.2f}", fastest)
        Console().print(table)

    def save(self, filepath: str | Path = "benchmark_results.json") -> None:
        """Writes the results to a JSON file."""
        text = json.dumps([dataclasses.asdict(result) for result in self.results], indent=2, default=str)
        Path(filepath).write_text(text, encoding="utf-8")

    def _time_statistics(
        self, function: Callable[..., Any], args: tuple[Any, ...], suffix: str = ""
    ) -> dict[str, float]:
        times: list[float] = []
        for number in range(self.warmup + self.iterations):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            if number >= self.warmup:
                times.append((time.perf_counter() - start) * 1e3)
        measures = {
            "mean_ms": statistics.fmean(times),
            "std_ms": statistics.pstdev(times),
            "min_ms": min(times),
            "max_ms": max(times),
            "median_ms": statistics.median(times),
        }
        return {f"{name}{suffix}": value for name, value in measures.items()}


def _mean_of_output(output: Any) -> jax.Array:
    first = output[0] if isinstance(output, tuple | list) else output
    return jnp.mean(first)
