"""A shared prefix of 8-bit pages, copied in the query's dtype; interpreted, run by `test_paged_attention.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.paged_attention import PagedAttention, reference
from ejkernel.ops.device import current_device
from ejkernel_triton.paged_attention import config, plan
from ejkernel_triton.paged_attention.forward import forward

NEW, PAGE, PAGES, HEADS, KV_HEADS, SIZE = (3, 1, 2), 4, 120, 4, 2, 24
PREFIX = 18


def record_of(layout, dtype):
    """Three sequences with a prefix that ends inside of a page, one of whose pages is missing."""
    rng, rows = np.random.default_rng(0), sum(NEW)
    shapes = {"pshd": (PAGES, PAGE, KV_HEADS, SIZE), "hpsd": (KV_HEADS, PAGES, PAGE, SIZE)}
    shape = shapes.get(layout, (PAGES, PAGE, KV_HEADS, 2, 128))

    def pages():
        if dtype == jnp.int8:
            return jnp.asarray(rng.integers(-3, 4, shape), jnp.int8)
        return jnp.asarray(rng.normal(size=shape), dtype)

    tables = rng.permutation(PAGES)[: 3 * 13].reshape(3, 13).astype(np.int32)
    tables[0, 2], tables[0, 9:] = -1, PAGES + 5
    return PagedAttention(
        query=jnp.asarray(rng.normal(size=(rows, HEADS, SIZE)), jnp.bfloat16),
        key_pages=pages(),
        value_pages=pages() if layout in shapes else None,
        block_tables=jnp.asarray(tables),
        kv_lens=jnp.array([30, 19, 41], jnp.int32),
        query_start=jnp.asarray(np.cumsum((0, *NEW)), jnp.int32),
        softmax_scale=0.2,
        kv_layout=layout,
        kv_heads=None,
        sliding_window=(25, 0) if layout == "hpsd" else None,
        shared_prefix=jnp.int32(PREFIX),
    )


def main():
    for layout, dtype in (("pshd", jnp.float8_e4m3fn), ("hpsd", jnp.int8), ("pshcd", jnp.float8_e5m2)):
        record = record_of(layout, dtype)
        assert plan.should_copy_prefix(record), (layout, dtype)
        assert not plan.should_copy_prefix(dataclasses.replace(record, block_tables=record.block_tables.repeat(2, 1)))
        chosen = config.heuristic(record, current_device(), "forward")
        output, lse, *_ = jax.jit(lambda record, chosen=chosen: forward(record, chosen)[0])(record)
        wide = dataclasses.replace(record, query=record.query.astype(jnp.float32))
        (expected, expected_lse, *_), _ = reference(wide)
        np.testing.assert_allclose(np.asarray(output, np.float32), expected, atol=2e-2)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-2)


if __name__ == "__main__":
    main()
