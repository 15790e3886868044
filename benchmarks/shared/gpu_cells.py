"""Shapes and masks of flash attention that are measured on GPUs."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOTAL_TOKENS = 32768
BLOCK = 128
"""Queries and keys of a block of a pattern."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape and mask; the tokens are 32768 in all.

    A pattern is (local, first, stride) in blocks of 128 queries and keys: the blocks so near, the first so many, and
    those whose distance is a multiple of the stride attend.
    """

    length: int = 8192
    heads: int = 16
    kv_heads: int = 16
    size: int = 128
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    num_packed: int | None = None
    dropout: float = 0.0
    sinks: bool = False
    pattern: tuple[int, int, int] | None = None

    @property
    def batch(self) -> int:
        return TOTAL_TOKENS // self.length

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        mask += f", window {self.window}" if self.window else ""
        mask += f", cap {self.soft_cap:g}" if self.soft_cap else ""
        mask += f", {self.num_packed} packed" if self.num_packed else ""
        mask += f", dropout {self.dropout:g}" if self.dropout else ""
        mask += ", sinks" if self.sinks else ""
        mask += f", {self.block_density:.0%} of blocks" if self.pattern else ""
        return f"B{self.batch} S{self.length} H{self.heads}/{self.kv_heads} D{self.size} {mask}"

    @functools.cached_property
    def cu_seqlens(self) -> np.ndarray | None:
        """Cumulative lengths of packed sequences, uneven."""
        if self.num_packed is None:
            return None
        inner = np.random.default_rng(0).choice(np.arange(1, self.length), self.num_packed - 1, replace=False)
        return np.concatenate([[0], np.sort(inner), [self.length]]).astype(np.int32)

    def attends(self, query: Any, key: Any) -> Any:
        """Whether the pattern lets a block of queries see a block of keys, by their numbers."""
        assert self.pattern is not None
        local, first, stride = self.pattern
        return (query - key < local) | (key < first) | ((query - key) % stride == 0)

    @property
    def block_density(self) -> float:
        """How many of the causal blocks the pattern lets attend."""
        return float(self._attending_blocks().sum() / np.tri(self.length // BLOCK).sum())

    def _attending_blocks(self) -> np.ndarray:
        number = np.arange(self.length // BLOCK)
        return np.tril(self.attends(number[:, None], number))

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `flash_attention`."""
        window = {"sliding_window": (self.window - 1, 0)} if self.window else {}
        dropout = {"dropout_prob": self.dropout, "dropout_seed": 1} if self.dropout else {}
        return {"causal": self.causal, "logits_soft_cap": self.soft_cap, **window, **dropout}

    @property
    def forward_flops(self) -> float:
        """Returns the floating-point operations of a forward pass."""
        lengths = [self.length] if self.cu_seqlens is None else np.diff(self.cu_seqlens)
        seen = sum(self._num_attending_pairs(int(n)) for n in lengths)
        return 4.0 * self.batch * self.heads * self.size * seen

    def _num_attending_pairs(self, n: int) -> int:
        if self.pattern is not None:  # half of a block on the diagonal is hidden
            blocks = self._attending_blocks()
            return int(blocks.sum()) * BLOCK**2 - int(blocks.trace()) * (BLOCK**2 - BLOCK) // 2
        if not self.causal:
            return n * n
        window = min(self.window or n, n)
        return window * (window + 1) // 2 + (n - window) * window

    def inputs(self) -> tuple[jax.Array, ...]:
        """Query, key, value, the output's cotangent and, of packed sequences, the cumulative lengths."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.length, h, self.size) for h in heads]
        cu_seqlens = () if self.cu_seqlens is None else (jnp.asarray(self.cu_seqlens),)
        return *(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)), *cu_seqlens


def documented_cells(quick: bool) -> Iterator[Cell]:
    """The shapes that the documentation speaks of."""
    yield Cell(causal=False)
    yield Cell()
    if quick:
        return
    yield Cell(heads=32, kv_heads=8)
    yield Cell(window=1024)
    yield Cell(soft_cap=30.0)
    yield Cell(dropout=0.1)
    yield Cell(sinks=True)
    yield Cell(length=32768)
    yield Cell(length=32768, num_packed=1)
    yield Cell(length=32768, num_packed=22)
    yield Cell(length=32768, window=1024)
    yield Cell(length=2048)
    for causal in (False, True):
        yield Cell(heads=32, kv_heads=32, size=64, causal=causal)
        yield Cell(heads=32, kv_heads=32, size=64, causal=causal, soft_cap=30.0)
        yield Cell(heads=8, kv_heads=8, size=256, causal=causal)


def grid() -> Iterator[Cell]:
    """Head sizes by lengths by masks, each with as many KV heads as heads and with a quarter of them.

    Packed sequences have the length in the mean, and lie in one row.
    """
    masks: tuple[dict[str, Any], ...] = ({"causal": False}, {}, {"window": 1024}, {"soft_cap": 30.0})
    for size, length in itertools.product((64, 128, 256), (2048, 8192, 32768)):
        packed = {"length": TOTAL_TOKENS, "num_packed": max(2, TOTAL_TOKENS // length)}
        for mask in (*({"length": length} | mask for mask in masks), packed):
            for heads, kv_heads in ((2048 // size, 2048 // size), (32, 8)):
                yield Cell(heads=heads, kv_heads=kv_heads, size=size, **mask)
