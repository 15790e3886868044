"""Draws the sizes, dtypes and values that the programs of all operations use."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax.numpy as jnp
import numpy as np

Rng = np.random.Generator
Arrays = dict[str, Any]
DTYPES = (jnp.bfloat16, jnp.bfloat16, jnp.float16, jnp.float32)
HEAD_DIMS = (16, 32, 64, 64, 80, 96, 128, 128, 192, 256)
NARROW_HEAD_DIMS = (8, 16, 17, 32, 60, 64, 64, 128)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The arguments of one operation, all but the values.

    Attributes:
        values: Generator -> the arguments that are arrays, by name.
        options: All other arguments.
    """

    values: Callable[[Rng], Arrays]
    options: dict[str, Any]


def some(rng: Rng, chance: float) -> bool:
    """Returns whether something that has this chance happens."""
    return bool(rng.random() < chance)


def pick(rng: Rng, choices: Any) -> Any:
    """Returns one of several things."""
    return choices[int(rng.integers(len(choices)))]


def tokens(rng: Rng, most: int) -> int:
    """Returns a number of tokens: often one, or next to a power of two."""
    if some(rng, 0.1):
        return 1
    if some(rng, 0.4):
        return min(most, max(1, 2 ** int(rng.integers(3, most.bit_length())) + int(rng.integers(-1, 2))))
    return int(rng.integers(1, most + 1))


def dtype(rng: Rng) -> Any:
    """Returns the dtype of a call."""
    return np.dtype(pick(rng, DTYPES))


def heads(rng: Rng, most: int = 8) -> tuple[int, int]:
    """Returns query heads, and KV heads that divide them."""
    group = pick(rng, (1, 1, 2, 3, 4, 8))
    kv_heads = int(rng.integers(1, max(2, most // group + 1)))
    return group * kv_heads, kv_heads


def normal(rng: Rng, shape: tuple[int, ...], kind: Any = np.float32, factor: float = 1.0) -> np.ndarray:
    """Returns normal numbers, rounded to a dtype."""
    return (rng.standard_normal(shape, np.float32) * np.float32(factor)).astype(kind)


def uniform(rng: Rng, shape: tuple[int, ...], kind: Any = np.float32) -> np.ndarray:
    """Numbers from 0 to 1."""
    return rng.random(shape, np.float32).astype(kind)


def log_gates(rng: Rng, shape: tuple[int, ...]) -> np.ndarray:
    """Logarithms of decays: those of trained models, some that forget all, and some that forget nothing."""
    weak = -np.exp(rng.normal(-3, 1.5, shape))
    chance = rng.random(shape)
    return np.where(chance > 0.99, -200.0, np.where(chance < 0.02, 0.0, weak)).astype(np.float32)


def bounds(rng: Rng, sequences: int, total: int, whole: bool = False) -> np.ndarray:
    """Returns cumulative lengths of sequences, of which some are empty; tokens after the last belong to none, unless
    whole.
    """
    inner = np.sort(rng.integers(0, total + 1, sequences))
    if whole:
        inner[-1] = total
    return np.concatenate([[0], inner]).astype(np.int32)


def segment_ids(rng: Rng, rows: int, total: int) -> np.ndarray:
    """Segments in order and padding after them, in each row."""
    ids = np.empty((rows, total), np.int32)
    for row in ids:
        ends = bounds(rng, 3, total)[1:]
        row[:] = np.searchsorted(ends, np.arange(total), side="right")
        row[ends[-1] :] = -1
    return ids


def poison(x: np.ndarray, where: np.ndarray, value: float = np.nan) -> np.ndarray:
    """Returns an array with a value that spoils every sum, where no call may read; with `HARMLESS` inside of
    `harmless()`.
    """
    mask = where.reshape(*where.shape, *(1,) * (x.ndim - where.ndim))
    return np.where(mask, np.asarray(HARMLESS if _harmless.get() else value, x.dtype), x)


HARMLESS = 3.0
_harmless = contextvars.ContextVar("harmless", default=False)


@contextlib.contextmanager
def harmless() -> Generator[None]:
    """Within it, nothing is poisoned: a reference may multiply with 0 what a call does not read."""
    token = _harmless.set(True)
    try:
        yield
    finally:
        _harmless.reset(token)


def window(rng: Rng, most: int) -> Any:
    """Returns a sliding window: none, one number, or two sides."""
    if some(rng, 0.5):
        return None
    sides = [None if some(rng, 0.3) else int(rng.integers(0, most + 1)) for _ in range(2)]
    return int(rng.integers(1, most + 1)) if some(rng, 0.3) else tuple(sides)


def given(**arguments: Any) -> dict[str, Any]:
    """Returns those arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}
