"""The compile-time constants of the indexer's kernels."""

import dataclasses

import jax.numpy as jnp

from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.lightning_indexer.plan import queries_per_chunk
from ejkernel_triton.sizes import pad_to_dot_size, pad_to_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Constants of the kernels; the letters are those of the record.

    Attributes:
        T: Queries.
        S: Keys.
        H: Heads.
        D: Channels.
        K: Keys that are selected per query.
        BH: Heads, padded to a power of two.
        BD: Channels, padded to a size that `tl.dot` supports.
        BK: Selected keys, padded to a power of two.
        PLACE_BITS: Bits of a place among them: log2(BK).
        CHUNK: Queries whose scores are in memory at a time.
        WEIGHT_FACTOR: Magnitude of the factor on the products, by which the weights are multiplied instead.
        NEGATE_QUERIES: Whether that factor is negative.
        HAS_KEY_SCALES: Whether products are multiplied by a factor of each key.
        RECTIFY: Whether negative products count as 0.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
    """

    T: int
    S: int
    H: int
    D: int
    K: int
    BH: int
    BD: int
    BK: int
    PLACE_BITS: int
    CHUNK: int
    WEIGHT_FACTOR: float
    NEGATE_QUERIES: bool
    HAS_KEY_SCALES: bool
    RECTIFY: bool
    PRECISION: str
    WIDEN_TO_FLOAT32: bool


def make_spec(record: LightningIndexer) -> IndexerSpec:
    """Returns the constants of a record's kernels on the device in use."""
    _, tokens, heads, channels = record.query.shape
    return IndexerSpec(
        T=tokens,
        S=record.key.shape[1],
        H=heads,
        D=channels,
        K=record.top_k,
        BH=pad_to_power_of_two(heads),
        BD=pad_to_dot_size(channels),
        BK=pad_to_power_of_two(record.top_k),
        PLACE_BITS=pad_to_power_of_two(record.top_k).bit_length() - 1,
        CHUNK=queries_per_chunk(record),
        WEIGHT_FACTOR=abs(record.softmax_scale),
        NEGATE_QUERIES=record.softmax_scale < 0,
        HAS_KEY_SCALES=record.key_scales is not None,
        RECTIFY=record.rectify,
        PRECISION="tf32x3" if current_device().vendor == "nvidia" else "ieee",
        WIDEN_TO_FLOAT32=is_interpreting() and record.query.dtype == jnp.bfloat16,
    )
