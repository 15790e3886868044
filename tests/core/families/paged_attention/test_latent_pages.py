"""Ranges of keys that paged kernels get for `mla_decode`."""

import jax.numpy as jnp
import pytest

from ejkernel.families.paged_attention.latent_pages import as_paged_record
from ejkernel.families.tiled_attention import TiledAttention

PADDING = -1


@pytest.mark.parametrize("window", [(9, 9), (9, 0), (0, None), (9, None)])
def test_key_ranges_never_start_after_their_end(window):
    """The second query is padding, the third row has no tokens, and the last position comes before all keys."""
    record = TiledAttention(
        query=jnp.ones((4, 1, 2, 8)),
        key=jnp.ones((4, 63, 1, 8)),
        value=jnp.ones((4, 63, 1, 8)),
        softmax_scale=1.0,
        q_segment_ids=jnp.array([[0], [PADDING], [0], [0]]),
        kv_segment_ids=jnp.where(jnp.arange(63) < jnp.array([[63], [56], [0], [5]]), 0, PADDING),
        q_positions=jnp.array([[62], [55], [30], [-20]]),
        sliding_window=window,
    )
    pages, _ = as_paged_record(record)
    assert pages.kv_starts is not None
    assert (pages.kv_starts <= pages.kv_lens).all()
    assert (pages.kv_starts >= 0).all()
    assert pages.kv_lens[1] == pages.kv_lens[2] == 0
    assert (pages.kv_starts[0], pages.kv_lens[0]) == (62 - window[0], 63)
