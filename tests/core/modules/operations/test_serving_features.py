"""What serving needs combines: every pair of features of every operation over pages, in float64, against the loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from paged_calls import DECODING, OPS, Paged
from serving_features import FEATURES, LATENT, PREFIX, batch_for, check_pairs, features, loop_options

import ejkernel
import ejkernel.modules as ej
from ejkernel.ops.plugins import registry

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("op", [*OPS, *LATENT[:1]])
def test_every_pair_of_features_is_the_loop(op):
    check_pairs(op, jnp.float64, "xla", rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("op", [*OPS, *LATENT])
def test_every_operation_has_every_feature_that_means_something_for_it(op):
    no = {"trees"} if op in DECODING else set()
    no |= {"prefix"} if op in ("ragged_decode_attention", "prefill_page_attention") else set()
    assert set(features(op)) == set(FEATURES) - no
    names = registry().ops[op].signature.parameters
    assert {"softmax_scale", "logits_soft_cap", "sliding_window"} <= set(names)
    assert ("sequence_end" if op == "ragged_decode_attention" else "kv_lens") in names


def test_the_reference_has_all_features_at_once():
    op = "unified_attention"
    options = {key: value for one in FEATURES.values() for key, value in one.items()}
    paged = Paged(batch_for(op), dtype=jnp.float64, prefix=PREFIX)
    positional, keywords = paged_calls.keywords(op, paged, options)
    record, _ = registry().ops[op].bind((*paged_calls.arguments(op, paged), *positional), keywords)
    want = paged_loop.packed(paged.batch, **loop_options(op, options))
    np.testing.assert_allclose(registry().ops[op].reference(record), want, rtol=1e-11, atol=1e-12)


OLD_NAMES = {
    "page_attention": {"context_lens": 3, "attn_scale": 0.3, "attn_logits_soft_cap": 1.5},
    "prefill_page_attention": {"context_len": 3, "attn_logits_soft_cap": 1.5},
    "decode_attention": {"seq_lens": 4},
    "ragged_page_attention_v2": {"context_lens": 2},
}
NEW = {"attn_scale": "softmax_scale", "attn_logits_soft_cap": "logits_soft_cap"}


@pytest.mark.parametrize("op", OLD_NAMES)
def test_old_names_of_arguments_stay(op):
    paged = Paged(batch_for(op))
    arrays = paged_calls.arguments(op, paged)
    given = paged_calls.keywords(op, paged, {})[1]
    declared = registry().ops[op]
    named = dict(zip(declared.signature.parameters, arrays, strict=False))
    numbers = {name: value for name, value in OLD_NAMES[op].items() if isinstance(value, float)}
    lengths = next(name for name in OLD_NAMES[op] if name not in numbers)
    want = getattr(ej, op)(*arrays, **given, **{NEW[name]: value for name, value in numbers.items()})
    tokens = named.pop("kv_lens")
    got = getattr(ej, op)(**named, **{lengths: tokens}, **given, **numbers)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert op in str(ejkernel.explain(getattr(ej, op), **named, **{lengths: tokens}, **given))
    with pytest.raises(TypeError, match=f"got '{lengths}' and 'kv_lens', two names of one argument"):
        getattr(ej, op)(**named, kv_lens=tokens, **{lengths: tokens}, **given)


def test_sequences_with_a_shared_prefix_cannot_be_split_over_devices():
    op = "page_attention"
    paged = Paged(batch_for(op), prefix=PREFIX)
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("dp")
    placed = {"mesh": mesh, "in_specs": (spec, None, None, spec, spec), "out_specs": spec}
    with pytest.raises(ValueError, match="cannot be split"):
        ej.page_attention(*paged_calls.arguments(op, paged), shared_prefix=PREFIX, kv_layout="pshd", **placed)


def test_a_prefix_must_end_before_the_queries():
    op = "page_attention"
    paged = Paged(batch_for(op), prefix=PREFIX)
    with pytest.raises(ValueError, match=r"shared_prefix: got 9, wants 0 to"):
        ej.page_attention(*paged_calls.arguments(op, paged), shared_prefix=9, kv_layout="pshd")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"qq_bias": jnp.ones((3, 5, 5))}, r"qq_bias: got shape \(3, 5, 5\)"),
        ({"qq_bias": jnp.ones((4, 5, 6))}, r"qq_bias: got shape \(4, 5, 6\)"),
        ({"chunk_size": 0}, "chunk_size: got int 0, wants an int >= 1"),
        ({"k_scale": 0.0}, "k_scale: got 0.0"),
        ({"alibi_slopes": jnp.ones(3)}, r"alibi_slopes: got shape \(3,\)"),
    ],
)
def test_terms_that_do_not_fit_are_refused(given, message):
    op = "ragged_page_attention_v2"
    paged = Paged(batch_for(op))
    with pytest.raises(ValueError, match=message):
        ej.ragged_page_attention_v2(*paged_calls.arguments(op, paged), **given)


@pytest.mark.parametrize("op", ["page_attention", "unified_attention", "ragged_page_attention_v3"])
def test_the_shared_prefix_has_one_field_in_records_of_all_operations(op):
    """`shared_prefix` was `table_prefix` in records that write tokens or have a query row per sequence."""
    paged = Paged(batch_for(op), prefix=PREFIX)
    positional, keywords = paged_calls.keywords(op, paged, {"prefix": PREFIX})
    declared = registry().ops[op]
    record = declared.lower(declared.bind((*paged_calls.arguments(op, paged), *positional), keywords)[0])
    assert int(record.shared_prefix) == PREFIX
    assert "table_prefix" not in {field.name for field in dataclasses.fields(record)}


def test_packed_trees_need_an_entry_for_every_pair():
    op = "unified_attention"
    paged = Paged(batch_for(op))  # 5, 3, 0 and 5 query rows: 59 pairs
    with pytest.raises(ValueError, match=r"query_start_loc: got .*, wants at most 58, the entries of qq_bias"):
        ej.unified_attention(*paged_calls.arguments(op, paged), qq_bias=jnp.ones(58))
