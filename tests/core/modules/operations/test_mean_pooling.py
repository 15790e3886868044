"""`mean_pooling`: what it computes, under every transformation, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import segment_pooling_loop
import transformed
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.modules import MeanPooling, MeanPoolingConfig, mean_pooling
from ejkernel.modules.operations.mean_pooling import OP, MeanPoolingArguments

# shape of x, lengths of the sequences, chunk size
CALLS = {
    "one token": ((1, 1, 3), None, None),
    "rows": ((2, 63, 6), None, None),
    "chunks": ((2, 63, 6), None, 16),
    "chunks of heads": ((2, 129, 2, 3), None, 32),
    "chunks longer than rows": ((2, 5, 2, 3), None, 32),
    "packed": ((129, 6), [0, 40, 0, 60, 29, 0], None),
    "packed with tokens left over": ((1, 63, 6), [1, 20], None),
    "packed chunks": ((129, 6), [33, 0, 1, 64, 20], 16),
    "packed chunks of heads": ((1, 63, 2, 30), [0, 17, 46], 8),
    "padded rows": ((3, 63, 6), [63, 0, 5], None),
    "padded rows, chunks": ((3, 63, 6), [63, 0, 33], 16),
}


def cumulative(lengths):
    return None if lengths is None else jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def make(name, dtype=np.float64):
    shape, lengths, size = CALLS[name]
    return np.random.default_rng(0).normal(size=shape).astype(dtype), lengths, size


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_the_formula(name):
    with jax.enable_x64(True):
        x, lengths, size = make(name)
        cum = cumulative(lengths)

        def call(x):
            return mean_pooling(x, cum, chunk_size=size, platform="xla", cfg=MeanPoolingConfig(block_size=8))

        def meaning(x):
            return OP.reference(MeanPoolingArguments(x=x, cu_seqlens=cum, chunk_size=size))

        got, (gradient,) = transformed.quickly(transformed.graded(call, [0]))(x)
        want, (wanted,) = transformed.quickly(transformed.graded(meaning, [0]))(x)
        transformed.close(got, segment_pooling_loop.mean_pooling(x, lengths, size), 1e-12, 1e-13)
        transformed.close((got, gradient), (want, wanted), 1e-12, 1e-13)
        transformed.check_finite_differences(call, [jnp.asarray(x)], [0])


@pytest.mark.parametrize("name", ["rows", "packed chunks", "padded rows"])
def test_transforms(name):
    x, lengths, size = make(name, np.float32)
    if lengths is None:
        arrays, others = (x,), (x + 1,)
        transformed.check_transforms(lambda x: mean_pooling(x, chunk_size=size), arrays, [0], others)
        return
    arrays, others = (x, cumulative(lengths)), (x + 1, cumulative(lengths[::-1]))
    transformed.check_transforms(lambda x, cum: mean_pooling(x, cum, chunk_size=size), arrays, [0], others)
    transformed.check_no_new_compilations(lambda x, cum: mean_pooling(x, cum, chunk_size=size), arrays, others)


def test_t5_a_configuration_changes_no_answer_whatever_the_chunk_size_is():
    x = jax.random.normal(jax.random.key(0), (1, 100, 2, 4))
    cum = jnp.array([0, 30, 100])
    for size in (None, 32):
        want = mean_pooling(x, cum, chunk_size=size)
        assert want.shape == (1, 5, 2, 4)  # of (100 + 2 * 31) // 32, one and three of them used
        for block in (16, 64, 512):
            got = mean_pooling(x, cum, chunk_size=size, cfg=MeanPoolingConfig(block_size=block))
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_a_chunk_size_is_never_ignored():
    x = jax.random.normal(jax.random.key(0), (2, 8, 4))
    assert mean_pooling(x).shape == (2, 4)
    assert mean_pooling(x, chunk_size=4).shape == (2, 2, 4)
    assert mean_pooling(x[..., None, :]).shape == (2, 1, 1, 4)


def test_padding_tokens_reach_no_output_or_gradient():
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    x[15:] = np.nan
    cum = jnp.array([0, 4, 15])
    output, gradient = mean_pooling(x, cum), jax.grad(lambda x: mean_pooling(x, cum).sum())(x)
    assert bool(jnp.isfinite(output).all())
    assert bool((gradient[15:] == 0).all())
    rows = np.where(np.arange(20)[:, None] < 15, x[None], np.nan).repeat(2, 0)
    assert bool(jnp.isfinite(mean_pooling(rows, jnp.array([0, 15, 15]))).all())


@pytest.mark.parametrize("lengths", [None, (0, 700)], ids=["chunks", "packed"])
def test_temporary_memory_grows_linearly(lengths):
    def used(tokens):
        cum = None if lengths is None else jnp.array([*lengths, tokens])
        call = transformed.temporary_bytes
        return call(lambda x: mean_pooling(x, cum, chunk_size=100), [jnp.zeros((1, tokens, 64))], [0])

    short, long = used(4096), used(8192)
    assert long <= 2.1 * short + 4096
    assert long <= 3 * 8192 * 64 * 4


@pytest.mark.parametrize("x", ["b t d", "b t h d"])
def test_shards_are_parts_of_the_whole(x):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), devices=jax.devices(), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shape, size = ((2, 10, 8), None) if x == "b t d" else ((2, 10, 4, 3), 4)
    spec = P("dp", None, "tp")
    out = P("dp", "tp") if x == "b t d" else spec
    x, cum = jax.random.normal(jax.random.key(0), shape), jnp.array([0, 7, 17])

    def call(x, **options):
        return mean_pooling(x, cum, chunk_size=size, **options)

    def placed(x):
        return call(x, mesh=mesh, in_specs=(spec,), out_specs=out)

    got = transformed.quickly(transformed.graded(placed, [0]))(x)
    transformed.close(got, transformed.graded(call, [0])(x))
    with pytest.raises(ValueError, match="cannot be split"):
        call(x, mesh=mesh, in_specs=(P(None, "tp"),), out_specs=P())


X = jnp.zeros((2, 8, 3))


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((jnp.zeros((8,)),), {}, r"x: got an array float32\[8\], wants \[B, T, C\]"),
        ((jnp.zeros((8, 3)),), {}, r"cu_seqlens: got None with x of shape \(8, 3\)"),
        ((jnp.zeros((2, 0, 3)),), {}, r"x: got shape \(2, 0, 3\), wants T of at least 1"),
        ((jnp.zeros((2, 8, 3), int),), {}, "x: got dtype int32, wants a floating dtype"),
        ((X, jnp.array([0, 8])), {}, r"cu_seqlens: got shape \(2,\), wants \[B\+1=3\]"),
        ((X[:1], jnp.array([0])), {}, r"cu_seqlens: got shape \(1,\), wants \[N \+ 1\]"),
        ((X[:1], jnp.array([0.0, 8.0])), {}, "cu_seqlens: got dtype float32, wants an integer dtype"),
        ((X[:1], jnp.array([0, 9])), {}, r"cu_seqlens: got \[0, 9\], wants lengths that"),
        ((X,), {"chunk_size": 0}, "chunk_size: got int 0, wants an int of at least 1"),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(arguments, options, says):
    with pytest.raises(ValueError, match=says):
        mean_pooling(*arguments, **options)


def test_the_class_runs_the_operation():
    pooling = MeanPooling()
    np.testing.assert_array_equal(pooling.run(X + 1), jnp.ones((2, 3)))
    assert pooling.op_id == "mean_pooling"


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    size=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 99),
)
def test_random_lengths_match_the_formula(lengths, size, seed):
    x = np.random.default_rng(seed).normal(size=(36, 3))
    got = mean_pooling(x.astype(np.float32), cumulative(lengths), chunk_size=size)
    np.testing.assert_allclose(got, segment_pooling_loop.mean_pooling(x, lengths, size), rtol=2e-6, atol=2e-6)
