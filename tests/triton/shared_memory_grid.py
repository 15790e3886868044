"""Calls that cover what the paged kernel is compiled for: dtypes, sizes, heads, layouts of rows and pages."""

import itertools

import jax
import jax.numpy as jnp
from triton_chips import CHIPS

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.ops.device import DeviceInfo

SHAPE = jax.ShapeDtypeStruct
L40S = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA L40S", compute_capability=8.9)
DEVICES = {**CHIPS, "sm_89": L40S}
DTYPES = (
    (jnp.float32, jnp.float32),
    (jnp.float32, jnp.int8),
    (jnp.float16, jnp.int8),
    (jnp.bfloat16, jnp.float8_e4m3fn),
    (jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32),
)
SIZES = ((64, 64), (80, 128), (128, 128), (192, 128), (192, 192), (256, 256))
LATENT_SIZES = ((128, 64), (256, 32), (512, 64), (512, 128))
HEADS = (1, 12, 20, 71, 128)
"""Query heads of a KV head: powers of two, and numbers that do not divide a tile's rows."""
ROWS = (None, 3, 400)
"""Query rows of a sequence; None is decoding."""


def paged(rows, heads, sizes, dtypes, page=16, **fields):
    """A call of eight sequences, with keys and values in pages."""
    (dtype, cache), sequences = dtypes, 8
    return PagedAttention(
        query=SHAPE((sequences * (rows or 1), heads, sizes[0]), dtype),
        key_pages=SHAPE((64, page, 1, sizes[0]), cache),
        value_pages=SHAPE((64, page, 1, sizes[1]), cache),
        **_lengths(rows, sequences),
        kv_layout="pshd",
        **fields,
    )


def latent(rows, heads, sizes, dtypes, page=64, **fields):
    """The same of pages of latent vectors, of which `sizes` are those and their rotary columns."""
    (dtype, cache), sequences = dtypes, 8
    return PagedAttention(
        query=SHAPE((sequences * (rows or 1), heads, sum(sizes)), dtype),
        key_pages=SHAPE((64, page, sum(sizes)), cache),
        value_pages=None,
        **_lengths(rows, sequences),
        kv_layout="psd",
        latent=(sizes[0], sizes[0]),
        **fields,
    )


def every_term(heads, bias=(8, 32, 32), dtype=jnp.float32):
    """Fields of all terms of serving at once; `bias` is the shape of the biases of pairs, None for no biases."""
    return {
        "alibi_slopes": SHAPE((heads,), jnp.float32),
        "qq_bias": None if bias is None else SHAPE(bias, dtype),
        "softmax_aux": SHAPE((heads,), jnp.float32),
        "shared_prefix": SHAPE((), jnp.int32),
        "chunk_size": 64,
        "sliding_window": (100, 0),
        "logits_soft_cap": 30.0,
    }


def _lengths(rows, sequences):
    return {
        "block_tables": SHAPE((sequences, 8), jnp.int32),
        "kv_lens": SHAPE((sequences,), jnp.int32),
        "query_start": None if rows is None else SHAPE((sequences + 1,), jnp.int32),
        "softmax_scale": 0.1,
        "kv_heads": None,
    }


def every_paged_call():
    """All of them, by name."""
    for make, sizes in ((paged, SIZES), (latent, LATENT_SIZES)):
        for rows, heads, size, dtypes in itertools.product(ROWS, HEADS, sizes, DTYPES):
            name = f"{make.__name__} rows={rows} heads={heads} sizes={size} {[jnp.dtype(x).name for x in dtypes]}"
            yield name, make(rows, heads, size, dtypes)
            if rows is not None:
                yield f"{name}, every term", make(rows, heads, size, dtypes, **every_term(heads))
