"""`flash_attention` on a mesh of eight forced host devices: the numbers of the unsharded call, however it is split."""

import flash_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import FlashAttention, create_default_executor, flash_attention
from ejkernel.types import MaskInfo

B, T, S, H, G, D = 2, 16, 16, 8, 4, 8
QUERY = jax.random.normal(jax.random.key(0), (B, T, H, D))
KEY, VALUE = jax.random.normal(jax.random.key(1), (2, B, S, G, D))
BIAS = jax.random.normal(jax.random.key(2), (B, H, T, S))
SINKS = jax.random.normal(jax.random.key(3), (H, 2))
IDS = jnp.asarray([[0] * 9 + [1] * 7, [0] * 13 + [-1] * 3], jnp.int32)
MASK = jax.random.bernoulli(jax.random.key(4), 0.7, (B, 1, T, S))
TILES = flash_calls.tiles(8, 8)

MESHES = {"2x2x2": (2, 2, 2), "1x1x8": (1, 1, 8), "1x4x2": (1, 4, 2), "1x1x1": (1, 1, 1)}


def mesh_of(sizes, axis_type=AxisType.Auto):
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, ("dp", "sp", "tp"), (axis_type,) * 3, devices=jax.devices()[:count])


def quickly(function, *arguments):
    return jax.jit(function, compiler_options=flash_calls.QUICK)(*arguments)


def specs(query, key=None):
    """Three specs and the output's."""
    key = P(query[0], None, query[2]) if key is None else key
    return {"in_specs": (query, key, key), "out_specs": query}


def test_there_are_eight_devices():
    assert jax.device_count() == 8


# How the problem is split, by a name, a mesh, and a spec of [batch, queries, heads].
SPLITS = {
    "batch": ("2x2x2", P("dp", None, None)),
    "heads": ("2x2x2", P(None, None, "tp")),
    "queries": ("1x4x2", P(None, "sp", None)),
    "batch and heads": ("2x2x2", P("dp", None, "tp")),
    "batch, queries and heads": ("2x2x2", P("dp", "sp", "tp")),
    "queries over two axes": ("1x4x2", P(None, ("sp", "tp"), None)),
    "one device": ("1x1x1", P("dp", "sp", "tp")),
}
EVERYTHING = {"causal": True, "sliding_window": (9, 3), "dropout_prob": 0.3, "cfg": TILES, "logits_soft_cap": 4.0}


def everything(floats, **options):
    """Bias, sinks, mask and segments are present, and the caller gives no specs for them."""
    query, key, value, bias, sinks = floats
    info = MaskInfo(_attention_mask=MASK, _q_segment_ids=IDS, _kv_segment_ids=IDS)
    seed = jnp.uint32(9)
    given = {"mask_info": info, "dropout_seed": seed, **EVERYTHING, **options}
    return flash_attention(query, key, value, bias, None, None, sinks, **given)


FLOATS = (QUERY, KEY, VALUE, BIAS, SINKS)


def graded(**options):
    def loss(floats):
        output = everything(floats, **options)
        return jnp.sum(output**2), output

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=flash_calls.QUICK)(FLOATS)


@pytest.fixture(scope="module")
def unsharded():
    return graded()


def check(got, want):
    (_, output), gradients = got
    (_, wanted), wanted_gradients = want
    np.testing.assert_allclose(output, wanted, rtol=2e-5, atol=2e-6)
    for name, gradient, other in zip("qkvbs", gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("split", SPLITS)
def test_values_and_all_gradients_are_those_of_the_unsharded_call(split, unsharded):
    mesh, query = SPLITS[split]
    check(graded(mesh=mesh_of(MESHES[mesh]), **specs(query)), unsharded)


def test_explicit_meshes_serve_too_inside_and_outside_of_set_mesh(unsharded):
    mesh = mesh_of((2, 2, 2), AxisType.Explicit)
    options = {"mesh": mesh, **specs(P("dp", "sp", "tp"))}
    check(graded(**options), unsharded)
    with jax.set_mesh(mesh):
        check(graded(**options), unsharded)
    placed = [jax.device_put(x, NamedSharding(mesh, P("dp"))) for x in (QUERY, KEY, VALUE)]
    output = everything((*placed, BIAS, SINKS), **options)
    assert output.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "sp", "tp")), output.ndim)
    np.testing.assert_allclose(output, unsharded[0][1], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("sinks", [SINKS[0], SINKS], ids=["shared", "by head"])
def test_t30_three_to_seven_specs_in_public_order(sinks):
    mesh, heads = mesh_of((2, 2, 2)), P(None, None, "tp")
    full = [QUERY, KEY, VALUE, BIAS[:, :, :1], None, None, sinks]
    given = [heads, heads, heads, P(None, "tp"), None, None, P("tp") if sinks.ndim == 2 else P()]
    want = quickly(lambda: flash_attention(*full, causal=True, cfg=TILES))
    for count in (3, 4, 7) if sinks.ndim == 2 else (7,):
        options = {"mesh": mesh, "in_specs": tuple(given[:count]), "out_specs": heads}
        got = quickly(lambda options=options: flash_attention(*full, causal=True, cfg=TILES, **options))
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, heads), got.ndim)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("rows", "cum_q", "cum_k"),
    [(1, [0, 5, 5, 14], None), (1, [0, 5, 5, 14], [0, 2, 9, 16]), (2, [0, 11, 27], None)],
    ids=["packed", "packed apart", "padded rows"],
)
def test_cumulative_lengths_without_specs(rows, cum_q, cum_k):
    mesh = mesh_of((1, 4, 2))
    arrays = [x[:rows] for x in (QUERY, KEY, VALUE)]
    cum = [None if c is None else jnp.array(c, jnp.int32) for c in (cum_q, cum_k)]
    options = {"causal": True, "sliding_window": 4, "cfg": TILES}
    sharded = {"mesh": mesh, **specs(P(None, "sp", "tp"))}
    got = quickly(lambda cum: flash_attention(*arrays, None, *cum, **sharded, **options), cum)
    want = quickly(lambda cum: flash_attention(*arrays, None, *cum, **options), cum)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_one_kv_head_serves_the_heads_of_all_devices():
    mesh, query = mesh_of((1, 1, 8)), P(None, None, "tp")
    arrays = (QUERY, KEY[:, :, :1], VALUE[:, :, :1])
    options = {"mesh": mesh, "in_specs": (query, P(), P()), "out_specs": query}

    def gradient(**options):
        return quickly(jax.grad(lambda x: jnp.sum(flash_attention(*x, causal=True, cfg=TILES, **options) ** 2)), arrays)

    got, want = gradient(**options), gradient()
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_dropout_drops_the_same_weights_on_every_mesh():
    zero = jnp.zeros((B, T, H, D))
    unit = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, H, S))
    options = {"dropout_prob": 0.5, "dropout_seed": 4, "cfg": TILES}
    want = np.asarray(flash_attention(zero, zero, unit, **options)) > 0
    assert 0.45 < want.mean() < 0.55
    for sizes in ((2, 2, 2), (1, 4, 2), (1, 1, 8)):
        sharded = {"mesh": mesh_of(sizes), **specs(P("dp", "sp", "tp"))}
        got = quickly(lambda sharded=sharded: flash_attention(zero, zero, unit, **options, **sharded))
        np.testing.assert_array_equal(np.asarray(got) > 0, want)


def test_executors_and_kernel_objects_take_meshes():
    mesh, options = mesh_of((2, 2, 2)), specs(P("dp", "sp", "tp"))
    attention, executor = FlashAttention(), create_default_executor(enable_autotuning=False)
    want = flash_attention(QUERY, KEY, VALUE, causal=True)
    wrapped, arguments = attention.create_shard_map_wrapper(
        attention.run, QUERY, KEY, VALUE, causal=True, mesh=mesh, **options
    )
    for got in (executor(attention, QUERY, KEY, VALUE, causal=True, mesh=mesh, **options), wrapped(*arguments)):
        assert len(got.sharding.device_set) == 8
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
