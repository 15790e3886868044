"""The four ways to call `ring_attention`, and the calls that are wrong."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring_calls
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ring_calls import H, T, flash, on, quickly, ring

from ejkernel.modules import RingAttention, RingAttentionConfig, create_default_executor, ring_attention
from ejkernel.ops import autotune_recorded, clear_recorded, explain
from ejkernel.types import MaskInfo

ARRAYS = tuple(jnp.asarray(x, jnp.float32) for x in ring_calls.floats()[:3])
call = functools.partial(ring_attention, axis_name="sp")


@pytest.fixture(scope="module")
def want():
    return flash(*ARRAYS)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_t33_within_a_mesh_axis_name_needs_no_specs():
    causal, want = functools.partial(call, causal=True), flash(*ARRAYS, causal=True)
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), (AxisType.Auto,) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of `with mesh`, in favour of jax.set_mesh
        with mesh:
            legacy = causal(*ARRAYS)
    with jax.set_mesh(mesh):
        jitted = quickly(causal, *ARRAYS)
    for got in (legacy, jitted):
        close(got, want)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "sp")), got.ndim)


def test_in_jit_a_mesh_and_its_axis_are_enough():
    want = flash(*ARRAYS, causal=True)
    close(quickly(call, *ARRAYS, causal=True, mesh=ring(4)), want)
    close(call(*ARRAYS, causal=True, mesh=ring(2)), want)

    def within(*arrays):
        return call(*arrays, causal=True)

    with pytest.raises(ValueError, match=r"axis_name: got 'sp'.*pass mesh=.*outside of jax.jit"):
        jax.jit(within)(*ARRAYS)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_within_a_mesh_batch_and_heads_stay_where_they_were_placed(axis_type, want):
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), (axis_type,) * 3)
    where = NamedSharding(mesh, P("dp", "sp", "tp"))
    with jax.set_mesh(mesh):
        got = call(*(jax.device_put(x, where) for x in ARRAYS))
    close(got, want)
    assert got.sharding.is_equivalent_to(where, got.ndim)


def test_gradients_within_a_mesh_of_explicit_axes():
    loss = lambda query, run: jnp.sum(run(query, *ARRAYS[1:]) ** 2)  # noqa: E731
    with jax.set_mesh(jax.make_mesh((4,), ("sp",), (AxisType.Explicit,))):
        got = jax.grad(loss)(ARRAYS[0], call)
    np.testing.assert_allclose(got, jax.grad(loss)(ARRAYS[0], flash), atol=1e-5)


def test_under_a_shard_map_of_the_caller_arrays_are_the_devices_own(want):
    bias = jnp.asarray(ring_calls.floats(bias=(1, H, T, T))[4], jnp.float32)
    mask = ring_calls.MASK

    def inside(query, key, value, rows, mask):
        return call(query, key, value, None, rows, mask_info=MaskInfo(_attention_mask=mask))

    expected = quickly(flash, *ARRAYS, None, bias, mask_info=MaskInfo(_attention_mask=mask))
    # Rows of pairs may be the device's own, or everyone's.
    for rows in (P(None, None, "sp"), P()):
        mapped = jax.shard_map(
            inside,
            mesh=ring(4),
            in_specs=(P(None, "sp"),) * 3 + (rows, rows),
            out_specs=P(None, "sp"),
        )
        close(quickly(mapped, *ARRAYS, bias, mask), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_under_a_shard_map_of_the_caller(check_vma):
    sinks = jnp.asarray(ring_calls.floats(sinks=(3,))[3], jnp.float32)

    def graded(run):
        return jax.jit(jax.grad(lambda x: jnp.sum(run(*x) ** 2)), compiler_options=ring_calls.QUICK)((*ARRAYS, sinks))

    specs = (*((P(None, "sp"),) * 3), P())
    mapped = jax.shard_map(call, mesh=ring(4), in_specs=specs, out_specs=P(None, "sp"), check_vma=check_vma)
    for got, want in zip(graded(mapped), graded(flash), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def test_a_shard_map_of_the_caller_can_be_batched_and_be_in_a_checkpointed_scan():
    mapped = jax.shard_map(call, mesh=ring(4), in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    arrays = [jnp.stack([x, 2 * x]) for x in ARRAYS]

    def total(run, query):
        body = jax.checkpoint(lambda total, x: (total + jnp.sum(run(*x) ** 2), None))
        return jax.lax.scan(body, 0.0, (query, *arrays[1:]))[0]

    def batched_and_graded(run):
        function = lambda x: (jax.vmap(run)(*x), jax.grad(total, argnums=1)(run, x[0]))  # noqa: E731
        return jax.jit(function, compiler_options=ring_calls.QUICK)(arrays)

    for got, want in zip(batched_and_graded(mapped), batched_and_graded(flash), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)


def test_the_axis_of_a_ring_can_be_that_of_vmap_in_a_shard_map_of_the_caller():
    halves = [jnp.stack(jnp.split(x, 2, axis=1)) for x in ARRAYS]
    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])
    batched = jax.vmap(functools.partial(call, causal=True), axis_name="sp")
    got = quickly(jax.shard_map(batched, mesh=mesh, in_specs=P(None, "dp"), out_specs=P(None, "dp")), *halves)
    close(jnp.concatenate(list(got), axis=1), flash(*ARRAYS, causal=True))


def test_ring_attention_under_pmap(want):
    parts = [x.reshape(x.shape[0], 4, T // 4, *x.shape[2:]).swapaxes(0, 1) for x in ARRAYS]
    got = jax.pmap(call, axis_name="sp", devices=jax.devices()[:4])(*parts)
    close(got.swapaxes(0, 1).reshape(want.shape), want)


def test_without_an_axis_one_device_has_everything_and_queries_may_be_split(want):
    close(ring_attention(*ARRAYS), want)
    options = {"mesh": ring(4), "in_specs": (P(None, "sp"), P(), P()), "out_specs": P(None, "sp")}
    close(ring_attention(*ARRAYS, **options), want)


def test_executors_and_kernel_objects_run_ring_attention(want):
    kernel, executor = RingAttention(), create_default_executor(enable_autotuning=False)
    with jax.set_mesh(ring(4)):
        close(executor(kernel, *ARRAYS, axis_name="sp"), want)
    close(kernel.run(*ARRAYS, **on(ring(2))), want)
    decision = explain(ring_attention, *ARRAYS, causal=True, **on(ring(2)))
    assert decision.forward.implementation.name == "xla"
    # Halves of parts of 16 are 8, and no tile lies in both.
    assert decision.forward.config.block_q == decision.backward.config.block_kv == 8
    assert kernel.version == "1"


def test_upstream_arguments_have_no_effect_or_are_refused_by_name(want):
    close(ring_attention(*ARRAYS, fused_backward=True), want)
    with pytest.raises(NotImplementedError, match=r"mask_builder: .* pass mask_info.*call blocksparse_attention"):
        ring_attention(*ARRAYS, mask_builder=lambda *sizes: None)
    with pytest.raises(ValueError, match="fused_backward: got int 1, wants True or False"):
        ring_attention(*ARRAYS, fused_backward=1)


THREE = (P(None, "sp"),) * 3
WRONG = {
    "no mesh": ({"axis_name": "sp"}, r"axis_name: got 'sp', which is bound by no shard_map or pmap .*jax\.set_mesh"),
    "axis of no mesh": (on(ring(2)) | {"axis_name": "x"}, "axis_name: got 'x', the mesh has 'sp'"),
    "axis is no name": ({"axis_name": ("sp",)}, r"axis_name: got tuple \('sp',\), wants the name of one mesh axis"),
    "keys split over no axis": (on(ring(2)) | {"axis_name": None}, r"axis_name: got None with the keys split over"),
    "keys not split": (on(ring(2)) | {"in_specs": (THREE[0], P(), P())}, "in_specs: axis_name='sp' wants key's"),
    "part of a mesh": (
        {"mesh": ring(2)},
        "in_specs, out_specs: got None, wants a value: mesh, in_specs and out_specs go",
    ),
    "specs without a mesh": (
        {"axis_name": "sp", "in_specs": (P(None, "sp"),) * 3},
        "mesh, out_specs: got None, wants a value: mesh, in_specs",
    ),
    "mesh is none": ({"axis_name": "sp", "mesh": 3}, "mesh: got int, wants a jax.sharding.Mesh"),
    "uneven": (on(ring(3)), "in_specs: axis 't' of size 32 does not divide into 3 parts"),
    "chunk": ({"chunk_size": 0}, "chunk_size: got int 0, wants an int of at least 1"),
    "cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap: got -1.0"),
    "window": ({"sliding_window": 0}, "sliding_window: got int 0"),
    "mask": ({"mask_info": MaskInfo(_attention_mask=jnp.ones((2, 1, 5, T), bool))}, "mask_info.attention_mask: got"),
    "no mask info": ({"mask_info": 3}, "mask_info: got .*, wants a MaskInfo"),
    "scale": ({"softmax_scale": "1"}, "softmax_scale: got str '1', wants a Python number"),
    "config": ({"cfg": object()}, "cfg: got object, wants RingAttentionConfig"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name):
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        ring_attention(*ARRAYS, **options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": ARRAYS[1][:, :, :, :4]}, r"key: got shape \(2, 32, 2, 4\), wants \[B=2, S, Hk, D=8\]"),
        ({"key": ARRAYS[1].astype(jnp.bfloat16)}, "key: got dtype bfloat16, wants query's float32"),
        ({"softmax_aux": jnp.zeros((3, 1))}, "softmax_aux: got shape"),
        (
            {"bias": jnp.zeros((2, 4, 32, 31))},
            r"bias: got shape \(2, 4, 32, 31\), wants \[B=2 or 1, H=4 or 1, T=32",
        ),
        ({"bias": jnp.zeros((2, 4, 32, 32), int)}, "bias: got dtype int32, wants a floating dtype"),
    ],
)
def test_errors_name_the_array(changed, message):
    arrays = dict(zip(("query", "key", "value"), ARRAYS, strict=True)) | changed
    with pytest.raises(ValueError, match=message):
        ring_attention(*(arrays.get(name) for name in ("query", "key", "value", "softmax_aux", "bias")))


def test_errors_under_a_shard_map_of_the_caller():
    mapped = jax.shard_map(
        lambda bias, *arrays: call(*arrays, None, bias),
        mesh=ring(4),
        in_specs=(P(None, None, None, "sp"), *THREE),
        out_specs=P(None, "sp"),
    )
    with pytest.raises(ValueError, match=r"bias: got shape \(1, 1, 32, 8\), .* S counting the keys of all 4 devices"):
        mapped(jnp.zeros((1, 1, T, T)), *ARRAYS)


def test_configurations_round_trip():
    cfg = RingAttentionConfig(fwd_params={"q_blocksize": 64}, bwd_params={"kv_blocksize": 32})
    assert RingAttentionConfig.from_json(cfg.to_json()) == cfg
    assert cfg.fwd_params.q_blocksize == 64


def test_a_recorded_call_is_tuned_as_one_devices_part(tmp_path):
    executor = create_default_executor(tmp_path, enable_autotuning=True)
    clear_recorded()
    output = executor(RingAttention(), *ARRAYS, causal=True, **on(ring(4)))
    results = autotune_recorded(directions=("forward",))
    clear_recorded()
    assert output.shape == (*ARRAYS[0].shape[:3], ARRAYS[2].shape[3])
    (result,) = results
    assert "query=float32[2,8,4,8] key=float32[2,8,2,8]" in result.key.call
    assert all(measured.seconds is not None for measured in result.measurements)
