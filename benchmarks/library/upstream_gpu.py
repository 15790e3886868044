"""Flash attention on a GPU against the library `ejkernel` 0.0.80.3 of the same name, in turns.

python benchmarks/library/upstream_gpu.py --peer <python of an environment that has it> [--quick]
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.append(str(Path(__file__).parents[1]))
from shared.upstream import TABLE_COLUMNS, Problem, comparison_rows, parse_arguments, serve

PLATFORMS = {"Triton against Triton": "triton", "what each chooses": "auto"}


def problems(length: int) -> dict[str, Problem]:
    """By name, of whichever library this interpreter has."""
    from ejkernel.modules import flash_attention  # both libraries answer to this name

    keys = jax.random.split(jax.random.key(0), 3)
    arrays = tuple(jax.random.normal(key, (4, length, 16, 128), jnp.bfloat16) for key in keys)
    return {
        f"{mask}, {label}": Problem(
            functools.partial(flash_attention, causal=mask == "causal", platform=platform), arrays, (0, 1, 2)
        )
        for mask in ("full", "causal")
        for label, platform in PLATFORMS.items()
    }


def main() -> None:
    options = parse_arguments("Flash attention on a GPU against another library")
    if options.serve:
        return serve(problems(options.serve), calls_per_sample=5)
    if not options.peer:
        return print("no --peer: nothing to compare with")
    import shared.report  # reads the metadata of distributions that the peer's interpreter lacks

    if not shared.report.has_gpu():
        return None
    length, repeats = (1024, 3) if options.quick else (8192, 7)
    separate = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # two processes have arrays on the GPU
    rows = comparison_rows(options.peer, problems(length), length, repeats, **separate)
    print(shared.report.heading())
    print(f"B4 S{length} H16/16 D128, bfloat16; medians of {repeats} turns of 5 calls\n")
    print(shared.report.markdown_table(TABLE_COLUMNS, rows))
    return None


if __name__ == "__main__":
    main()
