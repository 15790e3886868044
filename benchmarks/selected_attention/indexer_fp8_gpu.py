"""The lightning indexer in float8 on Hopper: checks, then times next to Triton's, cuDNN's and a dense product.

    python benchmarks/selected_attention/indexer_fp8_gpu.py          # checks, prefill of 32768 and 131072 keys
    python benchmarks/selected_attention/indexer_fp8_gpu.py --quick  # checks, prefill of 32768 keys

64 heads of 128 select 2048 keys per query, as in DeepSeek-V3.2; arrays are normal and rounded to float8_e4m3fn with a
scale per row. The queries are the newest tokens of a context. Rates count the pairs of a query and a key that it may
select, 2 H D operations each. Before anything is timed, all indices and scores are compared with XLA's for numbers
whose scores are exact, and those of some queries of normal numbers with a float64 product on the host: there the tensor
cores' sums of about 14 bits may change the last of the selected keys (docs/lab/fp8_indexer.md). cuDNN's kernels take
part where `nvidia-cudnn-frontend` and `nvidia-cutlass-dsl` are installed, cuBLASLt's dense product where `torch` is.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import lightning_indexer
from ejkernel.modules.operations.lightning_indexer import LightningIndexerArguments
from ejkernel.modules.operations.lightning_indexer import lower as lower_indexer
from ejkernel.ops.device import current_device
from ejkernel_cuda.lightning_indexer import config, forward
from ejkernel_cuda.lightning_indexer.plan import queries_per_chunk

sys.path.append(str(Path(__file__).parents[1]))
import lightning_indexer_gpu
import shared.report
import shared.turns

COLUMNS = ("queries", "keys", "side", "ms", "rate", "of 1979", "of the dense product")
HEADS, CHANNELS, TOP_K = 64, 128, 2048
FP8, LARGEST, FP8_RATE = jnp.float8_e4m3fn, 448, 1979e12
DENSE = 8192
Calls = dict[str, Callable[[], Any]]


def rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns numbers of 8 bits, and the scales that they were divided by."""
    scales = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / LARGEST
    return (x / scales[..., None]).astype(FP8), scales


def arrays_in_float8(case: lightning_indexer_gpu.Case) -> dict[str, jax.Array]:
    """Returns the arguments of a call."""
    query, key, weights = case.make_arrays()
    (query, query_scales), (key, key_scales) = rounded(query), rounded(key)
    names = {"query": query, "key": key, "weights": weights * HEADS**-0.5}
    return names | {"query_scales": query_scales, "key_scales": key_scales}


def powers(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns powers of two from 1/4 to 4."""
    return jnp.ldexp(jnp.float32(1), jax.random.randint(key, shape, -2, 3))


def check_exact() -> None:
    """Compares all indices and scores with XLA's, for numbers whose scores are exact and often equal.

    Raises:
        SystemExit: They differ.
    """
    sizes = ((1, 300, 9000, 64), (2, 64, 32768, 64), (1, 77, 20001, 32), (3, 5, 130, 32), (1, 1, 131072, 64))
    for number, (batch, queries, keys, heads) in enumerate(sizes):
        draws = jax.random.split(jax.random.key(number), 5)
        quarters = lightning_indexer_gpu.draw_quarters
        arrays = {
            "query": quarters(draws[0], (batch, queries, heads, CHANNELS)).astype(FP8),
            "key": quarters(draws[1], (batch, keys, CHANNELS)).astype(FP8),
            "weights": quarters(draws[2], (batch, queries, heads)).astype(jnp.float32),
            "query_scales": powers(draws[3], (batch, queries, heads)),
            "key_scales": powers(draws[4], (batch, keys)) * jnp.where(jnp.arange(keys) % 3, 1, -1),
        }
        for options in ({}, {"rectify": False}, {"sliding_window": (keys // 3, 0)}):
            call = functools.partial(lightning_indexer, top_k=TOP_K, softmax_scale=2.0**-5, **options)
            got, again, want = (jax.jit(functools.partial(call, platform=x))(**arrays) for x in ("cuda", "cuda", "xla"))
            for x, y, z in zip(got, again, want, strict=True):
                if not (jnp.array_equal(x, y) and jnp.array_equal(x, z)):
                    count = int(jnp.sum(jnp.any(x != z, axis=-1)))
                    raise SystemExit(f"{batch, queries, keys, heads} {options}: {count} rows of the kernels are wrong")
    print("exact numbers: all indices and scores are XLA's, twice the same\n")


def check_rounding(queries: int = 16, keys: int = 32768) -> None:
    """Compares scores and selection of normal numbers with a float64 product on the host.

    Raises:
        SystemExit: Scores or selection differ by more than sums of about 14 bits explain.
    """
    case = lightning_indexer_gpu.Case(name="check", queries=queries, keys=keys)
    arrays = arrays_in_float8(case)
    indices, scores = jax.jit(functools.partial(lightning_indexer, top_k=TOP_K, platform="cuda"))(**arrays)
    wide = {name: np.asarray(x, np.float64)[0] for name, x in arrays.items()}
    changed, errors = [], []
    for row in range(queries):
        products = np.maximum(wide["query"][row] @ wide["key"].T, 0) * CHANNELS**-0.5
        exact = (wide["weights"][row] * wide["query_scales"][row]) @ products * wide["key_scales"]
        exact[keys - queries + row + 1 :] = -np.inf
        want = np.argsort(-exact, kind="stable")[:TOP_K]
        got = np.asarray(indices[0, row])
        changed.append(len(set(want.tolist()) - set(got.tolist())))
        spread = np.std(exact[np.isfinite(exact)])
        errors.append(np.max(np.abs(np.asarray(scores[0, row]) - exact[got])) / spread)
    print(f"normal numbers: {np.mean(changed):.2f} of {TOP_K} keys per query change (0.75 simulated), at most")
    print(f"{max(changed)}; scores differ by at most {max(errors):.1e} of their standard deviation\n")
    if np.mean(changed) > 20 or max(errors) > 0.05:
        raise SystemExit("the kernels are wrong")


def float8_kernels(case: lightning_indexer_gpu.Case, arrays: dict[str, jax.Array]) -> tuple[Calls, int]:
    """Returns the scores of the last chunk of queries for each split of the keys, the selection, and the queries."""
    record = lower_indexer(LightningIndexerArguments(**arrays, top_k=TOP_K))
    chunk = queries_per_chunk(record)
    newest = forward.Queries(*(x[:, -chunk:] for x in forward.queries_of(record)))
    keys, calls, scores = forward.keys_of(record), {}, None
    for tiles in config.candidates(record, current_device(), "forward"):
        call = jax.jit(lambda queries, keys, tiles=tiles: forward.ordered_scores(queries, keys, record, tiles))
        scores = call(newest, keys)
        calls[f"scores, {tiles.split_keys} keys per split"] = functools.partial(call, newest, keys)
    select = jax.jit(functools.partial(forward.select_top_k, top_k=TOP_K))
    calls["selection"] = functools.partial(select, scores, newest.key_starts, newest.key_ends)
    return calls, chunk


def dense_products() -> Calls:
    """Returns dense products in float8, which set the rate that can be reached."""
    a, b = (jax.random.normal(jax.random.key(n), (DENSE, DENSE)).astype(FP8) for n in (0, 1))
    product = jax.jit(
        lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    )
    calls: Calls = {"dense product in float8, XLA": functools.partial(product, a, b)}
    if importlib.util.find_spec("torch"):
        import torch

        x, y = (torch.randn(DENSE, DENSE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        for fast in (True, False):
            name = f"dense product in float8, cuBLASLt{', fast accumulation' if fast else ''}"
            calls[name] = functools.partial(torch._scaled_mm, x, y.T, use_fast_accum=fast, **options)
    return calls


def rows(case: lightning_indexer_gpu.Case, rounds: int) -> Iterator[list[str]]:
    """Yields the lines of the table for a case, all sides interleaved."""
    arrays, plain = arrays_in_float8(case), case.make_arrays()
    calls, chunk = float8_kernels(case, arrays)
    sides = {f"CUDA {name}": call for name, call in calls.items()}
    triton, triton_chunk = lightning_indexer_gpu.both_kernels(case, plain)
    sides |= {f"Triton {name}": call for name, call in triton.items()}
    if lightning_indexer_gpu._indexer_peers.is_installed():
        sides |= lightning_indexer_gpu.cudnn_kernels(case, plain, triton_chunk)
    for platform in ("cuda", "triton"):
        call: Any = jax.jit(functools.partial(lightning_indexer, top_k=TOP_K, platform=platform))
        sides[f"whole call, {platform}"] = functools.partial(call, **arrays)
    dense = dense_products()
    seconds = shared.turns.time_in_turns(sides | dense, rounds)
    dense_rate = max(2 * DENSE**3 / seconds[name] for name in dense)
    for name, took in seconds.items():
        queries = case.queries if "whole" in name else triton_chunk if "CUDA" not in name else chunk
        rate = (2 * DENSE**3 if name in dense else case.operations(queries)) / took
        shown = (
            ["", "", ""]
            if "selection" in name
            else [f"{rate / 1e12:.0f} TFLOP/s", f"{rate / FP8_RATE:.0%}", f"{rate / dense_rate:.0%}"]
        )
        sizes = ["", ""] if name in dense else [str(queries), str(case.keys)]
        yield [*sizes, name, f"{took * 1e3:.3f}", *shown]


def main() -> None:
    """Prints the table."""
    chosen = shared.report.parse_options(__doc__, {"--quick": "32768 keys, few rounds"})
    check_exact()
    check_rounding()
    cases = lightning_indexer_gpu.CASES[: 1 if chosen.quick else 2]
    every = (row for case in cases for row in rows(case, 3 if chosen.quick else 5))
    shared.report.print_rows_as_measured(COLUMNS, every)


if __name__ == "__main__":
    main()
