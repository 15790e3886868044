"""Flash attention with masks written as `mask_mod`, compared with the equivalent arguments.

    python benchmarks/tiled_attention/mask_functions.py  # on a CPU 2048 and 4096 tokens in float32
    python benchmarks/tiled_attention/mask_functions.py --quick  # 512 tokens

On a GPU, calls have 16384 tokens in bfloat16; `mask_mod` and the arguments run with the implementation that dispatch
chooses for each. Both sides are compiled and must agree before anything is timed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared.report
import shared.turns

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

WINDOW, DOCUMENTS = 512, 8
COLUMNS = ("tokens", "mask", "pass", "mask_mod ms", "arguments ms", "mask_mod / arguments", "mask_mod MB")


def with_function(mask: str, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
    """Attention with a `mask_mod`."""
    functions: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, q, k: k <= q,
        "causal window": lambda b, h, q, k: (k <= q) & (q - k <= WINDOW),
        "causal documents": lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q),
    }
    return flash_attention(query, key, value, mask_mod=functions[mask])


def with_arguments(mask: str, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
    """The same attention by its arguments."""
    options: dict[str, dict[str, Any]] = {
        "causal": {},
        "causal window": {"sliding_window": (WINDOW, 0)},
        "causal documents": {"mask_info": MaskInfo.from_segments(ids)},
    }
    return flash_attention(query, key, value, causal=True, **options[mask])


def compiled(side: Callable[..., jax.Array], mask: str, arrays: tuple[jax.Array, ...], gradient: bool) -> Any:
    """A side, or its output and gradients, ready to run."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(side(mask, query, key, value, ids).astype(jnp.float32) ** 2)

    run = jax.value_and_grad(loss, (0, 1, 2)) if gradient else lambda *arrays: side(mask, *arrays)
    return jax.jit(run).lower(*arrays).compile()


def rows(tokens: int, dtype: Any, num_rounds: int) -> Iterator[list[str]]:
    """A line of the table for each mask and pass."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, tokens, 8, 64), dtype)
    starts = jax.random.randint(jax.random.key(1), (1, DOCUMENTS), 1, tokens)
    ids = jnp.sum(jnp.arange(tokens)[None, :, None] >= starts[:, None], axis=-1).astype(jnp.int32)
    arrays = (query, key, value, ids)
    for mask in ("causal", "causal window", "causal documents"):
        for gradient in (False, True):
            ours, theirs = (compiled(side, mask, arrays, gradient) for side in (with_function, with_arguments))
            for x, y in zip(*(jax.tree.leaves(side(*arrays)) for side in (ours, theirs)), strict=True):
                wide = np.asarray(y, np.float32)
                allowed = (1e-4 if dtype == jnp.float32 else 2e-2) * max(1.0, float(np.abs(wide).max()))
                np.testing.assert_allclose(np.asarray(x, np.float32), wide, rtol=0, atol=allowed)
            sides = {"mask_mod": lambda run=ours: run(*arrays), "arguments": lambda run=theirs: run(*arrays)}
            times = shared.turns.time_in_turns(sides, num_rounds)
            one, other = (1e3 * times[name] for name in sides)
            memory = ours.memory_analysis().temp_size_in_bytes / 1e6
            name = "forward + backward" if gradient else "forward"
            yield [str(tokens), mask, name, f"{one:.2f}", f"{other:.2f}", f"{one / other:.2f}", f"{memory:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short sequences, few repeats")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    lengths = (512,) if options.quick else (16384,) if on_gpu else (2048, 4096)
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    found = (row for tokens in lengths for row in rows(tokens, dtype, 3 if options.quick else 7))
    shared.report.print_rows_as_measured(COLUMNS, found)


if __name__ == "__main__":
    main()
