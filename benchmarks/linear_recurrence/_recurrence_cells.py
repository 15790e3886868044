"""What the benchmark of linear recurrences measures: shapes, kinds, and how strong their gates are."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence

GATED = ("gla", "kda", "gate a head", "gated delta")
"""Kinds whose gates depend on the tokens."""

STRENGTHS = ("initial", "mild", "harsh")


def log_gates(kind: str, strength: str, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns log gates of a strength, [B, T, H, WIDTH].

    - initial: as a layer of the kind begins. Delta rules: -A dt, A uniform in 1 to 16 per head and dt log-uniform in
      1e-3 to 0.1, the initialisation of Mamba-2 (arXiv:2405.21060), which Gated DeltaNet (arXiv:2412.06464) and Kimi
      Linear (arXiv:2510.26692) have. Others: log_sigmoid(normal) / 16 (GLA, arXiv:2312.06635).
    - mild: log_sigmoid(normal) / 16, which is GLA's temperature.
    - harsh: log_sigmoid(normal).
    """
    logits = jax.nn.log_sigmoid(jax.random.normal(key, shape))
    if strength == "harsh":
        return logits
    if strength == "mild" or kind in ("gla", "gate a head"):
        return logits / 16
    rates, steps = jax.random.split(key)
    dt = jnp.exp(jax.random.uniform(steps, shape, minval=np.log(1e-3), maxval=np.log(0.1)))
    return -jax.random.uniform(rates, (shape[2], 1), minval=1.0, maxval=16.0) * dt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape; `kind` names the operation and its gates, `gates` their strength (see `log_gates`).

    Documents are sequences packed in one row, if any; `key_heads` those of queries and keys, if fewer than of values.
    """

    kind: str
    batch: int = 4
    length: int = 8192
    heads: int = 16
    key_heads: int | None = None
    keys: int = 128
    values: int = 128
    documents: int = 0
    gates: str = "initial"

    def __str__(self) -> str:
        packed = f", {self.documents} documents" if self.documents else ""
        strength = f", {self.gates} gates" if self.kind in GATED else ""
        heads = f"{self.key_heads}/{self.heads}" if self.key_heads else self.heads
        return f"{self.kind} B{self.batch} S{self.length} H{heads} K{self.keys} V{self.values}{packed}{strength}"

    @property
    def delta(self) -> bool:
        """Whether it is a delta rule."""
        return self.kind in ("gated delta", "kda")

    def record(self, dtype: Any = jnp.bfloat16) -> LinearRecurrence:
        """The call as its operation's `lower` makes it, with normal numbers."""
        keys = iter(jax.random.split(jax.random.key(0), 6))
        b, t, h, mamba = self.batch, self.length, self.heads, self.kind == "mamba-2"

        def normal(heads: int, size: int) -> jax.Array:
            return jax.random.normal(next(keys), (b, t, heads, size), jnp.float32).astype(dtype)

        query, key = (normal(1 if mamba else self.key_heads or h, self.keys) for _ in range(2))
        value, gate = normal(h, self.values), next(keys)
        fields: dict[str, Any] = {}
        if self.kind in ("gla", "kda"):
            fields["decay"] = log_gates(self.kind, self.gates, gate, (b, t, h, self.keys))
        elif self.kind in ("gate a head", "gated delta"):
            fields["decay"] = log_gates(self.kind, self.gates, gate, (b, t, h, 1))
        elif self.kind == "lightning":
            fields["decay"] = (-8 / h * 0.5 * jnp.arange(h, dtype=jnp.float32))[None, None, :, None]
        elif mamba:
            dt = 0.1 * jax.random.uniform(gate, (b, t, h))
            fields |= {"dt": dt, "decay": -dt[..., None], "skip": jnp.ones((1, 1, h))}
        if self.delta:
            # Layers of the delta rule normalise keys: longer ones would make the state grow.
            key = (key / jnp.linalg.norm(key.astype(jnp.float32), axis=-1, keepdims=True)).astype(dtype)
            fields["beta"] = jax.nn.sigmoid(jax.random.normal(next(keys), (b, t, h))).astype(dtype)
        if self.documents:
            # Of any length, as in training.
            cuts = np.sort(np.random.default_rng(0).integers(1, t, self.documents - 1))
            fields["cu_seqlens"] = jnp.asarray([0, *cuts, t], jnp.int32)
        scale = 1.0 if mamba else self.keys**-0.5
        return LinearRecurrence(query=query, key=key, value=value, softmax_scale=scale, **fields)

    @property
    def grad_fields(self) -> frozenset[str]:
        """What training needs the gradients of."""
        extra = {"gla": {"decay"}, "gate a head": {"decay"}, "mamba-2": {"decay", "dt", "skip"}}
        extra |= {"gated delta": {"decay", "beta"}, "kda": {"decay", "beta"}}
        return frozenset({"query", "key", "value"} | extra.get(self.kind, set()))


def strengths(kind: str) -> tuple[str, ...]:
    """The gates that a kind is measured with; GLA's initialisation is mild."""
    if kind in ("gated delta", "kda"):
        return STRENGTHS
    return ("initial", "harsh") if kind in GATED else ("initial",)


def head_cells() -> Iterator[Cell]:
    """Heads that share queries and keys, and more value channels than key channels."""
    yield Cell(kind="gated delta", heads=32)
    yield Cell(kind="gated delta", heads=32, key_heads=16)
    yield Cell(kind="gated delta", values=256)


def cells(quick: bool, long: bool) -> Iterator[Cell]:
    """What is measured; long rows and packed documents have twice as many tokens as the others."""
    kinds = ("gla", "lightning", "gate a head", "gated delta", "kda")
    if long:
        for kind in ("kda", "gated delta", "lightning", "gla", "gate a head"):
            yield Cell(kind=kind)
            yield Cell(kind=kind, batch=1, length=65536)
            yield Cell(kind=kind, batch=1, length=65536, documents=70)
        return
    for kind in kinds:
        for gates in strengths(kind):
            yield Cell(kind=kind, gates=gates)
    yield Cell(kind="mamba-2", batch=8, heads=64, values=64)
    if quick:
        return
    for kind in kinds:
        for gates in strengths(kind):
            yield Cell(kind=kind, batch=1, length=65536, gates=gates)
        yield Cell(kind=kind, batch=1, length=65536, documents=70)
    yield Cell(kind="mamba-2", batch=1, length=65536, heads=64, values=64)
    yield Cell(kind="mamba-2", batch=1, length=65536, heads=64, values=64, documents=70)
