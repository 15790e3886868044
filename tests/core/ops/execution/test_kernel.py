"""The surface of the seed documents: on every Kernel class, defined once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import Mesh, PartitionSpec
from toy import Toy

import ejkernel.ops
from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.ops import FwdParams, Invocation, Kernel, NoImplementationError
from ejkernel.ops.params import specified_leaf_fields
from ejkernel.ops.plugins import registry

METHODS = (
    "run",
    "get_impl",
    "heuristic_cfg",
    "heuristic_cfg_gpu",
    "heuristic_cfg_tpu",
    "candidate_cfgs",
    "candidate_cfgs_gpu",
    "candidate_cfgs_tpu",
    "candidate_cfgs_xla",
    "candidate_cfgs_shard_map_gpu",
    "candidate_cfgs_shard_map_tpu",
    "candidate_cfgs_shard_map_xla",
    "create_shard_map_wrapper",
    "version",
)
LISTS = [name for name in METHODS if name.startswith("candidate_cfgs")]
Q, K, V = (jax.random.normal(key, (2, 16, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))


@pytest.mark.parametrize("name", METHODS)
def test_promised_kernel_methods_are_defined_in_the_base_class_only(name):
    assert hasattr(FlashAttention(), name)
    assert name in vars(Kernel)
    assert name not in vars(FlashAttention)


def test_promised_names_are_exported_from_ops():
    chain = {"ConfigSelectorChain", "AutotunePolicy", "policy_override", "ConfigCache", "PersistentCache", "Tuner"}
    promised = {"Kernel", "Invocation", "Executor", "FwdParams", "BwdParams"} | chain

    assert promised <= set(ejkernel.ops.__all__)
    assert all(hasattr(ejkernel.ops, name) for name in ejkernel.ops.__all__)


@pytest.mark.parametrize("name", LISTS)
def test_candidates_are_complete_configurations_without_repeats(name):
    found = getattr(FlashAttention(), name)(Invocation("flash_attention", (Q, K, V), {"causal": True}))

    reads = {
        i.platform: i.config.readable_public_fields("forward") for i in registry().implementations["flash_attention"]
    }
    assert found
    assert len(set(found)) == len(found)
    for cfg in found:
        assert isinstance(cfg, FlashAttentionConfig)
        if reads[cfg.platform]:  # cuDNN has no tiles to choose
            # A kernel's own where no public fields can express it.
            assert all(len(specified_leaf_fields(part)) >= 2 for part in (cfg.fwd_params, cfg.bwd_params))


def test_candidates_of_a_platform_come_from_the_implementations_for_it(use, x):
    use(
        toy.plugin(
            toy.implementation("g", platform="triton", devices=frozenset({"gpu"}), blocks=(1, 2)),
            toy.implementation("t", platform="pallas", devices=frozenset({"tpu"}), blocks=(3,)),
            toy.implementation("c", blocks=(4,)),
        )
    )
    kernel, invocation = Toy(), Invocation("toy", (x,))

    def listed(name):
        found = getattr(kernel, name)(invocation)
        return {(c.platform, c.backend, c.fwd_params.q_blocksize) for c in found if c.bwd_params.q_blocksize == 64}

    assert listed("candidate_cfgs_gpu") == {("triton", "gpu", size) for size in (1, 2, 64)}
    assert listed("candidate_cfgs_tpu") == {("pallas", "tpu", size) for size in (3, 64)}
    assert listed("candidate_cfgs") == listed("candidate_cfgs_xla") == {("xla", "cpu", size) for size in (4, 64)}
    assert kernel.heuristic_cfg_gpu(invocation).platform == "triton"
    assert kernel.heuristic_cfg_tpu(invocation).platform == "pallas"
    assert kernel.heuristic_cfg(invocation).platform == "xla"


def test_implementations_that_refuse_the_call_give_no_candidates(use, x):
    use(toy.plugin(toy.implementation("a", platform="cuda", extra=lambda r: ["no"]), toy.implementation("b")))

    assert {cfg.platform for cfg in Toy().candidate_cfgs(Invocation("toy", (x,)))} == {"xla"}


def test_heuristics_are_not_called_for_refused_calls(use, x):
    def unasked(record, device, direction):
        raise AssertionError(direction)

    space = toy.space(unasked, unasked)
    refusing = toy.implementation(
        "a", platform="cuda", devices=frozenset({"gpu"}), extra=lambda r: ["no"], config=space
    )
    use(toy.plugin(refusing, toy.implementation("b", platform="triton", devices=frozenset({"gpu"}))))

    assert {cfg.platform for cfg in Toy().candidate_cfgs_gpu(Invocation("toy", (x,)))} == {"triton"}
    assert Toy().heuristic_cfg_gpu(Invocation("toy", (x,))).platform == "triton"


def test_heuristic_cfg_uses_the_platform_of_the_invocation(use, x):
    use(toy.plugin(toy.implementation("a", platform="cuda", priority=1), toy.implementation("b")))

    assert Toy().heuristic_cfg(Invocation("toy", (x,))).platform == "cuda"
    assert Toy().heuristic_cfg(Invocation("toy", (x,), {"platform": "xla"})).platform == "xla"
    with pytest.raises(NoImplementationError):
        Toy().heuristic_cfg(Invocation("toy", (x,), {"platform": "triton"}))


def test_a_platform_without_an_implementation_has_no_heuristic_and_no_candidates(plain, x):
    with pytest.raises(NotImplementedError, match="no registered implementation of toy serves this call on tpu"):
        Toy().heuristic_cfg_tpu(Invocation("toy", (x,)))
    assert Toy().candidate_cfgs_tpu(Invocation("toy", (x,))) == ()


def test_candidates_of_a_forward_only_implementation_have_no_bwd_params(use, x):
    def forward_only(record, device, direction):
        assert direction == "forward"
        return toy.heuristic(record, device, direction)

    space = toy.space(forward_only, lambda *args: (forward_only(*args),))
    use(toy.plugin(toy.implementation(backward=None, config=space)))

    (cfg,) = Toy().candidate_cfgs(Invocation("toy", (x,)))
    assert cfg.bwd_params is None


def test_heuristics_and_candidates_under_a_mesh_see_shard_shapes(use):
    shapes = []

    def noting(record, device, direction):
        shapes.append(record.x.shape)
        return toy.heuristic(record, device, direction)

    space = toy.space(noting, lambda *args: (noting(*args),))
    use(toy.plugin(toy.implementation(config=space)))
    spec = PartitionSpec("d")
    placed = {"mesh": Mesh(jax.devices()[:4], "d"), "in_specs": (spec,), "out_specs": spec}

    Toy().candidate_cfgs_shard_map_xla(Invocation("toy", (jnp.ones((16, 8)),), **placed))
    Toy().heuristic_cfg(Invocation("toy", (jnp.ones((16, 8)),), placed))

    assert set(shapes) == {(4, 8)}


def test_shard_map_wrapper_equals_the_unsharded_call():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "tensor", "sequence"))
    spec = PartitionSpec("data", "sequence", "tensor")
    keys = PartitionSpec("data", None, "tensor")
    attention = FlashAttention()

    mapped, arguments = attention.create_shard_map_wrapper(
        attention.run, Q, K, V, mesh=mesh, in_specs=(spec, keys, keys), out_specs=spec, check_vma=False, causal=True
    )

    np.testing.assert_allclose(mapped(*arguments), attention.run(Q, K, V, causal=True), rtol=1e-5, atol=1e-5)


def test_shard_map_wrapper_refuses_unsupported_options():
    with pytest.raises(ValueError, match="check_vma: got True"):
        FlashAttention().create_shard_map_wrapper(
            FlashAttention().run, Q, K, V, mesh=None, in_specs=(), out_specs=None, check_vma=True
        )


def test_get_impl_binds_the_configuration(plain, x):
    Toy().get_impl(toy.ToyConfig(fwd_params=FwdParams(q_blocksize=7)))(x)

    assert toy.blocks(toy.seen()[-1]) == (7, 64)


def test_a_kernel_has_the_id_and_version_of_its_operation():
    assert FlashAttention().op_id == "flash_attention"
    assert FlashAttention().version == FlashAttention.op.version


def test_an_invocation_is_frozen_and_compared_by_identity():
    one, other = Invocation("flash_attention", (Q, K, V)), Invocation("flash_attention", (Q, K, V))

    assert one != other  # arrays have no truth value to compare by
    assert len({one, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.args = ()
