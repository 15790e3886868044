"""What a tiled-attention kernel is compiled for: all about a record that is neither an array nor a tile size."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel.planning import dropout

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
SETTLED = 80.0
"""Exponent, of two, up to which weights may be relative to 1."""
LOWEST = -1e38
"""Where running maxima start: below every score, and finite, so that no difference of two of them is NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Constants of a kernel.

    Attributes:
        batch: Batch rows.
        queries: Queries of a row.
        keys: Keys of a row.
        heads: Query heads.
        kv_heads: KV heads.
        size: Head dimension of queries and keys.
        value_size: Head dimension of values.
        dtype: Of queries, keys and values.
        scale: Factor on the raw scores.
        cap: Soft cap of the scores, or None.
        left: Band: `-left <= k - q`; None is open.
        right: Band: `k - q <= right`; None is open.
        segments: Whether there are segment ids.
        pattern: Whether a pattern says which pairs attend, so that blocks come from lists.
        sinks: Whether there are sinks.
        threshold: Dropout drops where a row's number times a column's is below; 0 without dropout.
        kept: Factor on the weights that dropout keeps.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    dtype: Any
    scale: float
    cap: float | None
    left: int | None
    right: int | None
    segments: bool
    pattern: bool
    sinks: bool
    threshold: int
    kept: float

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def bounded(self) -> bool:
        """Whether some pair of indices may not attend."""
        return self.left is not None or self.right is not None or self.segments or self.pattern

    @property
    def drops(self) -> bool:
        """Whether weights are dropped."""
        return self.threshold > 0

    @property
    def opens_masked(self) -> bool:
        """Whether tiles before the full ones can be cut, too."""
        return not self.pattern and (self.left is not None or self.segments)

    @property
    def takes_turns(self) -> bool:
        """Whether warpgroups issue products in turns.

        On an H200 it helps where a score costs more to exponentiate than its products take, or they are large; with 128
        they fall into turns by themselves, and waiting for them costs 2%.
        """
        return self.value_size != 128 or self.cap is not None

    @property
    def fades_seldom(self) -> bool:
        """Whether what was summed up is scaled only where a row's maximum has grown by much.

        On an H200 it makes head size 256 up to 16% faster, whose sums are twice as large as its scores and weights; it
        costs others 1% to 3%, as the branch takes longer than what it saves.
        """
        return self.value_size > 128

    @property
    def settled(self) -> bool:
        """Whether weights are relative to 1 instead of a row's largest, which is then not looked for.

        Scores with a soft cap are powers of two that are known to be between this and its inverse; bfloat16 has as many
        digits for them as for others, and float32 room for their sums.
        """
        return self.cap is not None and self.exponent <= SETTLED and self.dtype == jnp.bfloat16

    @property
    def caps_in_weights(self) -> bool:
        """Whether `capped_weights` makes weights of raw products where no pair is masked.

        With head size 256, where products take four times as long as with 64, a soft cap costs 3% without it.
        """
        return self.settled and self.size <= 128

    @property
    def inner(self) -> float:
        """Factor that makes a raw product what `exponent` takes: the soft cap's argument, or the product itself."""
        return 1.0 if self.cap is None else self.scale / self.cap

    @property
    def exponent(self) -> float:
        """Factor that makes a power of two of a score: of a raw product, or of the soft cap's tanh."""
        return (self.scale if self.cap is None else self.cap) * LOG2E


def make_spec(record: TiledAttention) -> Spec:
    """The constants of a record's kernels."""
    (b, t, h, d), (_, s, hk, _) = record.query.shape, record.key.shape
    left, right = band(record)
    return Spec(
        batch=b,
        queries=t,
        keys=s,
        heads=h,
        kv_heads=hk,
        size=d,
        value_size=record.value.shape[3],
        dtype=jnp.dtype(record.query.dtype),
        scale=record.softmax_scale,
        cap=record.logits_soft_cap,
        left=left,
        right=right,
        segments=record.q_segment_ids is not None and record.kv_segment_ids is not None,
        pattern=record.pattern is not None,
        sinks=record.softmax_aux is not None,
        threshold=dropout.threshold(record.dropout_prob),
        kept=1.0 / (1.0 - record.dropout_prob),
    )
