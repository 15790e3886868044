"""Records of decode steps of native sparse attention, small and awkward."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ejkernel.families.selected_attention import SelectedAttention


def record(shape=(2, 1, 8, 4, 128), dtype="bfloat16", blocks=(64, 4), slots=64, entries=6, pages=True, **fields):
    """A record of (B, T, H, Hk, D) whose queries list `blocks[1]` random blocks of `blocks[0]` keys, of which those
    after the query are not in the list; in pages of `slots` tokens, of which one is missing, or dense.
    """
    (b, t, h, hk, d), (size, count), keys = shape, blocks, slots * entries
    random = np.random.default_rng(3)

    def normal(*size):
        return jnp.asarray(random.normal(size=size), dtype)

    cache = (b * entries + 1, slots, hk, d) if pages else (b, keys, hk, d)
    positions = random.integers(keys // 2, keys - t + 1, (b, 1)) + np.arange(t)
    order = random.random((b, t, hk, max(count, keys // size))).argsort(axis=-1)[..., :count]
    order = np.where(order * size <= positions[:, :, None, None], order, -1)
    tables = random.permutation(b * entries).reshape(b, entries)
    tables[:1, 1:2] = b * entries + 1
    return SelectedAttention(
        query=normal(b, t, h, d),
        key=normal(*cache),
        value=normal(*cache),
        block_indices=jnp.asarray(order, jnp.int32),
        softmax_scale=d**-0.5,
        block_size=size,
        q_positions=jnp.asarray(positions, jnp.int32),
        q_segment_ids=jnp.zeros((b, t), jnp.int32),
        **({"block_tables": jnp.asarray(tables, jnp.int32)} if pages else {}),
        **fields,
    )


def with_empty_list(given):
    """The record with a query whose lists are empty."""
    return dataclasses.replace(given, block_indices=given.block_indices.at[0, 0].set(-1))


def with_nan(given):
    """The record with NaN in what no query may read: keys after the last query or of padding, and a page of none."""
    keep = jnp.arange(given.key.shape[0])[:, None] < given.key.shape[0] - (given.block_tables is not None)
    if given.block_tables is None:
        keep = jnp.arange(given.key.shape[1]) <= jnp.max(given.q_positions, axis=1)[:, None]
    keep = keep[..., None, None]
    return dataclasses.replace(
        given, key=jnp.where(keep, given.key, jnp.nan), value=jnp.where(keep, given.value, jnp.nan)
    )
