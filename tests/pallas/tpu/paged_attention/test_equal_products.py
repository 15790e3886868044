"""Products of equal sizes in a `batch_invariant` block: rows over pages keep their bits, and faults are found."""

import dataclasses

import jax
import numpy as np
import pytest
from tpu_invariance import assert_finds_products_that_follow
from tpu_paged_records import lowered
from tpu_records import interpreted

from ejkernel.families.paged_attention import reference
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel.ops.device import current_device
from ejkernel_pallas.tpu.paged_attention import config
from ejkernel_pallas.tpu.paged_attention.forward import forward

UNIFIED = "unified_attention"
SIZES = PagedSizes(kv_lens=(40, 300), q_lens=(1, 9), h=4, g=2, d=32, v=32, s=16)
SIZES_THAT_CHANGE = {
    "batch": lambda record: record.kv_lens.shape[0],
    "padding": lambda record: record.block_tables.shape[1],
    "chunking": lambda record: record.query.shape[0],
    "pages": lambda record: record.key_pages.shape[0],
}
"""What the rule of a claim must not read, by the name of the claim."""


@pytest.mark.parametrize("name", SIZES_THAT_CHANGE)
def test_the_suite_finds_products_that_follow_the_call(name, monkeypatch):
    call = UNIFIED, paged_inputs.packed_inputs, SIZES
    assert_finds_products_that_follow(SIZES_THAT_CHANGE[name], name, "mosaic_tpu", call, output, monkeypatch)


def output(record, keys=512):
    """Output and lse in a block, with products of so many keys."""
    tiles = dataclasses.replace(config.batch_invariant(record, current_device(), "forward"), product_keys=keys)
    with interpreted():
        return [np.asarray(x) for x in jax.jit(lambda record: forward(record, tiles)[0])(record)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoded_token_has_the_bits_of_its_prompt(dtype):
    """The prompt fills several products of a tile; the table of the decoded token has room for more blocks."""
    sizes = dataclasses.replace(SIZES, kv_lens=(5, 300), q_lens=(3, 200), dtype=dtype)
    prompts = lowered(UNIFIED, paged_inputs.packed_inputs, sizes)
    tables = np.pad(prompts.block_tables[1:], ((0, 0), (0, 600)), constant_values=-1)
    decoded = dataclasses.replace(
        prompts, query=prompts.query[-1:], query_start=None, kv_lens=prompts.kv_lens[1:], block_tables=tables
    )
    together, alone = output(prompts), output(decoded)
    for x, y, want in zip(together, alone, reference(prompts)[0], strict=True):
        assert (x[-1:] == y).all()
        np.testing.assert_allclose(x.astype("float32"), np.asarray(want, "float32"), atol=3e-2)
