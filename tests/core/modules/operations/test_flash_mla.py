"""`flash_mla`: what it computes, what it once got wrong elsewhere, every transformation, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import latent_attention_loop as loop
import numpy as np
import pytest
import transformed
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import FlashMLA, FlashMLAConfig, flash_attention, flash_mla, mla_attention
from ejkernel.modules.operations.configs import FwdParams

POSITIONAL = ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k", "cu_seqlens")
TILES = FlashMLAConfig(block_q=16, block_k=16)

# form, B, T, H, Hk, Dn, Dr, further arrays by shape, further arguments
CALLS = {
    "a, one token": ("a", 1, 1, 2, 1, 3, 0, {}, {"causal": True}),
    "a, padded rows, head size 60": ("a", 2, 20, 4, 4, 60, 0, {}, {"cu_seqlens": [0, 20, 27], "causal": True}),
    "b, multi-query": ("b", 1, 129, 4, 1, 4, 2, {}, {"causal": True}),
    "b, packed": (
        "b",
        1,
        63,
        4,
        2,
        5,
        3,
        {"softmax_aux": (4, 3)},
        {"cu_seqlens": [0, 20, 20, 21, 60], "sliding_window": (9, 2), "logits_soft_cap": 1.5},
    ),
    "c, mask and bias": (
        "c",
        2,
        33,
        8,
        2,
        4,
        6,
        {"bias": (1, 8, 33, 33), "softmax_aux": (2,)},
        {"attention_mask": (2, 1, 33, 33), "sliding_window": 12, "softmax_scale": 0.4},
    ),
}


def make(name, dtype=np.float64):
    """Differentiable arrays by name, and the other arguments."""
    form, b, t, h, g, n, rope, shapes, options = CALLS[name]
    rng, r, v = np.random.default_rng(0), 7, 6
    shapes = {
        "query": (b, t, h, n + (rope if form == "b" else 0)),
        "key_value": (b, t, r),
        "w_kc": (r, g, n),
        "w_vc": (r, g, v),
        **({"b_k": (b, t, rope)} if form != "a" else {}),
        **({"b_q": (b, t, rope)} if form == "c" else {}),
        **shapes,
    }
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    options = dict(options)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = np.array(options["cu_seqlens"], np.int32)
    if "attention_mask" in options:
        options["attention_mask"] = rng.random(options["attention_mask"]) < 0.6
        options["attention_mask"][:, :, 5] = False
    return arrays, options


def run(arrays, options, **more):
    rest = {**arrays, **options, **more}
    positional = [rest.pop(name, None) for name in POSITIONAL]
    return flash_mla(*positional, **rest)


def looped(arrays, options):
    """The loop's answer."""
    options = dict(options)
    words = {"cu_seqlens": "cum_seqlens_q", "attention_mask": "mask"}
    given = {words.get(name, name): x for name, x in options.items()}
    scores = {name: arrays[name] for name in ("bias", "softmax_aux") if name in arrays}
    latent = {name: x for name, x in arrays.items() if name not in scores}
    return loop.attention(loop.Latent(**latent, options={**given, **scores}))


@pytest.mark.parametrize("name", CALLS)
def test_values_and_every_gradient_match_the_formula(name):
    with jax.enable_x64(True):
        arrays, options = make(name)
        output = transformed.checked(functools.partial(run, options=options, cfg=TILES), arrays)
        transformed.close(output, looped(arrays, options), 1e-9, 1e-10)


def test_transforms_with_traced_lengths_and_seed():
    arrays, options = make("b, packed", np.float32)
    names = (*arrays, "cu_seqlens", "dropout_rng")
    fixed = {"sliding_window": (9, 2), "causal": True, "dropout_prob": 0.3, "deterministic": False, "cfg": TILES}

    def call(*values):
        return run(dict(zip(names, values, strict=True)), fixed)

    values = (*arrays.values(), options["cu_seqlens"], np.uint32(3))
    others = (*(x + 0.5 for x in arrays.values()), np.array([0, 0, 30, 63, 63], np.int32), np.uint32(4))
    transformed.check_transforms(call, values, range(len(arrays)), others)
    transformed.check_no_new_compilations(call, values, others)


def test_t13_a_window_counts_keys_on_both_sides():
    arrays, _ = make("b, multi-query", np.float32)
    for window in (3, (3, 3)):
        near = abs(np.arange(129)[:, None] - np.arange(129)) <= 3
        got, want = run(arrays, {"sliding_window": window}), run(arrays, {"attention_mask": near[None, None]})
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_t18_rows_with_nothing_to_attend_are_zero_and_so_are_their_gradients():
    arrays, options = make("c, mask and bias", np.float32)

    def loss(query):
        output = run({**arrays, "query": query}, options)
        return jnp.sum(output[:, 5] * 3 + output[:, 6]), output

    gradient, output = jax.grad(loss, has_aux=True)(arrays["query"])
    assert not output[:, 5].any()
    assert not gradient[:, 5].any()
    assert gradient[:, 6].any()


def test_t19_mask_and_bias_both_apply():
    arrays, options = make("c, mask and bias", np.float32)
    mask, bias = options.pop("attention_mask"), arrays.pop("bias")
    both = run(arrays, options, attention_mask=mask, bias=bias)
    hidden = run(arrays, options, bias=jnp.where(mask, bias, -1e9))
    rows = mask.any(axis=-1)[:, 0]
    np.testing.assert_allclose(both[rows], hidden[rows], rtol=1e-5, atol=1e-5)
    for one in ({"attention_mask": mask}, {"bias": bias}):
        assert not np.allclose(both, run(arrays, options, **one), atol=1e-3)
    np.testing.assert_array_equal(both, run(arrays, options, attention_mask=mask.astype(np.int32), bias=bias))


def expanded(arrays):
    """Query, key and value for `flash_attention`, of form (b)."""
    key, value = (np.einsum("btr,rgn->btgn", arrays["key_value"], arrays[name]) for name in ("w_kc", "w_vc"))
    rope = np.broadcast_to(arrays["b_k"][:, :, None], (*key.shape[:3], arrays["b_k"].shape[2]))
    return arrays["query"], np.concatenate([key, rope], axis=-1), value


def test_dropout_is_that_of_flash_attention_and_deterministic_means_none():
    arrays, _ = make("b, multi-query", np.float32)
    options = {"dropout_prob": 0.4, "causal": True}
    want = flash_attention(*expanded(arrays), dropout_seed=11, **options)
    got = run(arrays, options, deterministic=False, dropout_rng=11)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    plain = run(arrays, {"causal": True})
    np.testing.assert_array_equal(run(arrays, options, dropout_rng=11), plain)
    keys = [jax.random.key(1), jax.random.PRNGKey(1), jax.random.key(1), jax.random.key(2)]
    typed, raw, again, other = (run(arrays, options, deterministic=False, dropout_rng=key) for key in keys)
    np.testing.assert_array_equal(typed, again)
    np.testing.assert_array_equal(typed, raw)
    assert not np.allclose(typed, other, atol=1e-3)
    assert not np.allclose(typed, plain, atol=1e-3)


def test_softmax_dtype_rounds_the_scores():
    arrays, _ = make("b, multi-query", np.float32)
    want = flash_attention(*expanded(arrays), logits_dtype=jnp.bfloat16)
    got = run(arrays, {"softmax_dtype": jnp.bfloat16})
    # A score that lies between two bfloat16 may be rounded to either.
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)
    exact = run(arrays, {})
    assert not np.allclose(got, exact, atol=1e-4)
    for wide in (None, jnp.float32, jnp.float64):
        np.testing.assert_array_equal(run(arrays, {"softmax_dtype": wide}), exact)


def test_temporary_memory_grows_linearly():
    def used(tokens):
        shapes = {"query": (2, 24), "key_value": (16,), "b_k": (8,)}
        arrays = {name: jax.ShapeDtypeStruct((1, tokens, *rest), jnp.float32) for name, rest in shapes.items()}
        arrays |= {name: jax.ShapeDtypeStruct((16, 2, 16), jnp.float32) for name in ("w_kc", "w_vc")}
        names = tuple(arrays)

        def call(*values):
            return run(dict(zip(names, values, strict=True)), {"causal": True})

        return transformed.temporary_bytes(call, list(arrays.values()), range(len(names)))

    short, long = used(2048), used(4096)
    assert long <= 2.1 * short
    assert long < 4096**2  # a quarter of one float32 matrix of scores


def test_sharded_calls_match_the_unsharded_one():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(AxisType.Auto,) * 3)
    rng = np.random.default_rng(1)
    shapes = [(2, 8, 4, 7), (2, 8, 6), (6, 2, 4), (6, 2, 5), None, (2, 8, 3)]
    arrays = [None if shape is None else jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    specs = (P("dp", "sp", "tp"), P("dp"), P(None, "tp"), P(None, "tp"))
    present = [n for n, x in enumerate(arrays) if x is not None]

    def call(*values, **placed):
        given = dict(zip(present, values, strict=True))
        positional = [given.get(n) for n in range(len(arrays))]
        dropped = {"dropout_prob": 0.2, "deterministic": False, "dropout_rng": 5}
        return flash_mla(*positional, causal=True, **dropped, **placed)

    def placed(*values):
        return call(*values, mesh=mesh, in_specs=specs, out_specs=P("dp", "sp", "tp"))

    values = [arrays[n] for n in present]
    got, want = (transformed.quickly(transformed.graded(f, range(5)))(*values) for f in (placed, call))
    transformed.close(got, want, 2e-5, 1e-5)
    with pytest.raises(ValueError, match="cannot be split"):
        call(*values, mesh=mesh, in_specs=(P(), P(None, "sp"), P(), P()), out_specs=P())


Q, KV, WK, WV, BK = (jnp.ones(s) for s in ((2, 8, 4, 6), (2, 8, 5), (5, 2, 6), (5, 2, 3), (2, 8, 3)))


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((Q[0], KV, WK, WV), {}, r"query: got shape \(8, 4, 6\), wants \[B, T, H, Dq\]"),
        ((Q, KV[:, :4], WK, WV), {}, r"key_value: got shape \(2, 4, 5\), wants \[B=2, T=8, R\]"),
        ((Q, KV, WK[:4], WV), {}, r"w_kc: got shape \(4, 2, 6\), wants \[R=5, Hk, Dn\]"),
        ((Q, KV, WK, WV[:, :1]), {}, r"w_vc: got shape \(5, 1, 3\), wants \[R=5, Hk=2, Dv\]"),
        ((Q, KV, WK[..., :5], WV), {}, "query: got a head size of 6, wants w_kc's Dn = 5"),
        ((Q, KV, WK, WV, None, BK), {}, r"query: got a head size of 6, wants Dn \+ Dr = 6 \+ 3"),
        ((Q, KV, WK, WV, BK), {}, "b_q: got a value with b_k None"),
        ((Q, KV, WK, WV, BK[..., :2], BK), {}, r"b_q: got shape \(2, 8, 2\), wants \[B=2, T=8, Dr=3\]"),
        ((Q[:, :, :3], KV, WK, WV), {}, "w_kc: got .* with 2 heads, wants a divisor of query's 3"),
        ((Q, KV.astype(jnp.bfloat16), WK, WV), {}, "key_value: got dtype bfloat16, wants query's float32"),
        ((Q, KV, WK, WV, None, None, jnp.array([0, 8])), {}, r"cu_seqlens: got shape \(2,\), wants \[B\+1=3\]"),
        ((Q, KV, WK, WV, None, None, jnp.array([0, 9, 9])), {}, r"cu_seqlens: got \[0, 9, 9\], wants lengths"),
        ((Q, KV, WK, WV), {"attention_mask": jnp.ones((2, 8, 8), bool)}, r"attention_mask: got shape \(2, 8, 8\)"),
        ((Q, KV, WK, WV), {"attention_mask": jnp.ones((2, 1, 8, 8))}, "attention_mask: got dtype float32"),
        ((Q, KV, WK, WV), {"bias": jnp.ones((2, 3, 8, 8))}, r"bias: got shape \(2, 3, 8, 8\)"),
        ((Q, KV, WK, WV), {"softmax_aux": jnp.ones((3, 2))}, r"softmax_aux: got shape \(3, 2\)"),
        ((Q, KV, WK, WV), {"dropout_rng": 0.5}, "dropout_rng: got"),
        ((Q, KV, WK, WV), {"dropout_rng": jax.random.split(jax.random.key(0))}, "dropout_rng: got"),
        ((Q, KV, WK, WV), {"softmax_dtype": jnp.int32}, "softmax_dtype: got"),
        ((Q, KV, WK, WV), {"logits_soft_cap": 0.0}, "logits_soft_cap: got 0.0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, options, says):
    with pytest.raises(ValueError, match=says):
        flash_mla(*arguments, **options)


def test_the_class_runs_the_operation_and_configurations_change_no_answer():
    assert mla_attention is flash_mla
    want = flash_mla(Q, KV, WK, WV, causal=True)
    small = FlashMLAConfig(block_q=2, block_k=3, fwd_params={"q_blocksize": 4})
    assert small.part("forward") == FwdParams(q_blocksize=4)
    assert (small.part("backward").q_blocksize, small.part("backward").kv_blocksize) == (2, 3)
    np.testing.assert_allclose(FlashMLA().run(Q, KV, WK, WV, causal=True, cfg=small), want, rtol=1e-5)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    form=st.sampled_from("abc"),
    heads=st.sampled_from([(2, 1), (4, 4), (8, 1)]),
    tokens=st.integers(1, 12),
    window=st.sampled_from([None, 1, (0, 0), (2, None)]),
)
def test_random_sizes_match_the_formula(form, heads, tokens, window):
    rng, (h, g), rope = np.random.default_rng(tokens), heads, 0 if form == "a" else 3
    shapes = {"query": (1, tokens, h, 4 + (rope if form == "b" else 0)), "key_value": (1, tokens, 5)}
    shapes |= {"w_kc": (5, g, 4), "w_vc": (5, g, 2)}
    shapes |= {name: (1, tokens, rope) for name in {"a": (), "b": ("b_k",), "c": ("b_q", "b_k")}[form]}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    options = {"causal": True, "sliding_window": window}
    got = run({name: x.astype(np.float32) for name, x in arrays.items()}, options)
    np.testing.assert_allclose(got, looped(arrays, options), rtol=2e-4, atol=2e-5)
