"""Accuracy of a small trained model whose paged KV cache has 16, 8 and fewer bits per number.

    python benchmarks/paged_attention/cache_accuracy_cpu.py            # trains for a few minutes on a CPU, then a table
    python benchmarks/paged_attention/cache_accuracy_cpu.py --quick    # a few steps

The model reads bytes: two layers with rotary positions, 4 query heads on 2 KV heads of 64. It is trained on pages of
`docs/` and evaluated on others, of which every sequence is written into the cache and attended to by one call per
layer. The model itself is float32. Against the same model with float32 keys and values, the table has
the loss per byte, the divergence of the distribution of the next byte, how often the most likely byte is another, and
the relative error of the attention layers' outputs. Scales of 8-bit caches are those of each layer's largest number.
TurboQuant's rows are means over five rotations and projections, with the deviation of the loss.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import (
    chunked_prefill_paged_decode,
    flash_attention,
    ragged_page_attention_v3,
    ragged_page_attention_v3_turboquant,
)
from ejkernel.quantization import turboquant

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

LAYERS, HEADS, KV_HEADS, SIZE, WIDTH, CONTEXT, PAGE = 2, 4, 2, 64, 128, 256, 32
BATCH, EVALUATED, DRAWS = 16, 24, 5
COLUMNS = ("cache", "bits per number", "loss, nats per byte", "divergence", "other byte", "error of attention")

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Queries [B, T, H, D], keys and values [B, T, Hk, D] -> outputs [B, T, H, D]."""


def initial(key: jax.Array) -> dict[str, jax.Array]:
    """Parameters of the model."""
    heads = {"query": HEADS * SIZE, "key": KV_HEADS * SIZE, "value": KV_HEADS * SIZE}
    shapes = {name: (LAYERS, WIDTH, columns) for name, columns in heads.items()}
    shapes |= {
        "output": (LAYERS, HEADS * SIZE, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(key, len(shapes) + 1)
    made = {name: jax.random.normal(k, s) * s[1] ** -0.5 for k, (name, s) in zip(keys, shapes.items(), strict=False)}
    return made | {"bytes": jax.random.normal(keys[-1], (256, WIDTH)) * 0.1}


def normalised(x: jax.Array) -> jax.Array:
    """Rows with a mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotary(x: jax.Array) -> jax.Array:
    """Queries or keys [B, T, H, D] with their positions."""
    angle = jnp.arange(x.shape[1])[:, None, None] * 1000.0 ** (-jnp.arange(SIZE // 2) / (SIZE // 2))
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def logits(parameters: dict[str, jax.Array], text: jax.Array, attend: Attend) -> tuple[jax.Array, list[jax.Array]]:
    """Logits [B, T, 256] of the next bytes of texts [B, T], and the layers' attention outputs."""
    x, attended = parameters["bytes"][text], []
    for n in range(LAYERS):
        layer = {name: array[n] for name, array in parameters.items() if name != "bytes"}
        y = normalised(x)
        q, k, v = ((y @ layer[name]).reshape(*y.shape[:2], -1, SIZE) for name in ("query", "key", "value"))
        attended.append(attend(rotary(normalised(q)), rotary(normalised(k)), v))
        x = x + attended[-1].reshape(*x.shape[:2], -1) @ layer["output"]
        x = x + jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"]
    return normalised(x) @ parameters["bytes"].T, attended


def exact(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention without a cache."""
    return flash_attention(q, k, v, causal=True)


def losses(made: jax.Array, text: jax.Array) -> jax.Array:
    """Nats of each byte after the first."""
    return -jnp.take_along_axis(jax.nn.log_softmax(made[:, :-1]), text[:, 1:, None], axis=-1)[..., 0]


@jax.jit
def step(state: tuple[Any, Any, Any], text: jax.Array, number: jax.Array, rate: jax.Array) -> tuple[Any, jax.Array]:
    """One step of Adam."""
    loss, gradient = jax.value_and_grad(lambda p: losses(logits(p, text, exact)[0], text).mean())(state[0])
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[1], gradient)
    second = jax.tree.map(lambda m, g: 0.98 * m + 0.02 * g * g, state[2], gradient)
    new = jax.tree.map(
        lambda p, m, v: p - rate * m / (1 - 0.9**number) / (jnp.sqrt(v / (1 - 0.98**number)) + 1e-8),
        state[0],
        first,
        second,
    )
    return (new, first, second), loss


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the pages for training, and sequences [N, CONTEXT] of every eighth page."""
    pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
    parts: list[list[bytes]] = [[], []]
    for number, page in enumerate(pages):
        parts[number % 8 == 0].append(page.read_bytes())
    train, held = (np.frombuffer(b"".join(part), np.uint8).astype(np.int32) for part in parts)
    starts = np.linspace(0, len(held) - CONTEXT, EVALUATED).astype(int)
    return train, np.stack([held[start : start + CONTEXT] for start in starts])


def train(text: np.ndarray, steps: int) -> dict[str, jax.Array]:
    """Trained parameters."""
    rng, parameters = np.random.default_rng(0), initial(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state, loss = (parameters, zeros, zeros), jnp.inf
    for number in range(1, steps + 1):
        starts = rng.integers(0, len(text) - CONTEXT, BATCH)
        batch = np.stack([text[start : start + CONTEXT] for start in starts])
        rate = 2e-3 * min(1, number / 50) * (0.55 + 0.45 * math.cos(math.pi * number / steps))
        state, loss = step(state, batch, jnp.float32(number), jnp.float32(rate))
    print(f"<!-- {steps} steps, last training loss {float(loss):.3f} -->", flush=True)
    return state[0]


@dataclasses.dataclass(frozen=True)
class Pages:
    """The pages of a batch of sequences of equal lengths, and what every operation is told of them."""

    count: int

    def zeros(self, *sizes: int, dtype: Any) -> jax.Array:
        """Empty pages."""
        return jnp.zeros((self.count * CONTEXT // PAGE, PAGE, *sizes), dtype)

    def batch(self) -> tuple[jax.Array, ...]:
        """Lengths, tables and starts."""
        tables = np.random.default_rng(1).permutation(self.count * CONTEXT // PAGE).reshape(self.count, -1)
        lengths, starts = np.full(self.count, CONTEXT), np.arange(self.count + 1) * CONTEXT
        return tuple(jnp.asarray(x, jnp.int32) for x in (lengths, tables, starts))


def rows(*arrays: jax.Array) -> Iterator[jax.Array]:
    """Arrays [B, T, ...] as [B * T, ...]."""
    return (x.reshape(-1, *x.shape[2:]) for x in arrays)


def sixteen_bits(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention over a bfloat16 cache."""
    pages, (queries, keys, values) = Pages(len(q)), rows(q, k, v)
    caches = (pages.zeros(KV_HEADS, SIZE, dtype=jnp.bfloat16) for _ in "kv")
    new = (x.astype(jnp.bfloat16) for x in (keys, values))
    return chunked_prefill_paged_decode(queries, *new, *caches, *pages.batch())[0].reshape(q.shape)


def eight_bits(dtype: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention over a cache of 8 bits, with one scale for keys and one for values."""
    pages, (queries, keys, values) = Pages(len(q)), rows(q, k, v)
    integer = jnp.issubdtype(dtype, jnp.integer)
    largest = 127.0 if integer else float(jnp.finfo(dtype).max)
    k_scale, v_scale = (float(jnp.abs(x).max()) / largest for x in (keys, values))
    scaled = keys / k_scale, values / v_scale
    new = (jnp.clip(jnp.round(x) if integer else x, -largest, largest).astype(dtype) for x in scaled)
    cache = pages.zeros(2 * KV_HEADS // 4, 4, 128, dtype=dtype)
    distribution = jnp.full(3, len(q)).at[:2].set(0)
    return ragged_page_attention_v3(
        queries, *new, cache, *pages.batch(), distribution, softmax_scale=None, k_scale=k_scale, v_scale=v_scale,
        kv_layout="interleaved",
    )[0].reshape(q.shape)  # fmt: skip


def codes(key_bits: int, value_bits: int, projections: int, draw: int, q: Any, k: Any, v: Any) -> jax.Array:
    """Attention over a TurboQuant cache."""
    pages, arrays = Pages(len(q)), rows(q, k, v)
    books = (jnp.asarray(turboquant.get_codebook(bits, SIZE).centroids) for bits in (key_bits, value_bits))
    rotation = turboquant.generate_rotation_matrix(2 * draw, SIZE)
    projection = turboquant.generate_projection_matrix(2 * draw + 1, projections, SIZE)
    cache = (
        pages.zeros(KV_HEADS, SIZE * key_bits // 8, dtype=jnp.uint8),
        pages.zeros(KV_HEADS, projections // 8, dtype=jnp.uint8),
        pages.zeros(KV_HEADS, 2, dtype=jnp.bfloat16),
        pages.zeros(KV_HEADS, SIZE * value_bits // 8, dtype=jnp.uint8),
        pages.zeros(KV_HEADS, dtype=jnp.bfloat16),
    )
    distribution = jnp.full(3, len(q)).at[:2].set(0)
    return ragged_page_attention_v3_turboquant(
        *arrays, *cache, *pages.batch(), distribution, rotation, projection, *books, softmax_scale=None
    )[0].reshape(q.shape)


def turboquant_bits(key_bits: int, value_bits: int, projections: int) -> float:
    """Bits per number, norms included; a key without signs has a norm that nothing reads."""
    return (SIZE * (key_bits + value_bits) + projections + 3 * 16) / (2 * SIZE)


def formats() -> Iterator[tuple[str, float, list[Attend]]]:
    """Name, bits per number, and the attention of each draw."""
    yield "bfloat16", 16, [sixteen_bits]
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
        yield dtype, 8, [functools.partial(eight_bits, jnp.dtype(dtype))]
    for key_bits, value_bits, projections in (
        (4, 4, 0), (4, 4, 64), (3, 4, 64), (3, 3, 0), (3, 3, 64), (2, 3, 64), (2, 2, 0), (2, 2, 64),
    ):  # fmt: skip
        signs = f", {projections} signs" if projections else ""
        name = f"TurboQuant, keys of {key_bits} bits{signs}, values of {value_bits}"
        draws = [functools.partial(codes, key_bits, value_bits, projections, draw) for draw in range(DRAWS)]
        yield name, turboquant_bits(key_bits, value_bits, projections), draws


def measured(parameters: dict[str, jax.Array], text: np.ndarray) -> Iterator[list[str]]:
    """The table's rows."""
    want, attended = logits(parameters, text, exact)
    distribution = jax.nn.log_softmax(want[:, :-1])
    yield ["float32, no cache", "32", f"{float(losses(want, text).mean()):.4f}", "", "", ""]
    for name, bits, draws in formats():
        found = []
        for attend in draws:
            got, outputs = logits(parameters, text, attend)
            other = jax.nn.log_softmax(got[:, :-1])
            errors = [jnp.linalg.norm(x - y) / jnp.linalg.norm(y) for x, y in zip(outputs, attended, strict=True)]
            found.append(
                [
                    float(losses(got, text).mean()),
                    float(jnp.mean(jnp.sum(jnp.exp(distribution) * (distribution - other), axis=-1))),
                    float(jnp.mean(got.argmax(-1) != want.argmax(-1))),
                    float(jnp.mean(jnp.stack(errors))),
                ]
            )
        loss, divergence, changed, error = np.mean(found, axis=0)
        spread = f" ± {np.std(found, axis=0)[0]:.4f}" if len(draws) > 1 else ""
        yield [name, f"{bits:.2f}", f"{loss:.4f}{spread}", f"{divergence:.5f}", f"{changed:.2%}", f"{error:.2%}"]


def main() -> None:
    """Trains and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of training")
    options = parser.parse_args()
    train_text, held = texts()
    parameters = train(train_text, 10 if options.quick else 400)
    shared.report.print_rows_as_measured(COLUMNS, measured(parameters, held))


if __name__ == "__main__":
    main()
