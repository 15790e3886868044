"""Grouped matmul on a CPU against `jax.lax.ragged_dot`.

python benchmarks/grouped_matmul/grouped_matmul_cpu.py [--quick]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import grouped_matmul

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides

# rows, contracted elements, columns, groups
SIZES = ((2048, 512, 512, 8), (2048, 512, 512, 32), (64, 1024, 1024, 32))
QUICK = ((512, 128, 128, 8), (32, 256, 256, 16))


def main() -> None:
    options = shared.sides.parse_options(__doc__.splitlines()[0])
    shared.sides.print_table_header("ragged_dot")
    for m, k, n, groups in QUICK if options.quick else SIZES:
        rng = np.random.default_rng(0)
        ends = np.sort(rng.integers(0, m + 1, groups - 1))
        sizes = jnp.asarray(np.diff(np.concatenate([[0], ends, [m]])), jnp.int32)
        lhs = jax.random.normal(jax.random.key(0), (m, k))
        rhs = jax.random.normal(jax.random.key(1), (groups, k, n)) / k**0.5
        name = f"{m} rows, {k} x {n}, {groups} groups"
        shared.sides.print_comparison(
            name, grouped_matmul, jax.lax.ragged_dot, (lhs, rhs, sizes), (0, 1), 3 if options.quick else 7
        )


if __name__ == "__main__":
    main()
