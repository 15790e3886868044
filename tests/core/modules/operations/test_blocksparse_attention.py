"""`blocksparse_attention`: the formula over patterns, in tiles smaller than they are, and what else restricts pairs."""

import dataclasses
import functools

import dense_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from dense_calls import make, normal, some
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    BlockSparseAttention,
    BlockSparseAttentionConfig,
    blocksparse_attention,
    create_default_executor,
    flash_attention,
)
from ejkernel.modules.operations.blocksparse_attention import BlockSparseAttentionArguments, lower
from ejkernel.types import MaskInfo
from ejkernel.types.sparse_masks import CausalMask, ChunkedCausalMask, FullMask, LocalMask, MultiHeadMask, NumpyMask

B, T, S, H, G, D = 2, 16, 16, 4, 2, 8
QUERY = jax.random.normal(jax.random.key(0), (B, H, T, D))
KEY, VALUE = jax.random.normal(jax.random.key(1), (2, B, G, S, D))
TILES = BlockSparseAttentionConfig(
    fwd_params={"q_blocksize": 4, "kv_blocksize": 4}, bwd_params={"q_blocksize": 4, "kv_blocksize": 8}
)
SCATTERED = np.kron(np.random.default_rng(3).random((4, 6)) < 0.4, np.ones((4, 4), bool))[:13, :21]
POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3]])  # they restart, as those of packed sequences do


def by_head(q_len, kv_len, num_heads, head, _):
    shape = (q_len, kv_len)
    return LocalMask(shape, (1, 4)) if head % 2 else ChunkedCausalMask(shape, 5) | CausalMask(shape, -6)


def said_by_head(h, q, k):
    return q - 1 <= k <= q + 4 if h % 2 else (k <= q and k // 5 == q // 5) or k <= q - 6


# The pattern, the same said of one pair of one head, and the rest of the call.
CALLS = {
    "one token": (None, None, make((1, 1, 6, 5), (2, 2), causal=True)),
    "no pattern, 129 keys": (None, None, make((1, 129, 60, 5), (8, 1))),
    "local, 63 tokens": (
        lambda q, k, *_: LocalMask((q, k), (5, 2)),
        lambda h, q, k: q - 5 <= k <= q + 2,
        make((63, 63, 4, 4), (1, 1)),
    ),
    "patterns by head, sinks": (by_head, said_by_head, make(softmax_aux=normal(4, 2), logits_soft_cap=2.0)),
    "patterns by head, multi-query, causal": (by_head, said_by_head, make(heads=(4, 1), causal=True)),
    "scattered, mask by head, bias": (
        lambda: NumpyMask(SCATTERED),
        lambda h, q, k: SCATTERED[q, k],
        make(mask=some(2, 4, 13, 21), bias=normal(1, 4, 13, 21)),
    ),
    "positions, window": (
        lambda q, k, *_: ChunkedCausalMask((q, k), 8),
        lambda h, q, k: k <= q and k // 8 == q // 8,
        make((13, 13, 6, 5), q_positions=POSITIONS, kv_positions=POSITIONS, causal=True, sliding_window=(2, 0)),
    ),
}


def loop(call, said):
    """Head-major output by the naive loop, with the pattern as a mask."""
    if said is not None:
        (t, s), heads = (call.query.shape[1], call.key.shape[1]), call.query.shape[2]
        inside = np.array([[[said(h, q, k) for k in range(s)] for q in range(t)] for h in range(heads)], bool)[None]
        call = dataclasses.replace(call, mask=inside if call.mask is None else inside & call.mask)
    return dense_calls.output(call).swapaxes(1, 2)


def run(call, floats, **more):
    """The public call, in tiles of a few tokens; the mask is given as `attention_mask`."""
    heads_first = {n: x.swapaxes(1, 2) if n in ("query", "key", "value") else x for n, x in floats.items()}
    mask = None if call.mask is None else jnp.asarray(call.mask)
    given = dense_calls.options(dataclasses.replace(call, mask=None))
    cap = call.logits_soft_cap
    return blocksparse_attention(
        **heads_first, **given, attention_mask=mask, logits_soft_cap=cap, **{"cfg": TILES, **more}
    )


@pytest.mark.parametrize("name", CALLS)
def test_output_is_the_formula_and_gradients_are_finite_differences(name):
    builder, said, call = CALLS[name]
    with jax.enable_x64(True):
        output = transformed.checked(functools.partial(run, call, mask_builder=builder), dense_calls.arrays(call))
    np.testing.assert_allclose(output, loop(call, said), rtol=1e-11, atol=1e-12)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.sampled_from([(1, 9), (9, 1), (9, 9)]),
    chunk=st.integers(1, 4),
    window=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_patterns_match_the_formula(lengths, chunk, window, causal, seed):
    (left, right), call = window, make((*lengths, 3, 2), (2, 1), seed, causal=causal)
    pattern = ChunkedCausalMask(lengths, chunk) | LocalMask(lengths, window)
    got = transformed.quickly(lambda: run(call, dense_calls.arrays(call, jnp.float32), mask_builder=pattern))()
    want = loop(call, lambda h, q, k: (k <= q and k // chunk == q // chunk) or q - left <= k <= q + right)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_without_a_pattern_it_is_causal_flash_attention_with_heads_first():
    arrays = [x.swapaxes(1, 2) for x in (QUERY, KEY, VALUE)]
    sinks, bias = jnp.array([0.3, -1.0]), jax.random.normal(jax.random.key(2), (1, H, T, S))
    want = flash_attention(*arrays, bias, None, None, sinks, causal=True, sliding_window=3, softmax_scale=0.2)
    got = blocksparse_attention(QUERY, KEY, VALUE, sinks, bias, sliding_window=3, softmax_scale=0.2, cfg=TILES)
    close(got, want.swapaxes(1, 2))


def reached(**options):
    """Which pairs have weight, [H, T, S], from values of which each key has its own."""
    unit = jnp.broadcast_to(jnp.eye(S), (B, G, S, S))
    return np.asarray(blocksparse_attention(QUERY, KEY, unit, cfg=TILES, **options))[0] > 0


STEPS = np.arange(S) - np.arange(T)[:, None]


def test_t13_an_int_window_reaches_as_far_on_both_sides_and_includes_its_ends():
    np.testing.assert_array_equal(reached(sliding_window=2, causal=False)[0], abs(STEPS) <= 2)
    np.testing.assert_array_equal(reached(sliding_window=2)[0], (STEPS <= 0) & (STEPS >= -2))


def test_t18_rows_with_nothing_to_attend_are_zero_with_zero_gradients():
    pattern = LocalMask((T, S), (None, None)) & CausalMask((T, S), -3)  # the first three queries have no keys

    def compute(query):
        return blocksparse_attention(query, KEY, VALUE, mask_builder=pattern, cfg=TILES)

    output, gradient = compute(QUERY), jax.grad(lambda query: (compute(query) ** 2).sum())(QUERY)
    assert not np.asarray(output)[:, :, :3].any()
    assert not np.asarray(gradient)[:, :, :3].any()
    assert np.isfinite(gradient).all()
    assert np.asarray(output)[:, :, 3].any()


def test_t28_every_source_of_a_pattern_restricts_pairs():
    chunks = np.arange(S) // 5 == np.arange(T)[:, None] // 5
    np.testing.assert_array_equal(reached(chunk_size=5)[0], chunks & (STEPS <= 0))
    np.testing.assert_array_equal(reached(chunk_size=5, causal=False)[0], chunks)
    local = reached(mask_builder=lambda q, k, *_: LocalMask((q, k), (2, 1)), causal=False)
    np.testing.assert_array_equal(local[0], (STEPS >= -2) & (STEPS <= 1))
    everything = reached(mask_builder=LocalMask((T, S), (2, 1)), chunk_size=5, sliding_window=(1, 9))
    np.testing.assert_array_equal(everything[0], chunks & (STEPS >= -1) & (STEPS <= 0))


def test_t28_causal_goes_by_positions_alone_where_there_are_any():
    places = jnp.arange(T)[None, ::-1]  # the first token stands last
    info = MaskInfo(q_positions=places, kv_positions=places)
    np.testing.assert_array_equal(reached(mask_info=info)[0], STEPS >= 0)
    chunks = np.asarray(places // 5)[0]
    np.testing.assert_array_equal(reached(mask_info=info, chunk_size=5)[0], (STEPS >= 0) & (chunks == chunks[:, None]))


def test_t28_every_head_of_a_mask_counts_beside_that_of_mask_info():
    heads, shared = some(1, H, T, S), some(B, 1, T, S, seed=9)
    info = MaskInfo(_attention_mask=jnp.asarray(shared))
    got = reached(attention_mask=jnp.asarray(heads), mask_info=info, causal=False)
    np.testing.assert_array_equal(got, heads[0] & shared[0])
    as_ints = reached(attention_mask=jnp.asarray(heads, jnp.int32) * 7, mask_info=info, causal=False)
    np.testing.assert_array_equal(as_ints, got)


def test_chunks_restart_with_segments_and_padding_rows_are_zero():
    ids = jnp.array([[0] * 6 + [1] * 7 + [-1] * 3] * B)
    got = reached(mask_info=MaskInfo.from_segments(ids), chunk_size=4)[0]
    same = (np.asarray(ids[0]) == np.asarray(ids[0])[:, None]) & (np.asarray(ids[0]) >= 0)
    chunks = np.arange(S) // 4 == np.arange(T)[:, None] // 4
    np.testing.assert_array_equal(got, same & chunks & (STEPS <= 0))
    for purify in (False, True):
        output = blocksparse_attention(QUERY, KEY, VALUE, mask_info=MaskInfo.from_segments(ids), purify=purify)
        assert not np.asarray(output)[:, :, -3:].any()
        assert np.asarray(output)[:, :, 12].any()


def test_builders_are_asked_for_every_head_or_once():
    asked = []

    def five(*sizes):
        asked.append(sizes)
        return CausalMask(sizes[:2])

    want = blocksparse_attention(QUERY, KEY, VALUE)
    close(blocksparse_attention(QUERY, KEY, VALUE, mask_builder=five, causal=False), want)
    assert asked == [(T, S, H, head, T) for head in range(H)]
    close(blocksparse_attention(QUERY, KEY, VALUE, mask_builder=lambda: CausalMask((T, S)), causal=False), want)
    heads = MultiHeadMask([by_head(T, S, H, head, T) for head in range(H)])
    one, other = (
        blocksparse_attention(QUERY, KEY, VALUE, mask_builder=builder, causal=False, cfg=TILES)
        for builder in (by_head, lambda: heads)
    )
    np.testing.assert_array_equal(one, other)


def test_equal_patterns_of_new_builders_compile_nothing_again():
    def call():
        return blocksparse_attention(QUERY, KEY, VALUE, mask_builder=lambda q, k, *_: NumpyMask(np.tri(q, k)))

    call()
    with transformed.compilations() as compiled:
        call()
    assert not compiled


def transformable(query, key, value, sinks, ids):
    info = MaskInfo.from_segments(ids)
    given = {"mask_builder": by_head, "causal": False, "logits_soft_cap": 4.0, "cfg": TILES}
    return blocksparse_attention(query, key, value, sinks, mask_info=info, **given)


def test_transformations_change_nothing():
    ids = jnp.array([[0] * 9 + [1] * 7, [0] * 14 + [-1] * 2])
    arrays = (QUERY, KEY, VALUE, jnp.array([0.2, -0.4]), ids)
    others = (QUERY + 1, KEY * 2, VALUE - 1, jnp.array([1.0, 0.0]), jnp.roll(ids, 2))
    transformed.check_transforms(transformable, arrays, (0, 1, 2, 3), others)
    transformed.check_no_new_compilations(transformable, arrays, others)


@pytest.mark.parametrize(
    "spec", [P("dp", "tp", "sp"), P(None, None, ("sp", "tp"))], ids=["rows, heads and queries", "queries"]
)
def test_a_mesh_changes_nothing_and_shards_find_their_part_of_the_pattern(spec):
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), devices=jax.devices()[:8])
    mask = jnp.asarray(some(B, H, T, S))
    info = MaskInfo(_q_segment_ids=jnp.zeros((B, T), int), _kv_segment_ids=jnp.zeros((B, S), int))
    given = {"mask_builder": by_head, "attention_mask": mask, "mask_info": info, "chunk_size": 12, "cfg": TILES}

    def both(**options):
        def loss(arrays):
            output = blocksparse_attention(*arrays, jnp.array([0.4]), causal=False, **given, **options)
            return (output**2).sum(), output

        return transformed.quickly(jax.value_and_grad(loss, has_aux=True))((QUERY, KEY, VALUE))

    keys = P(spec[0], spec[1])
    got = both(mesh=mesh, in_specs=(spec, keys, keys), out_specs=spec)
    assert len(got[0][1].sharding.device_set) == 8
    transformed.close(got, both(), atol=1e-5)


def test_memory_of_the_gradient_is_linear():
    def bytes_at(length):
        shapes = [jax.ShapeDtypeStruct((1, heads, length, 16), jnp.float32) for heads in (2, 1, 1)]
        builder = lambda q, k, n, head, _: LocalMask((q, k), (100 * (head + 1), 0))  # noqa: E731
        return transformed.temporary_bytes(
            lambda *x: blocksparse_attention(*x, mask_builder=builder), shapes, (0, 1, 2)
        )

    short, long = bytes_at(3072), bytes_at(6144)
    assert short < long <= 2.1 * short
    assert long < 6144**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": QUERY[0]}, r"query: got shape \(4, 16, 8\), wants \[B, H, T, D\]"),
        ({"key": KEY.swapaxes(1, 2)}, r"value: got shape \(2, 2, 16, 8\), wants \[B=2, Hk=16, S=2, V\]"),
        ({"key": KEY[..., :4]}, r"key: got shape \(2, 2, 16, 4\), wants \[B=2, Hk, S, D=8\]"),
        (
            {"key": jnp.ones((B, 3, S, D)), "value": jnp.ones((B, 3, S, D))},
            "with 3 heads, wants a divisor of query's 4",
        ),
        ({"bias": jnp.ones((B, 3, T, S))}, r"bias: got shape \(2, 3, 16, 16\), wants .*H=4 or 1"),
        ({"attention_mask": jnp.ones((B, T, S), bool)}, r"attention_mask: got shape \(2, 16, 16\), wants"),
        ({"attention_mask": jnp.ones((B, 1, T, S))}, "attention_mask: got dtype float32, wants bool or an integer"),
        ({"mask_builder": 3}, "mask_builder: got int 3, wants a callable"),
        ({"mask_builder": lambda: (1, 2, 3)}, "mask_builder: returned tuple .* wants a Mask .*; qkv_layouts are not"),
        (
            {"mask_builder": CausalMask((T, S - 1))},
            r"mask_builder: got a mask of shape \(16, 15\), wants \[T=16, S=16\]",
        ),
        ({"mask_builder": MultiHeadMask([CausalMask((T, S))])}, "got masks of 1 heads, wants those of query's 4"),
        ({"mask_builder": lambda: MultiHeadMask([CausalMask((T, S))])}, "returned masks of 1 heads"),
        ({"chunk_size": 0}, "chunk_size: got int 0, wants an int of at least 1"),
        ({"causal": None}, "causal: got NoneType None, wants True or False"),
        ({"purify": 1}, "purify: got int 1, wants True or False"),
        ({"fused_backward": "yes"}, "fused_backward: got str 'yes', wants True or False"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        blocksparse_attention(**{"query": QUERY, "key": KEY, "value": VALUE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_layouts": ((jnp.zeros((B, 1, 4)),) * 4,) * 3}, "qkv_layouts: got a value, wants None: .* mask_builder"),
        ({"sequence_parallelism_mesh_axis_name": "sp"}, "sequence_parallelism_mesh_axis_name: got 'sp'; .* in_specs"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(change, message):
    with pytest.raises(NotImplementedError, match=message):
        blocksparse_attention(QUERY, KEY, VALUE, **change)


def test_kernel_objects_and_executors_call_it():
    executor = create_default_executor(enable_autotuning=False)
    want = blocksparse_attention(QUERY, KEY, VALUE, mask_builder=by_head)
    for got in (
        executor(BlockSparseAttention(), QUERY, KEY, VALUE, mask_builder=by_head),
        BlockSparseAttention().get_impl(TILES)(QUERY, KEY, VALUE, mask_builder=by_head, fused_backward=True),
    ):
        close(got, want)


@pytest.mark.parametrize(
    ("pattern", "given", "causal", "window"),
    [
        (FullMask((T, S)), {}, False, None),
        (CausalMask((T, S)), {}, True, None),
        (CausalMask((T, S)) & LocalMask((T, S), (3, 5)), {}, True, (3, None)),
        (LocalMask((T, S), (3, 5), offset=2), {"sliding_window": (4, 9)}, False, (1, 7)),
        (LocalMask((T, S), (3, None)), {"causal": True}, True, (3, None)),
    ],
)
def test_a_pattern_that_is_a_band_is_lowered_to_a_window(pattern, given, causal, window):
    options = {"causal": False, "mask_builder": pattern, "softmax_scale": 0.2, **given}
    record = lower(BlockSparseAttentionArguments(query=QUERY, key=KEY, value=VALUE, **options))
    assert (record.pattern, record.causal, record.sliding_window) == (None, causal, window)
    got = blocksparse_attention(QUERY, KEY, VALUE, cfg=TILES, **options)
    scattered = NumpyMask(np.asarray(pattern.allowed(0, 0, (T, S))))
    close(got, blocksparse_attention(QUERY, KEY, VALUE, cfg=TILES, **options | {"mask_builder": scattered}))


@pytest.mark.parametrize(
    ("pattern", "more"),
    [
        (CausalMask((T, S), -2), {}),
        (LocalMask((T, S), (1, 1)) | CausalMask((T, S), -3), {}),
        (LocalMask((T, S), (2, 2)), {"mask_info": MaskInfo(q_positions=jnp.zeros((B, T), jnp.int32)), "causal": True}),
    ],
)
def test_patterns_that_are_no_window_or_come_with_positions_stay_patterns(pattern, more):
    options = {"causal": False, "mask_builder": pattern, **more}
    assert lower(BlockSparseAttentionArguments(query=QUERY, key=KEY, value=VALUE, **options)).pattern == pattern
