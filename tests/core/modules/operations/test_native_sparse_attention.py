"""`native_sparse_attention`: what it computes, and what it once got wrong elsewhere."""

import functools

import jax
import jax.numpy as jnp
import native_sparse_loop as loop
import numpy as np
import pytest
import transformed
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import explain
from ejkernel.modules import NativeSparseAttention, NativeSparseAttentionConfig, native_sparse_attention
from ejkernel_xla.selected_attention import config

POSITIONAL = ("query", "key", "value", "g_cmp", "g_slc", "block_indices", "block_counts", "cu_seqlens")
GATES = ("g_cmp", "g_slc", "g_swa")
TILES = NativeSparseAttentionConfig(block_q=7)

# B, T, H, Hk, D, V, gates, further arguments; `block_indices` gives a number of slots, `keys` S, `pages` P and S,
# `compressed` M or the blocks of a page
CALLS = {
    "one token": (1, 1, 2, 1, 3, 2, GATES, {"block_size": 4}),
    "one block of many": (2, 63, 4, 4, 5, 4, GATES, {"block_size": 8, "block_counts": 1, "window_size": 1}),
    "selected, multi-query": (1, 129, 8, 1, 4, 3, GATES, {"block_size": 16, "block_counts": 3, "window_size": 20}),
    "head size 60": (1, 33, 4, 1, 60, 60, ("g_cmp",), {"block_size": 6, "block_counts": 2, "softmax_scale": 0.2}),
    "given": (2, 63, 4, 2, 4, 6, ("g_slc",), {"block_size": 8, "block_indices": 5, "block_counts": 4}),
    "given, counted, all branches": (
        1,
        63,
        4,
        1,
        4,
        4,
        GATES,
        {"block_size": 8, "block_indices": 3, "block_counts": "some", "window_size": 9},
    ),
    "packed": (
        1,
        63,
        4,
        2,
        4,
        4,
        GATES,
        {"block_size": 8, "block_counts": 2, "cu_seqlens": [0, 19, 19, 22, 58], "window_size": 5},
    ),
    "packed, given": (
        1,
        40,
        4,
        2,
        4,
        4,
        ("g_cmp",),
        {"block_size": 8, "block_indices": 4, "cu_seqlens": [0, 20, 21, 40]},
    ),
    "padded rows": (
        3,
        30,
        4,
        4,
        4,
        4,
        GATES,
        {"block_size": 7, "block_counts": 3, "cu_seqlens": [0, 30, 30, 41], "window_size": 6},
    ),
    "longer context": (2, 13, 4, 2, 4, 3, GATES, {"keys": 41, "block_size": 8, "block_counts": 3, "window_size": 11}),
    "more queries than keys": (
        1,
        14,
        2,
        1,
        4,
        4,
        ("g_cmp", "g_swa"),
        {"keys": 9, "block_size": 4, "block_indices": 2, "window_size": 3},
    ),
    "packed, longer contexts": (
        1,
        30,
        4,
        2,
        4,
        4,
        GATES,
        {
            "keys": 50,
            "block_size": 8,
            "block_counts": 2,
            "cu_seqlens": [0, 9, 9, 20, 27],
            "cu_seqlens_k": [0, 20, 23, 41, 44],
            "window_size": 5,
        },
    ),
    "decode": (
        3,
        1,
        4,
        2,
        4,
        6,
        GATES,
        {
            "keys": 45,
            "kv_lens": [45, 0, 21],
            "compressed": 6,
            "block_size": 8,
            "block_counts": 3,
            "window_size": 9,
        },
    ),
    "decode, drafts, given": (
        2,
        3,
        4,
        2,
        4,
        4,
        ("g_cmp", "g_swa"),
        {
            "keys": 40,
            "kv_lens": [33, 2],
            "cu_seqlens": [0, 2, 5],
            "block_size": 8,
            "block_indices": 4,
            "window_size": 9,
        },
    ),
    "one request": (
        1,
        2,
        2,
        2,
        4,
        4,
        ("g_cmp", "g_slc"),
        {"keys": 41, "kv_lens": [35], "compressed": 6, "block_size": 8, "block_counts": 2},
    ),
    "packed, compressed keys": (
        1,
        40,
        4,
        2,
        4,
        4,
        ("g_cmp",),
        {"block_size": 8, "block_counts": 2, "compressed": 7, "cu_seqlens": [0, 20, 21, 40]},
    ),
    "pages": (
        2,
        2,
        4,
        2,
        4,
        3,
        GATES,
        {
            "pages": (9, 8),
            "block_tables": [[2, 0, 5, 9], [3, 1, -1, 7]],
            "kv_lens": [23, 31],
            "compressed": 2,
            "block_size": 4,
            "block_counts": 3,
            "window_size": 13,
        },
    ),
    "pages, blocks of several": (
        2,
        3,
        4,
        2,
        4,
        4,
        ("g_cmp", "g_swa"),
        {
            "pages": (9, 4),
            "block_tables": [[2, 0, 5, 8, -1], [3, 1, 4, 7, 6]],
            "kv_lens": [13, 20],
            "cu_seqlens": [0, 1, 4],
            "block_size": 6,
            "block_counts": 2,
            "window_size": 3,
        },
    ),
}


def make(name, dtype=np.float64, seed=0):
    """Differentiable arrays by name, and the other arguments."""
    b, t, h, g, d, v, gates, options = CALLS[name]
    rng = np.random.default_rng(seed)
    options = dict(options)
    s = options.pop("keys", t)
    rows, s = options.pop("pages", (b, s))
    shapes = {"query": (b, t, h, d), "key": (rows, s, g, d), "value": (rows, s, g, v)}
    if "compressed" in options:
        blocks = options.pop("compressed")
        shapes |= {"compressed_key": (rows, blocks, g, d), "compressed_value": (rows, blocks, g, v)}
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    arrays |= {gate: rng.random((b, t, h)).astype(dtype) for gate in gates}
    if "block_indices" in options:  # some twice, some ahead of the query, some nowhere
        last = s // options["block_size"]
        shape = (b, t, g, options["block_indices"])
        options["block_indices"] = rng.integers(-1, last + 2, shape).astype(np.int32)
    if options.get("block_counts") == "some":
        options["block_counts"] = rng.integers(0, 5, (b, t, g)).astype(np.int32)
    for lengths in {"cu_seqlens", "cu_seqlens_k", "kv_lens", "block_tables"} & options.keys():
        options[lengths] = np.array(options[lengths], np.int32)
    return arrays, options


def run(arrays, options, **more):
    rest = {"block_counts": 16, **arrays, **options, **more}
    positional = [rest.pop(name, None) for name in POSITIONAL]
    return native_sparse_attention(*positional, **rest)


def quick(arrays, options, **more):
    """The same, compiled with little effort; arrays among the options are traced."""
    given = {**options, **more}
    traced = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    fixed = {name: x for name, x in given.items() if name not in traced}
    return transformed.quickly(lambda arrays: run(arrays, fixed))({**arrays, **traced})


@pytest.mark.parametrize("name", CALLS)
def test_values_and_every_gradient_are_the_formula(name, monkeypatch):
    monkeypatch.setattr(config, "_max_sorted_queries", lambda record: min(24, record.query.shape[1]))
    with jax.enable_x64(True):
        arrays, options = make(name)
        output = transformed.checked(functools.partial(run, options=options, cfg=TILES), arrays)
        transformed.close(output, loop.attention(loop.Sparse(**arrays, **options)), 1e-9, 1e-10)


def test_selection_breaks_ties_to_the_later_block_and_takes_the_own_one_first():
    arrays, options = make("selected, multi-query", np.float32)
    same = {**arrays, "query": np.zeros_like(arrays["query"])}  # all blocks weigh the same
    got = quick({**same, "g_cmp": same["g_cmp"] * 0}, options)
    own = np.arange(129) // 16
    newest = np.stack([own, own - 1, own - 2], axis=-1)[None, :, None]
    want = quick({name: x for name, x in same.items() if name != "g_cmp"}, {**options, "block_indices": newest})
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_block_that_is_listed_twice_counts_once():
    arrays, options = make("given", np.float32)
    options.pop("block_counts")
    once, twice = options["block_indices"][..., :2], options["block_indices"][..., [0, 1, 0, 1]]
    one, other = (quick(arrays, {**options, "block_indices": blocks}) for blocks in (once, twice))
    np.testing.assert_array_equal(one, other)


def test_given_blocks_win_over_the_selection():
    arrays, options = make("given, counted, all branches", np.float32)
    listed = quick(arrays, options)
    selected = quick(arrays, {name: x for name, x in options.items() if "indices" not in name} | {"block_counts": 3})
    assert not np.allclose(listed, selected, atol=1e-3)
    apart = {name: x for name, x in arrays.items() if name != "g_cmp"}
    nothing = {**arrays, "g_cmp": arrays["g_cmp"] * 0}
    np.testing.assert_allclose(quick(nothing, options), quick(apart, options), rtol=1e-5, atol=1e-6)


def test_t5_a_configuration_changes_no_answer_and_the_size_of_blocks_does():
    arrays, options = make("selected, multi-query", np.float32)
    want = quick(arrays, options)
    for rows in (129, 50, 8):
        got = quick(arrays, options, cfg=NativeSparseAttentionConfig(block_q=rows))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(quick(arrays, {**options, "block_size": 8}), want, atol=1e-3)


def test_t9_empty_slots_add_nothing_to_a_gradient():
    arrays, options = make("given", np.float32)
    names, slots = tuple(arrays), options["block_indices"]
    rows = np.arange(slots.shape[1]) // options["block_size"]
    listed = np.where(slots == 1, np.minimum(1, rows)[None, :, None, None], -1)
    # Empty slots before and behind the listed ones, marked in either way.
    wide = np.concatenate([np.full_like(listed, -1), listed, np.full_like(listed, 10**6)], axis=-1)

    def both(blocks):
        given = {**options, "block_indices": blocks, "block_counts": blocks.shape[-1]}
        call = transformed.graded(lambda *x: run(dict(zip(names, x, strict=True)), given), range(len(names)))
        return transformed.quickly(call)(*arrays.values())

    results, gradients = both(wide)
    transformed.close((results, gradients), both(listed), 1e-5, 1e-5)
    for gradient in gradients[1:3]:  # of key and value: only the first two blocks are listed
        assert gradient[:, :16].any()
        assert not gradient[:, 16:].any()


def test_t9_nothing_is_read_by_a_query_without_blocks():
    arrays, options = make("given", np.float32)
    options["block_indices"] = np.full_like(options["block_indices"], -1)

    def loss(key, value):
        return jnp.sum(run({**arrays, "key": key, "value": value}, options) ** 2)

    assert not quick(arrays, options).any()
    gradients = transformed.quickly(jax.grad(loss, (0, 1)))(arrays["key"], arrays["value"])
    assert not any(gradient.any() for gradient in gradients)


def test_t13_a_window_is_the_newest_tokens_with_the_own_one():
    arrays, options = make("given", np.float32)
    options["block_indices"] = np.full_like(options["block_indices"], -1)
    gates = {"g_swa": np.ones_like(arrays["g_slc"])}
    got = quick({**arrays, **gates}, {**options, "window_size": 1})
    np.testing.assert_allclose(got, np.repeat(arrays["value"], 2, axis=2), rtol=1e-6)


def test_t18_padding_tokens_reach_no_output_or_gradient():
    arrays, options = make("packed", np.float32)
    dirty = {name: x.copy() for name, x in arrays.items()}
    for x in dirty.values():
        x[:, 58:] = np.nan
    names = tuple(arrays)

    def loss(*values):
        return jnp.sum(run(dict(zip(names, values, strict=True)), options)[:, :58] ** 2)

    output = quick(dirty, options)
    np.testing.assert_array_equal(output, quick(arrays, options))
    assert not output[:, 58:].any()
    for gradient in transformed.quickly(jax.grad(loss, range(len(names))))(*dirty.values()):
        assert bool(jnp.isfinite(gradient).all())
        assert not gradient[:, 58:].any()


def test_the_mean_of_a_block_that_is_not_complete_is_never_read():
    arrays, _ = make("one block of many", np.float32)

    def compressed(value):
        only = {"query": arrays["query"], "key": arrays["key"], "value": value, "g_cmp": arrays["g_cmp"]}
        nothing = np.full((2, 63, 4, 1), -1, np.int32)
        return run(only, {"block_size": 8, "block_indices": nothing})

    gradient = transformed.quickly(jax.grad(lambda value: jnp.sum(compressed(value) ** 2)))(arrays["value"])
    assert not gradient[:, 56:].any()  # 63 tokens: the eighth block has seven
    assert gradient[:, :56].all()
    assert not transformed.quickly(compressed)(arrays["value"])[:, :7].any()


def test_the_queries_of_a_longer_context_are_its_newest():
    arrays, options = make("selected, multi-query", np.float32)
    whole = quick(arrays, options)
    newest = {name: x[:, -21:] if name == "query" or name in GATES else x for name, x in arrays.items()}
    np.testing.assert_allclose(quick(newest, options), whole[:, -21:], rtol=1e-5, atol=1e-6)


def test_blocks_that_are_not_complete_and_free_slots_may_hold_anything():
    """Of caches: a decode step reads none of them."""
    for name in ("decode", "one request", "pages"):
        arrays, options = make(name, np.float32)
        want, dirty = quick(arrays, options), {name: x.copy() for name, x in arrays.items()}
        for b, length in enumerate(options["kv_lens"]):
            for x, tokens in [("key", 1), ("value", 1), *((f"compressed_{n}", 0) for n in ("key", "value"))]:
                first = length if tokens else length // options["block_size"]
                for j in range(first, dirty[x].shape[1] * (4 if name == "pages" else 1)):
                    size = dirty[x].shape[1]
                    page = options["block_tables"][b, j // size] if name == "pages" else b
                    if 0 <= page < len(dirty[x]):
                        dirty[x][page, j % size] = np.nan
        np.testing.assert_array_equal(quick(dirty, options), want)


def test_explain_and_the_kernel_object_take_the_call():
    arrays, options = make("given", np.float32)
    given = {"block_counts": 16, **arrays, **options}
    positional = [given.pop(name, None) for name in POSITIONAL]
    decision = explain(native_sparse_attention, *positional, **given)
    assert decision.forward.implementation.name == decision.backward.implementation.name == "xla"
    got = NativeSparseAttention().run(*positional, **given)
    np.testing.assert_allclose(got, quick(arrays, options), rtol=1e-5, atol=1e-6)


X, K, G, LISTED = jnp.ones((2, 8, 4, 3)), jnp.ones((2, 8, 2, 3)), jnp.ones((2, 8, 4)), jnp.zeros((2, 8, 2, 2), int)
NONE, CUT = (None, None), jnp.array([0, 4, 8])


def compressed(x):
    return {"compressed_key": x, "compressed_value": x}


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((X, K[:1], K), {}, r"key: got shape \(1, 8, 2, 3\), wants \[B=2, S, Hk, D=3\]"),
        ((X, K, K[..., :1, :]), {}, r"value: got shape \(2, 8, 1, 3\), wants \[B=2, S=8, Hk=2, V\]"),
        ((X[:, :, :3], K, K), {}, "key: got shape .* with 2 heads, wants a divisor of query's 3"),
        ((X, K, K.astype(jnp.bfloat16)), {}, "value: got dtype bfloat16, wants query's float32"),
        ((X, K, K), {}, "block_indices: got None with g_cmp None"),
        ((X, K, K, G[:, :4]), {}, r"g_cmp: got shape \(2, 4, 4\), wants \[B=2, T=8, H=4\]"),
        ((X, K, K, G, G.astype(int)), {}, "g_slc: got dtype int32, wants a floating dtype"),
        ((X, K, K, G), {"g_swa": G[..., :2]}, r"g_swa: got shape \(2, 8, 2\)"),
        (
            (X, K, K, *NONE, LISTED.swapaxes(1, 2)),
            {},
            r"block_indices: got shape \(2, 2, 8, 2\), wants \[B=2, T=8, Hk=2, K\]",
        ),
        ((X, K, K, *NONE, LISTED * 0.5), {}, "block_indices: got dtype float32"),
        (
            (X, K, K, *NONE, LISTED, LISTED[..., :1]),
            {},
            r"block_counts: got shape \(2, 8, 2, 1\), wants \[B=2, T=8, Hk=2\]",
        ),
        ((X, K, K, G, None, None, LISTED[..., 0]), {}, "block_counts: got an array .* wants an int"),
        ((X, K, K, G, None, None, 0), {}, "block_counts: got int 0, wants an int of at least 1"),
        ((X, K, K, G, None, None, 1, jnp.array([0, 8])), {}, r"cu_seqlens: got shape \(2,\), wants \[B\+1=3\]"),
        ((X[:1], K[:1], K[:1], G[:1], None, None, 1, jnp.array([0, 9])), {}, r"cu_seqlens: got \[0, 9\], wants"),
        ((X[:1], K[:1], K[:1], G[:1], None, None, 1, jnp.array([0])), {}, r"cu_seqlens: got shape \(1,\)"),
        (
            (X, K[:, :4], K[:, :4], G, None, None, 1, CUT),
            {},
            "cu_seqlens_k: got None with 8 queries and 4 keys, wants lengths",
        ),
        ((X, K, K, G), {"cu_seqlens_k": CUT}, "cu_seqlens_k: got an array with cu_seqlens None, wants both or"),
        (
            (X, K, K, G, None, None, 1, CUT),
            {"cu_seqlens_k": CUT, "kv_lens": CUT[:2]},
            "cu_seqlens_k: got an array with kv_lens or block_tables, wants None",
        ),
        ((X, K, K, G), {"kv_lens": CUT}, r"kv_lens: got shape \(3,\), wants \[B=2\]"),
        ((X, K, K, G), {"block_tables": CUT}, r"block_tables: got shape \(3,\), wants \[B=2, N\]"),
        ((X, K, K, G), {"compressed_key": K[:, :1]}, "compressed_key: got an array with compressed_value None"),
        (
            (X, K, K, G),
            {"block_size": 4, **compressed(K)},
            r"compressed_key: got shape .*, wants \[B=2, M=2, Hk=2, D=3\]",
        ),
        (
            (X, K, K, G),
            {"block_size": 3, "block_tables": CUT[None, :2].repeat(2, 0), **compressed(K)},
            "block_size: got 3 with compressed_key and pages of 8 tokens, wants a divisor",
        ),
        ((X, K, K, G), {"block_size": 0}, "block_size: got int 0"),
        ((X, K, K, G), {"window_size": 0.5}, "window_size: got float 0.5"),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(arguments, options, says):
    with pytest.raises(ValueError, match=says):
        native_sparse_attention(*arguments, **options)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from([1, 7, 8, 25]),
    heads=st.sampled_from([(2, 2), (4, 1)]),
    size=st.sampled_from([1, 4, 30]),
    count=st.integers(1, 4),
    gates=st.sets(st.sampled_from(("g_slc", "g_swa"))),
)
def test_any_sizes_are_the_formula(tokens, heads, size, count, gates):
    (h, g), rng = heads, np.random.default_rng(tokens)
    arrays = {"query": rng.normal(size=(1, tokens, h, 4)), "key": rng.normal(size=(1, tokens, g, 4))}
    arrays |= {"value": rng.normal(size=(1, tokens, g, 3))}
    arrays |= {gate: rng.random((1, tokens, h)) for gate in ("g_cmp", *sorted(gates))}
    options = {"block_size": size, "block_counts": count, "window_size": 3}
    got = quick({name: x.astype(np.float32) for name, x in arrays.items()}, options)
    np.testing.assert_allclose(got, loop.attention(loop.Sparse(**arrays, **options)), rtol=2e-4, atol=2e-5)
