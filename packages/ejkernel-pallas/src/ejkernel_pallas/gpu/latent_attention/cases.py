"""Conformance cases of the latent kernel, for 512 + 64 columns: split items, small pages, and a partial tile of
heads.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import mla_decode as dense
from ejkernel.modules.operations.cases import paged_latent as paged
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows, tagged_case
from ejkernel.modules.operations.mla_decode import MLADecodeArguments
from ejkernel.modules.operations.multi_latent_ragged_page_attention import MultiLatentRaggedPageAttentionArguments
from ejkernel.modules.operations.multi_latent_ragged_page_attention_v2 import (
    MultiLatentRaggedPageAttentionV2Arguments,
)
from ejkernel.ops.model import Case

# Small, since the reference gathers a row's keys for every head.
MIXED_BATCH_PROBLEM = PagedSizes(
    kv_lens=(137, 1, 20), q_lens=(2, 1, 1), query_rows=5, h=64, s=64, v=512, d=64, dtype=jnp.bfloat16
)
SMALL_PAGES_PROBLEM = PagedSizes(
    kv_lens=(70, 33, 7), q_lens=(1, 2, 1), query_rows=5, h=72, s=16, v=512, d=64, dtype=jnp.float16
)
NEW_KEY_FIELDS = ("latent", "new_keys", "num_seqs")


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    mixed_case: Row[PagedSizes] = (
        "512 + 64, mixed",
        MIXED_BATCH_PROBLEM,
        lambda key: {"return_lse": True},
        NEW_KEY_FIELDS,
        (),
    )
    options = {"v_scale": 0.5, "sliding_window": 40}
    small_page_case: Row[PagedSizes] = (
        "512 + 64, small pages, window",
        SMALL_PAGES_PROBLEM,
        lambda key: options,
        ("value_scale", "sliding_window"),
        (),
    )
    return {
        "multi_latent_ragged_page_attention": make_cases_of_rows(
            MultiLatentRaggedPageAttentionArguments, paged.make_base_inputs, (mixed_case, small_page_case)
        ),
        "multi_latent_ragged_page_attention_v2": make_cases_of_rows(
            MultiLatentRaggedPageAttentionV2Arguments, paged.make_base_inputs, (small_page_case,)
        ),
        "mla_decode": (
            _dense_cache_case(values_are_view_of_keys=True),
            _dense_cache_case(values_are_view_of_keys=False),
        ),
    }


def _dense_cache_case(values_are_view_of_keys: bool) -> Case:
    lengths = (136, 0, 131)
    sizes = dense.DecodeSizes(
        3, 136, 64, 1, 512, n=16, rope=64, has_joint_cache=values_are_view_of_keys, lengths=lengths, dtype=jnp.bfloat16
    )

    def make_arguments(key: jax.Array) -> MLADecodeArguments:
        inputs: dict[str, Any] = {**dense.make_arrays(key, sizes), "return_lse": True}
        inputs |= {"sliding_window": 70} if values_are_view_of_keys else {}
        return MLADecodeArguments(**inputs)

    fields = (
        "q_segment_ids",
        "kv_segment_ids",
        *(("q_positions", "sliding_window") if values_are_view_of_keys else ()),
    )
    return tagged_case(
        f"512 + 64, {'one cache, window' if values_are_view_of_keys else 'two caches'}", make_arguments, fields, ()
    )
