"""`mla_decode`: the last row of `flash_mla`, without its keys and values, under every transformation."""

import jax
import jax.numpy as jnp
import latent_attention_loop as loop
import numpy as np
import pytest
import transformed
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import MLADecode, MLADecodeConfig, flash_mla, flash_mla_decode, mla_decode

NAMES = ("query", "latent_cache", "rope_cache", "w_kc", "w_vc", "lengths")
LENGTHS = np.array([63, 0, 17, 1], np.int32)

# H, Hk, Dn, Dr, whether the caches are one array, further arguments
CALLS = {
    "one cache": (4, 4, 60, 5, True, {}),
    "two caches, multi-query, window": (4, 1, 5, 3, False, {"sliding_window": 6, "softmax_scale": 0.6}),
    "no rotary part, cap and sinks": (8, 2, 6, 0, True, {"logits_soft_cap": 1.2, "softmax_aux": (8, 2)}),
}


def make(name, dtype=np.float64, tokens=63):
    """Arrays by name, without lengths, and the other arguments."""
    h, g, n, rope, joined, options = CALLS[name]
    rng, b, r = np.random.default_rng(0), len(LENGTHS), 7
    arrays = {
        "query": rng.normal(size=(b, h, n + rope)),
        "latent_cache": rng.normal(size=(b, tokens, r)),
        "rope_cache": rng.normal(size=(b, tokens, rope)),
        "w_kc": rng.normal(size=(r, g, n)),
        "w_vc": rng.normal(size=(r, g, 4)),
    }
    if joined:
        arrays["latent_cache"] = np.concatenate([arrays["latent_cache"], arrays.pop("rope_cache")], axis=-1)
    options = dict(options)
    if "softmax_aux" in options:
        arrays["softmax_aux"] = rng.normal(size=options.pop("softmax_aux"))
    return {name: x.astype(dtype) for name, x in arrays.items()}, options


def run(arrays, options, lengths=LENGTHS, **more):
    rest = {**arrays, "lengths": lengths, **options, **more}
    positional = [rest.pop(name, None) for name in NAMES]
    return mla_decode(*positional, **rest)


def parts(arrays):
    """Latent vectors and rotary keys, which may be empty."""
    size = arrays["w_kc"].shape[0]
    latent, rope = arrays["latent_cache"], arrays.get("rope_cache")
    return (latent[..., :size], latent[..., size:]) if rope is None else (latent, rope)


@pytest.mark.parametrize("name", CALLS)
def test_values_and_every_gradient_are_the_formula(name):
    with jax.enable_x64(True):
        arrays, options = make(name)
        names, (latent, rope) = tuple(arrays), parts(arrays)

        def call(*values):
            return run(dict(zip(names, values, strict=True)), options, cfg=MLADecodeConfig(block_k=16))

        values = [jnp.asarray(x) for x in arrays.values()]
        got = transformed.quickly(call)(*values)
        for b, length in enumerate(LENGTHS):
            if not length:
                assert not got[b].any()
                continue
            query = np.zeros((1, length, *arrays["query"].shape[1:]))
            query[0, -1] = arrays["query"][b]
            given = {"softmax_aux": arrays.get("softmax_aux"), **options}
            row = loop.Latent(
                query=query,
                key_value=latent[b : b + 1, :length],
                b_k=rope[b : b + 1, :length],
                w_kc=arrays["w_kc"],
                w_vc=arrays["w_vc"],
                options=given,
            )
            transformed.close(got[b], loop.attention(row)[0, -1], 1e-9, 1e-10)
        transformed.check_finite_differences(call, values, range(len(values)))


@pytest.mark.parametrize("name", CALLS)
def test_output_is_the_last_row_of_flash_mla(name):
    arrays, options = make(name, np.float32)
    latent, rope = parts(arrays)
    lengths = np.array([63, 5, 17, 1], np.int32)
    query = np.random.default_rng(1).normal(size=(4, 63, *arrays["query"].shape[1:])).astype(np.float32)
    rows = np.arange(4), lengths - 1
    weights = arrays["w_kc"], arrays["w_vc"]
    options |= {"softmax_aux": arrays.pop("softmax_aux")} if "softmax_aux" in arrays else {}
    rope = rope if rope.shape[2] else None
    whole = flash_mla(query, latent, *weights, None, rope, np.cumsum([0, *lengths]), causal=True, **options)
    got = run({**arrays, "query": query[rows]}, options, lengths)
    np.testing.assert_allclose(got, whole[rows], rtol=2e-5, atol=2e-5)


def test_transforms_with_traced_lengths():
    arrays, options = make("two caches, multi-query, window", np.float32)
    names = (*arrays, "lengths")

    def call(*values):
        rest = dict(zip(names, values, strict=True))
        return run(rest, options, rest.pop("lengths"))

    values = (*arrays.values(), LENGTHS)
    others = (*(x + 0.5 for x in arrays.values()), np.array([0, 63, 2, 30], np.int32))
    transformed.check_transforms(call, values, range(len(arrays)), others)
    transformed.check_no_new_compilations(call, values, others)


@pytest.mark.parametrize("joined", [True, False])
def test_no_keys_or_values_of_the_heads_exist(joined):
    batch, tokens, heads, size, rope, latent = 2, 4096, 64, 32, 8, 64
    shapes = {
        "query": (batch, heads, size + rope),
        "latent_cache": (batch, tokens, latent + (rope if joined else 0)),
        **({} if joined else {"rope_cache": (batch, tokens, rope)}),
        "w_kc": (latent, heads, size),
        "w_vc": (latent, heads, size),
    }
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    program = jax.jit(lambda arrays, lengths: run(arrays, {}, lengths)).lower(arrays, lengths).compile()
    used = program.memory_analysis().temp_size_in_bytes
    cache = batch * tokens * (latent + rope) * 4
    # The loop over tiles holds the cache; two caches are joined before.
    assert used < (1.6 if joined else 3.6) * cache
    assert used < batch * tokens * heads * size * 4 / 5  # a fifth of the keys alone


def test_t13_windows_mean_what_they_mean_in_flash_mla():
    arrays, _ = make("two caches, multi-query, window", np.float32)
    # Key q - w still counts: a window of 6 is the query and six keys before it.
    seven = {n: x[:, 63 - 7 :] if n.endswith("cache") else x for n, x in arrays.items()}
    got, want = run(arrays, {"sliding_window": 6}, LENGTHS * 0 + 63), run(seven, {}, LENGTHS * 0 + 7)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_t18_what_lies_behind_a_length_reaches_nothing():
    arrays, options = make("one cache", np.float32)
    dirty = np.where(np.arange(63)[:, None] < LENGTHS[:, None, None], arrays["latent_cache"], np.nan)
    got = run({**arrays, "latent_cache": dirty}, options)
    np.testing.assert_array_equal(got, run(arrays, options))
    assert not got[1].any()


def test_shards_are_parts_of_the_whole():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    arrays, options = make("no rotary part, cap and sinks", np.float32)
    specs = (P("dp", "tp"), P("dp"), None, P(), P(), P("dp"))
    got = run(arrays, options, mesh=mesh, in_specs=specs, out_specs=P("dp", "tp"))
    np.testing.assert_allclose(got, run(arrays, options), rtol=2e-5, atol=2e-6)


Q, CACHE, ROPE, WK, WV, N = (
    jnp.ones((2, 4, 9)),
    *(jnp.ones(s) for s in ((2, 8, 5), (2, 8, 3), (5, 2, 6), (5, 2, 4))),
    np.array([3, 0]),
)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((Q[:, None], CACHE, ROPE, WK, WV, N), r"query: got shape \(2, 1, 4, 9\), wants \[B, H, Dq\]"),
        ((Q, CACHE, ROPE[:, :4], WK, WV, N), r"rope_cache: got shape \(2, 4, 3\), wants \[B=2, S=8, Dr\]"),
        ((Q, CACHE, None, WK, WV, N), r"query: got a head size of 9, wants Dn \+ Dr = 6 \+ 0"),
        ((Q, CACHE[..., :3], None, WK, WV, N), r"latent_cache: got shape \(2, 8, 3\), wants \[B, S, R=5\] or more"),
        ((Q, CACHE, ROPE, WK[:4], WV, N), r"w_kc: got shape \(4, 2, 6\), wants \[R=5, Hk, Dn\]"),
        ((Q, CACHE, ROPE, WK, WV, N[:1] * 0), r"lengths: got shape \(1,\), wants \[B=2\]"),
        ((Q, CACHE, ROPE, WK, WV, N[:2] * 0.0), "lengths: got dtype float"),
        ((Q, CACHE, ROPE, WK, WV, jnp.array([9, 0])), r"lengths: got \[9, 0\], wants lengths from 0 to the cache's 8"),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(arguments, says):
    with pytest.raises(ValueError, match=says):
        mla_decode(*arguments)


def test_the_class_runs_the_operation():
    assert flash_mla_decode is mla_decode
    arguments = (Q, CACHE, ROPE, WK, WV, jnp.array([8, 2]))
    np.testing.assert_array_equal(MLADecode().run(*arguments), mla_decode(*arguments))
