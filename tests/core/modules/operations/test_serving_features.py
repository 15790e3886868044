"""What serving needs combines: every pair of features of every operation over pages, in float64, against the loop."""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from paged_calls import DECODING, OPS, Paged
from pairwise import pairwise

import ejkernel
import ejkernel.modules as ej
from ejkernel.ops.plugins import registry

RNG = np.random.default_rng(7)
LATENT = ("multi_latent_ragged_page_attention", "multi_latent_ragged_page_attention_v2")
PREFIX = 6
"""One page of 4 tokens and half of another."""

FEATURES = {
    "scales": {"k_scale": 0.5, "v_scale": 3.0},
    "prefix": {"prefix": PREFIX},
    "trees": {"qq_bias": np.where(RNG.random((4, 5, 5)) < 0.3, -np.inf, RNG.integers(-8, 8, (4, 5, 5)) / 4)},
    "alibi": {"alibi": np.array([0.5, 0.25, -0.5, 0.125])},
    "chunks": {"chunk": 9},
    "sinks": {"sinks": np.array([0.5, -1.25, 0.125, 2.0])},
    "cap": {"cap": 1.5},
    "window": {"window": 7},
}
ARGUMENTS = {**paged_calls.NAMES, **paged_calls.ARRAYS}


@pytest.fixture(autouse=True, scope="module")
def x64():
    with jax.enable_x64(True):
        yield


def features(op: str) -> list[str]:
    """Those that an operation has."""
    parameters = registry().ops[op].signature.parameters
    return [name for name, options in FEATURES.items() if all(ARGUMENTS[one] in parameters for one in options)]


def combinations(op: str) -> list[dict]:
    """Options of the loop that cover all pairs of features."""
    rows = pairwise({name: (False, True) for name in features(op)})
    return [
        {key: value for name, on in row.items() if on for key, value in FEATURES[name].items()}
        for row in rows
        if sum(row.values()) > 1
    ]


def batch_for(op: str) -> paged_loop.Batch:
    """Sequences that begin alike, one of them idle; those of latent caches have one KV head, whose keys hold values."""
    lens, q_lens = (29, 13, 0, 11), (5, 3, 0, 5)
    if op in DECODING:
        lens, q_lens = (29, 13, 9, 11), (1, 1, 1, 1)
    if op == "prefill_page_attention":
        lens, q_lens = (29,), (5,)
    batch = paged_loop.make(lens, q_lens, heads=(4, 1) if op in LATENT else (4, 2), d=8, seed=zlib.crc32(op.encode()))
    keys, values = ([_begins(x, all_[0]) for x in all_] for all_ in (batch.keys, batch.values))
    return dataclasses.replace(batch, keys=keys, values=[x[..., :5] for x in keys] if op in LATENT else values)


def _begins(tokens: np.ndarray, first: np.ndarray) -> np.ndarray:
    count = min(PREFIX, len(tokens))
    return np.concatenate([first[:count], tokens[count:]])


def latent_arguments(paged: Paged) -> list:
    """Arguments of the operations on latent caches: 5 of the 8 numbers of a key are the latent vector."""
    paged = dataclasses.replace(paged, written=False)
    rows = paged.cache(paged.batch.keys)[:, :, 0]
    cache = np.zeros((*rows.shape[:2], 1, 256))
    cache[:, :, 0, :5], cache[:, :, 0, 128:131] = rows[..., :5], rows[..., 5:]
    query, new = paged.queries, paged.news(paged.batch.keys)[:, 0]
    ends = np.array([0, 0, len(paged.lens)], np.int32)
    arrays = [query[..., :5], query[..., 5:], new[:, :5], new[:, 5:], cache, paged.lens, paged.tables().reshape(-1)]
    return [jnp.asarray(x) for x in (*arrays, paged.starts, ends)]


def call(op: str, paged: Paged, **options):
    """A function of the arguments of an operation, and these."""
    if op in LATENT:
        given = {ARGUMENTS[name]: jnp.asarray(x) if name in paged_calls.ARRAYS else x for name, x in options.items()}
        return lambda *x: getattr(ej, op)(*x, **given, platform="xla"), latent_arguments(paged)
    optional, given = paged_calls.keywords(op, paged, options)
    tiles = paged_calls.tiles(op, 3, 5, 2)
    return (
        lambda *x: getattr(ej, op)(*x, *optional, **given, platform="xla", cfg=tiles),
        paged_calls.arguments(op, paged),
    )


def loop_options(op: str, options: dict) -> dict:
    """Options as the loop takes them."""
    options = {name: value for name, value in options.items() if name != "prefix"}
    if op == "prefill_page_attention" and "qq_bias" in options:
        options["qq_bias"] = options["qq_bias"][0]
    return options


@pytest.mark.parametrize("op", [*OPS, *LATENT[:1]])
def test_every_pair_of_features_is_the_loop(op):
    batch = batch_for(op)
    for options in combinations(op):
        paged = Paged(batch, dtype=jnp.float64, prefix=options.get("prefix", 0))
        given = {**options, **loop_options(op, options)}
        if op != "decode_attention":
            given["lse"] = True
        run, arrays = call(op, paged, **given)
        output, *rest = jax.jit(run, compiler_options=paged_calls.QUICK)(*arrays)
        results = paged_loop.attend(batch, **loop_options(op, options))
        want, lse = (np.concatenate(x) for x in zip(*results, strict=True))
        message = f"{op}: {', '.join(options)}"
        np.testing.assert_allclose(output, want, rtol=1e-11, atol=1e-12, err_msg=message)
        np.testing.assert_allclose(rest[0], lse, rtol=1e-11, atol=1e-12, err_msg=message)


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


def test_a_prefix_in_no_page_of_the_first_shard_is_refused():
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
    with pytest.raises(ValueError, match=r"shared_prefix: got 9, wants a number of tokens from 0 to"):
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


@pytest.mark.parametrize("op", ["page_attention", "chunked_prefill_paged_decode", "ragged_page_attention_v3"])
def test_kernels_that_read_a_prefix_once_refuse_it_where_they_cannot(op):
    paged = Paged(batch_for(op), prefix=PREFIX)
    positional, keywords = paged_calls.keywords(op, paged, {"prefix": PREFIX})
    arrays = [*paged_calls.arguments(op, paged), *positional]
    found = str(ejkernel.explain(getattr(ej, op), *arrays, **keywords))
    assert "table_prefix" in found
    record = registry().ops[op].lower(registry().ops[op].bind(tuple(arrays), keywords)[0])
    assert record.shared_prefix is None


def test_packed_queries_over_a_cache_that_is_only_read_keep_their_prefix():
    op = "unified_attention"
    paged = Paged(batch_for(op), prefix=PREFIX)
    positional, keywords = paged_calls.keywords(op, paged, {"prefix": PREFIX})
    declared = registry().ops[op]
    record = declared.lower(declared.bind((*paged_calls.arguments(op, paged), *positional), keywords)[0])
    assert record.shared_prefix is not None
    assert record.table_prefix is None
