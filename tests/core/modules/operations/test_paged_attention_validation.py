"""Wrong calls of the operations over paged caches: a ValueError names the argument, what it got and what it wants."""

import re

import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from paged_calls import DECODING, OPS, Paged

import ejkernel
import ejkernel.modules as ej
from ejkernel.modules.operations import configs

MIXED = paged_loop.make((7, 3), (5, 3))
DECODE = paged_loop.make((7, 3), (1, 1))
CHUNK = paged_loop.make((7,), (5,))
ARRAYS = {
    op: paged_calls.arguments(op, Paged(DECODE if op in DECODING else CHUNK if "prefill_page" in op else MIXED))
    for op in OPS
}


def refused(op, changes, said, **keywords):
    arrays = list(ARRAYS[op])
    for position, array in changes.items():
        arrays[position] = array(arrays[position]) if callable(array) else array
    if op == "decode_attention":
        keywords = {"page_size": 4, **keywords}
    keywords = {**paged_calls.layout(op), **keywords}
    with pytest.raises(ValueError, match=".*".join(map(re.escape, said))):
        getattr(ej, op)(*arrays, **keywords)


# operation, what differs by position, what the message holds
MISTAKES = {
    "query without heads": ("page_attention", {0: lambda x: x[0]}, ["query", "(4, 8)", "[N, H, D]"]),
    "query of two tokens": ("page_attention", {0: lambda x: jnp.stack((x, x), 1)}, ["query", "[N, 1=1, H, D]"]),
    "query None": ("page_attention", {0: None}, ["query", "None", "[N, H, D]"]),
    "integer query": ("page_attention", {0: lambda x: x.astype(int)}, ["query", "int32", "floating"]),
    "cache of another head size": ("page_attention", {1: lambda x: x[..., :4]}, ["key_cache", "D=8", "kv_layout"]),
    "value cache of other pages": ("page_attention", {2: lambda x: x[1:]}, ["value_cache", "P=5", "Hk=2"]),
    "value cache of another dtype": (
        "unified_attention",
        {2: lambda x: x.astype(jnp.bfloat16)},
        ["value_cache", "bfloat16", "key_cache's float32"],
    ),
    "heads that do not divide": (
        "unified_attention",
        {0: lambda x: x[:, :3]},
        ["key_cache", "2 heads", "divisor of the 3 of queries"],
    ),
    "floating lengths": ("page_attention", {3: lambda x: x * 1.0}, ["kv_lens", "float32", "integer"]),
    "lengths of another batch": ("page_attention", {3: lambda x: x[:1]}, ["kv_lens", "(1,)", "[N=2]"]),
    "flat tables": ("page_attention", {4: lambda x: x.ravel()}, ["block_tables", "(4,)", "[N=2, max_blocks]"]),
    "starts without the end": ("unified_attention", {5: lambda x: x[:2]}, ["query_start_loc", "(2,)", "[N+1=3]"]),
    "an odd number of rows": ("ragged_page_attention_v2", {1: lambda x: x[:, :, 1:]}, ["kv_pages", "2 * Hk"]),
    "two numbers of sequences": ("ragged_page_attention_v2", {5: np.zeros(2, np.int32)}, ["num_seqs", "[2]", "[1]"]),
    "a floating number": ("ragged_page_attention_v2", {5: jnp.float32(1)}, ["num_seqs", "float32"]),
    "keys of another dtype": (
        "ragged_page_attention_v3",
        {1: lambda x: x.astype(jnp.bfloat16)},
        ["keys", "kv_cache's"],
    ),
    "keys of fewer rows": ("ragged_page_attention_v3", {1: lambda x: x[1:]}, ["keys", "(7, 2, 8)", "T=8"]),
    "a cache of other lanes": (
        "ragged_page_attention_v3",
        {3: lambda x: x[..., :64]},
        ["kv_cache", "(5, 4, 4, 1, 64)", "[P, S, 4, 1, 128] (interleaved)"],
    ),
    "tables that do not divide": ("ragged_page_attention_v3", {5: lambda x: x[1:]}, ["block_tables", "[N * K]", "N=2"]),
    "distribution of two": ("ragged_page_attention_v3", {7: lambda x: x[1:]}, ["distribution", "(2,)", "[3=3]"]),
    "new values of other heads": ("chunked_prefill_paged_decode", {2: lambda x: x[:, :1]}, ["values", "Hk=2"]),
    "two lengths": ("prefill_page_attention", {3: lambda x: jnp.stack((x, x))}, ["kv_lens", "[1=1]"]),
    "ends of another batch": ("ragged_decode_attention", {4: lambda x: x[:1]}, ["sequence_end", "(1,)", "[B=2]"]),
    "keys of another batch": ("ragged_decode_attention", {1: lambda x: x[:1]}, ["key", "P=2"]),
    "rows that no page size divides": ("decode_attention", {1: lambda x: x[1:], 2: lambda x: x[1:]}, ["page_size=4"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_arrays_are_refused_by_name(name):
    refused(*MISTAKES[name])


# operation, keywords, what the message holds
VALUES = {
    "no window": ("page_attention", {"sliding_window": 0}, ["sliding_window", "int 0", "int >= 1"]),
    "cap of zero": ("unified_attention", {"logits_soft_cap": 0.0}, ["logits_soft_cap", "> 0"]),
    "a mask that is attended to": ("page_attention", {"mask_value": -5.0}, ["mask_value", "-5.0", "-10000"]),
    "mode of no TPU": ("page_attention", {"megacore_mode": "both"}, ["megacore_mode", "'batch', 'kv_head'"]),
    "scale of a string": ("decode_attention", {"softmax_scale": "1"}, ["softmax_scale", "str"]),
    "pages of no token": ("decode_attention", {"page_size": 0}, ["page_size", "0"]),
    "scale of zero": ("ragged_page_attention_v3", {"k_scale": 0.0}, ["k_scale", "> 0"]),
    "lanes without head size 64": ("ragged_page_attention_v3", {"kv_layout": "lanes"}, ["kv_cache", "head size of 64"]),
    "an int for dense keys": ("ragged_decode_attention", {"sliding_window": 4}, ["sliding_window", "(left, right)"]),
    "dtype of no float": ("ragged_page_attention_v2", {"compute_dtype": jnp.int8}, ["compute_dtype", "floating"]),
    "causal by chance": ("unified_attention", {"causal": 1}, ["causal", "True or False"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_wrong_values_are_refused_by_name(name):
    op, keywords, said = VALUES[name]
    refused(op, {}, said, **keywords)


@pytest.mark.parametrize("name", ["softmax_aux", "alibi_slopes", "qq_bias"])
def test_wrong_optional_arrays_are_refused_by_name(name):
    position = {"alibi_slopes": 0, "qq_bias": 1, "softmax_aux": 2}[name]
    wrong = jnp.ones(2) if name == "alibi_slopes" else jnp.ones((2, 3))
    optional = [None] * position + [wrong]
    with pytest.raises(ValueError, match=f"^{name}: got shape"):
        ej.unified_attention(*ARRAYS["unified_attention"], *optional)


def test_tuning_arguments_set_fields_of_the_configuration():
    cfg = configs.PageAttentionConfig(kv_blocksize=8)
    args, layout = ARRAYS["page_attention"], paged_calls.layout("page_attention")
    tuning = {"num_splits": 2, "pages_per_compute_block": 3}
    said = str(ejkernel.explain(ej.page_attention, *args, **tuning, cfg=cfg, **layout).forward)
    assert "override: cfg= gives" in said
    for part in ("kv_blocksize=8", "num_splits=2", "pages_per_compute_block=3"):
        assert part in said
    with pytest.raises(ValueError, match="num_splits: got 4, wants cfg's 2"):
        ej.page_attention(*args, num_splits=4, cfg=configs.PageAttentionConfig(num_splits=2), **layout)
    # Zero is the word for leaving it to the heuristics.
    assert "override: no cfg=" in str(ejkernel.explain(ej.page_attention, *args, num_splits=0, **layout).forward)


def test_mask_value_context_bound_and_tpu_options_change_no_result():
    layout = paged_calls.layout("page_attention")
    want = ej.page_attention(*ARRAYS["page_attention"], **layout)
    given = {"mask_value": -1e30, "max_context_len": 7, "megacore_mode": "batch", "inline_seq_dim": False}
    np.testing.assert_array_equal(ej.page_attention(*ARRAYS["page_attention"], **given, **layout), want)


def test_aliases_of_paged_operations_are_the_same_function():
    assert ej.ragged_page_attention is ej.ragged_page_attention_v2
    assert ej.RaggedPageAttention is ej.RaggedPageAttentionv2
