"""Recurrences and grouped matmul on a CPU against the library `ejkernel` 0.0.80.3 of the same name, in turns.

python benchmarks/library/upstream_cpu.py --peer <python of an environment that has it> [--quick]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.append(str(Path(__file__).parents[1]))
from shared.upstream import TABLE_COLUMNS, Problem, comparison_rows, parse_arguments, serve


def problems(tokens: int) -> dict[str, Problem]:
    """Name -> (function, arrays, arguments with a gradient), of whichever library this interpreter has."""
    from ejkernel import modules  # both libraries answer to this name

    ops = {name: getattr(modules, name) for name in NAMES}
    query, key, value, noise = jax.random.normal(jax.random.key(0), (4, 1, tokens, 8, 64))
    key = key / 8
    gate = jax.nn.log_sigmoid(noise) / 16
    delta = (query, key, value, jax.nn.sigmoid(noise[..., 0]), gate[..., 1])
    step = jax.nn.softplus(noise[..., 0])
    space = (value, -jnp.arange(1.0, 9.0), key[:, :, :1], query[:, :, :1], jnp.ones(8), step)
    rows, matrices = (
        jax.random.normal(jax.random.key(1), (tokens, 512)),
        jax.random.normal(jax.random.key(2), (8, 512, 512)),
    )
    sizes = jnp.asarray([tokens // 4, 0, tokens // 8, 1, tokens // 4 - 1, tokens // 8, 0, tokens // 4], jnp.int32)

    def matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return ops["grouped_matmul"](lhs, rhs, sizes)

    def state_space(*arrays: jax.Array) -> jax.Array:
        return ops["state_space_v2"](*arrays)[0]

    return {
        "GLA, a gate a channel": Problem(ops["gla_attention"], (query, key, value, gate), (0, 1, 2, 3)),
        "gated delta rule": Problem(ops["gated_delta_rule"], delta, (0, 1, 2, 3, 4)),
        "kernel delta attention": Problem(ops["kernel_delta_attention"], delta, (0, 1, 2, 3, 4)),
        "state space v2": Problem(state_space, space, tuple(range(6))),
        "state space v2, Mamba-2 130M": Problem(state_space, mamba(tokens), tuple(range(6))),
        "grouped matmul": Problem(matmul, (rows, matrices), (0, 1)),
    }


def mamba(tokens: int) -> tuple[jax.Array, ...]:
    """Arguments of `state_space_v2` in the sizes of that model's layers: 24 heads of 64 and states of 128."""
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (1, tokens, 24, 64))
    write, read = (jax.random.normal(k, (1, tokens, 1, 128)) / 128**0.5 for k in keys[1:3])
    step = jax.nn.softplus(jax.random.normal(keys[3], (1, tokens, 24)))
    return x, -jnp.linspace(1.0, 16.0, 24), write, read, jnp.ones(24), step


NAMES = ("gla_attention", "gated_delta_rule", "kernel_delta_attention", "state_space_v2", "grouped_matmul")


def main() -> None:
    options = parse_arguments("Recurrences and grouped matmul against another library")
    if options.serve:
        return serve(problems(options.serve), calls_per_sample=1)
    if not options.peer:
        return print("no --peer: nothing to compare with")
    import shared.report  # reads the metadata of distributions that the peer's interpreter lacks

    tokens, repeats = (512, 3) if options.quick else (2048, 15)
    rows = comparison_rows(options.peer, problems(tokens), tokens, repeats, JAX_PLATFORMS="cpu")
    print(shared.report.heading())
    print(f"{tokens} tokens, 8 heads of 64 where no model is named, float32; grouped matmul by [8, 512, 512];")
    print(f"medians of {repeats} turns\n")
    print(shared.report.markdown_table(TABLE_COLUMNS, rows))
    return None


if __name__ == "__main__":
    main()
