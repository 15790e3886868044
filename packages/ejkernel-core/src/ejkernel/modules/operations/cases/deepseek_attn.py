"""Inputs for `deepseek_attn`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import flash_mla, lightning_indexer
from ejkernel.modules.operations.cases.flash_mla import LatentSizes
from ejkernel.modules.operations.cases.lightning_indexer import IndexerSizes
from ejkernel.modules.operations.cases.tables import (
    ROW_FUNCTIONS_TAG,
    Row,
    fill_arguments,
    make_cases_of_rows,
    normal_like,
)
from ejkernel.ops.model import Case

_MODEL_SIZES = LatentSizes(t=8192, h=128, g=128, r=512, n=128, rope=64, v=128, dtype=jnp.bfloat16)
_SMALL_MODEL_SIZES = LatentSizes(t=512, h=8, g=8, r=64, n=32, rope=16, v=32)
_CASE_TABLE: tuple[Row[LatentSizes], ...] = (
    ("rotary", LatentSizes(b=2, t=23), lambda k: {"index_topk": 6}, (), ()),
    (
        "no rotary, not causal",
        LatentSizes(position_form="a", t=17),
        lambda k: {"index_topk": 5, "causal": False},
        (),
        (),
    ),
    (
        "shared rotary, bfloat16",
        LatentSizes(position_form="c", dtype=jnp.bfloat16),
        lambda k: {"index_topk": 9},
        (),
        (),
    ),
    ("fewer tokens than selected", LatentSizes(t=5, g=1), lambda k: {"index_topk": 8}, (), ("awkward",)),
    ("model", _MODEL_SIZES, lambda k: {"index_topk": 2048}, (), ("bench",)),
    ("small model", _SMALL_MODEL_SIZES, lambda k: {"index_topk": 128}, (), ("bench_cpu",)),
    (
        "long heads",
        LatentSizes(b=3, t=9, h=4, g=2, r=64, n=64, rope=16, v=32),
        lambda k: {"index_topk": 6},
        (),
        (ROW_FUNCTIONS_TAG,),
    ),
)


def make_arrays(key: jax.Array, sizes: LatentSizes) -> dict[str, Any]:
    """Returns the arrays of `flash_mla`'s cases, and an indexer's whose scores are exact in any order of summation."""
    latent_key, index_key = jax.random.split(key)
    index = lightning_indexer.make_arrays(index_key, IndexerSizes(b=sizes.b, t=sizes.t, s=sizes.t, dtype=sizes.dtype))
    names = {"query": "query_index", "key": "key_index", "weights": "index_weights"}
    return {
        **flash_mla.make_arrays(latent_key, sizes),
        **{name: index[field] for field, name in names.items()},
        "index_softmax_scale": index["softmax_scale"],
    }


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_arrays, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal numbers, and weights that keep projections at size 1."""
    factor = args.key_value.shape[-1] ** -0.5
    return fill_arguments(args, key, lambda name, x, key: normal_like(key, x, factor if name.startswith("w_") else 1.0))
