"""T-1: `cfg=` decides, under every policy, and what it says is what the kernel gets."""

import jax
import pytest
import toy
from toy import ToyConfig
from toy import toy as call

import ejkernel
from ejkernel.ops import AutotunePolicy, BwdParams, ConfigSelectorChain, FwdParams, overlay_cache, policy_override

POLICIES = [
    {},
    {"cache_miss_fallback": "autotune"},
    {"allow_heuristics": False},
    {"allow_autotune": False},
    {"allow_autotune": False, "allow_heuristics": False},
]
WANTED = ToyConfig(
    fwd_params=FwdParams(q_blocksize=7, kv_blocksize=9), bwd_params=BwdParams(q_blocksize=3, kv_blocksize=5)
)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("how", ["eager", "jit", "policy_override"])
def test_the_kernel_gets_the_configuration_of_the_call(plain, x, policy, how):
    chain = ConfigSelectorChain(policy=AutotunePolicy(**policy) if how != "policy_override" else None)

    def run(x):
        return call(x, cfg=WANTED, chain=chain)

    with policy_override(**(policy if how == "policy_override" else {})):
        jax.jit(run)(x) if how == "jit" else run(x)

    assert [toy.blocks(part) for part in toy.seen()] == [(7, 9)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_backward_kernel_gets_the_bwd_params_of_the_configuration(plain, x, policy):
    chain = ConfigSelectorChain(policy=AutotunePolicy(**policy))

    jax.grad(lambda x: call(x, cfg=WANTED, chain=chain).sum())(x)

    assert [toy.blocks(part) for part in toy.seen("backward")] == [(3, 5)]


def test_cfg_argument_wins_over_overlay_and_cached_measurements(plain, x, chain):
    call(x, chain=chain)
    chain.store(toy.request(chain, x).key(), FwdParams(q_blocksize=2, kv_blocksize=2), 1.0, "")

    with overlay_cache({"toy": ToyConfig(fwd_params=FwdParams(q_blocksize=1, kv_blocksize=1))}):
        call(x, cfg=WANTED, chain=chain)

    assert toy.blocks(toy.seen()[-1]) == (7, 9)


def test_unset_config_fields_are_filled_by_the_heuristic(plain, x, chain):
    call(x, cfg=ToyConfig(fwd_params=FwdParams(q_blocksize=7)), chain=chain)

    assert toy.blocks(toy.seen()[-1]) == (7, 64)


def test_cfg_for_one_pass_leaves_the_other_pass_to_the_chain(plain, x, chain):
    jax.grad(lambda x: call(x, cfg=ToyConfig(bwd_params=BwdParams(q_blocksize=3)), chain=chain).sum())(x)

    assert toy.blocks(toy.seen("forward")[-1]) == (64, 64)
    assert toy.blocks(toy.seen("backward")[-1]) == (3, 64)


def test_explain_names_config_fields_that_no_kernel_reads(plain, x):
    cfg = ToyConfig(fwd_params=FwdParams(q_blocksize=7, num_warps=4), bwd_params=BwdParams(q_blocksize=3, num_stages=2))
    jax.grad(lambda x: call(x, cfg=cfg).sum())(x)
    assert toy.blocks(toy.seen("forward")[-1]) == (7, 64)
    assert toy.blocks(toy.seen("backward")[-1]) == (3, 64)
    decision = ejkernel.explain("toy", x, cfg=cfg)
    assert "num_warps: no effect, plain does not read it" in str(decision.forward)
    assert "num_stages: no effect, plain does not read it" in str(decision.backward)
