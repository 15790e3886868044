"""`relative_bias` of `flash_attention`, against the bias in memory that it stands for."""

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel.modules import flash_attention
from ejkernel.modules.operations.configs import FlashAttentionConfig
from ejkernel.modules.operations.flash_attention import OP
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.types import MaskInfo

KEYS = jax.random.split(jax.random.key(0), 4)
QUERY = jax.random.normal(KEYS[0], (2, 19, 4, 8))
KEY, VALUE = jax.random.normal(KEYS[1], (2, 2, 23, 2, 8))
TABLE = jax.random.normal(KEYS[2], (4, 2 * 6 + 1))
SMALL = dict(rtol=2e-5, atol=2e-5)
TILES = FlashAttentionConfig(
    fwd_params=FwdParams(q_blocksize=7, kv_blocksize=5), bwd_params=BwdParams(q_blocksize=5, kv_blocksize=7)
)


def in_memory(table: jax.Array, queries: int, keys: int) -> jax.Array:
    """The bias [1, H, T, S] of a table."""
    farthest = table.shape[1] // 2
    distance = np.arange(keys) - np.arange(queries)[:, None]
    return table[:, farthest + np.clip(distance, -farthest, farthest)][None]


def results(given, options, cfg=None):
    """Value and gradients of a call; `given` takes a table to the arguments that stand for it."""

    def loss(table, *arrays):
        return jnp.sum(jnp.sin(flash_attention(*arrays, **given(table), **options, platform="xla", cfg=cfg)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(TABLE, QUERY, KEY, VALUE)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"logits_soft_cap": 2.0, "sliding_window": 5, "softmax_aux": jnp.arange(4.0)}],
    ids=["plain", "causal", "cap, window, sinks"],
)
@pytest.mark.parametrize("cfg", [None, TILES], ids=["default tiles", "odd tiles"])
def test_a_table_is_a_bias_of_distances_with_its_gradient(options, cfg):
    got = results(lambda table: {"relative_bias": table}, options, cfg)
    want = results(lambda table: {"bias": in_memory(table, 19, 23)}, options)
    assert np.abs(want[1][0]).min(axis=0).max() > 1e-3
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, **SMALL)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_minus_infinity_masks_its_distance_alone(cap):
    table = TABLE.at[:, :2].set(-jnp.inf).at[1, 9].set(-jnp.inf)

    def results(given):
        def loss(table, query):
            output = flash_attention(query, KEY, VALUE, **given(table), logits_soft_cap=cap, platform="xla", cfg=TILES)
            return jnp.sum(jnp.sin(output))

        return jax.value_and_grad(loss, argnums=(0, 1))(table, QUERY)

    got = results(lambda table: {"relative_bias": table})
    want = results(lambda table: {"bias": in_memory(table, 19, 23)})
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, **SMALL)


def test_the_reference_is_the_loop():
    query, key, value, table = (np.asarray(x, np.float64) for x in (QUERY[:1, :7], KEY[:1, :9], VALUE[:1, :9], TABLE))
    call = naive.Call(query=query, key=key, value=value, relative_bias=table, causal=True, logits_soft_cap=2.0)
    with jax.enable_x64(True):
        record, _ = OP.bind((query, key, value), {"relative_bias": table, "causal": True, "logits_soft_cap": 2.0})
        np.testing.assert_allclose(OP.reference(record), naive.attention(call), rtol=1e-11, atol=1e-12)


def test_packed_sequences_share_the_table():
    starts = jnp.array([0, 5, 19])
    got = flash_attention(QUERY[:1], KEY[:1, :19], VALUE[:1, :19], cum_seqlens_q=starts, relative_bias=TABLE)
    for one, other in ((0, 5), (5, 19)):
        arrays = (x[:1, one:other] for x in (QUERY, KEY, VALUE))
        np.testing.assert_allclose(got[:, one:other], flash_attention(*arrays, relative_bias=TABLE), **SMALL)


def test_heads_and_tokens_of_a_table_are_those_of_the_whole_call():
    mesh = jax.make_mesh((2,), ("tp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = P(None, None, "tp")
    placed = {"mesh": mesh, "in_specs": (spec, spec, spec), "out_specs": spec}
    got = flash_attention(QUERY, KEY, VALUE, relative_bias=TABLE, **placed)
    np.testing.assert_allclose(got, flash_attention(QUERY, KEY, VALUE, relative_bias=TABLE), **SMALL)


def test_no_array_has_both_axes_of_tokens():
    tokens = 8192
    shape = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((1, 257), jnp.float32)

    def loss(query, key, value, table):
        return jnp.sum(flash_attention(query, key, value, relative_bias=table, platform="xla"))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(shape, shape, shape, table).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens**2  # a quarter of a float32 array with both


def test_kernels_without_the_term_refuse_it_by_name():
    table = str(ejkernel.explain(flash_attention, QUERY, KEY, VALUE, relative_bias=TABLE))
    assert "relative_bias" in table


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"relative_bias": TABLE[:3]}, r"relative_bias: got shape \(3, 13\)"),
        ({"relative_bias": TABLE[:, 1:]}, r"relative_bias: got shape \(4, 12\), wants \[H, 2 R \+ 1\]"),
        ({"relative_bias": TABLE.astype(jnp.int32)}, "relative_bias: got"),
        (
            {"relative_bias": TABLE, "mask_info": MaskInfo(q_positions=jnp.arange(19)[None])},
            "relative_bias: got a value with mask_info.q_positions",
        ),
        (
            {"relative_bias": TABLE, "cum_seqlens_q": jnp.array([0, 19]), "cum_seqlens_k": jnp.array([0, 23])},
            "relative_bias: got a value with cum_seqlens_k",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(given, message):
    rows = slice(1) if "cum_seqlens_q" in given else slice(None)
    with pytest.raises(ValueError, match=message):
        flash_attention(QUERY[rows], KEY[rows], VALUE[rows], **given)
