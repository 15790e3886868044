"""A paired implementation is chosen, configured and tuned as one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import private_residuals
import pytest
import toy
from toy import toy as call

import ejkernel
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    FwdParams,
    NoImplementationError,
    PersistentCache,
    Tuner,
    autotune_recorded,
    record_calls,
)
from ejkernel.ops.call import make_plan
from ejkernel.ops.tuning import tune_call


@pytest.fixture(autouse=True)
def notes():
    toy.SEEN.clear()
    private_residuals.PRIVATE.clear()
    private_residuals.DIFFERENTIATED.clear()


def ran() -> list[tuple[str, str]]:
    """(implementation, direction) of the kernels that were traced, each once."""
    return list(dict.fromkeys((name, direction) for name, direction, _ in toy.SEEN))


def compiled(function, *args) -> list[tuple[str, str]]:
    """(implementation, direction) of the kernels in a program, each once, which is lowered anew."""
    text = jax.jit(lambda *args: function(*args)).lower(*args).as_text(debug_info=True)
    found = re.findall(r"ejkernel\.toy\.(forward|backward)\.(\w+)", text)
    return sorted({(name, direction) for direction, name in found}, reverse=True)


def value(x, bias=None):
    """Through a chain of its own, so that JAX has compiled nothing for it yet."""
    return call(x, bias, power=3, chain=ConfigSelectorChain()).sum()


gradient = jax.value_and_grad(value, (0, 1))


def both(name: str) -> list[tuple[str, str]]:
    return [(name, "forward"), (name, "backward")]


def test_a_pair_serves_both_passes_with_one_configuration(use, x):
    use(toy.plugin(private_residuals.implementation(priority=1), toy.implementation("other")))

    assert compiled(gradient, x, x) == both("private")
    assert toy.SEEN[-2][2] is toy.SEEN[-1][2]


def test_forward_of_a_pair_knows_whether_a_backward_pass_follows(use, x):
    use(toy.plugin(private_residuals.implementation(priority=1)))

    compiled(value, x, x)
    compiled(gradient, x, x)
    assert private_residuals.DIFFERENTIATED[0] is False
    assert private_residuals.DIFFERENTIATED[-1] is True


def test_another_implementation_serves_both_passes_if_the_pairs_backward_refuses(use, x):
    """No other backward pass could go on from what it leaves."""
    pair = private_residuals.implementation(priority=1, gradients=frozenset({"x"}))
    use(toy.plugin(pair, toy.implementation("other")))

    assert compiled(gradient, x, x) == both("other")
    assert compiled(jax.value_and_grad(value), x) == both("private")  # needs no gradient of the bias
    assert compiled(value, x, x) == [("private", "forward")]  # nor does this


def test_backward_of_a_pair_never_follows_another_forward(use, x):
    needs = toy.implementation().requires
    pair = private_residuals.implementation(priority=1, handles=frozenset({"bias", "scale"}), backward_requires=needs)
    use(toy.plugin(pair, toy.implementation("other", priority=-1)))
    assert compiled(gradient, x, x) == both("other")

    forward_only = toy.implementation("other", priority=2, backward=None, gradients=frozenset())
    use(toy.plugin(private_residuals.implementation(), forward_only))
    assert compiled(gradient, x, x) == both("private")
    assert compiled(value, x, x) == [("other", "forward")]


def test_a_forward_only_kernel_yields_to_a_pair_that_is_first_for_backward(use, x):
    forward_only = toy.implementation("other", priority=2, backward=None, gradients=frozenset())
    use(toy.plugin(private_residuals.implementation(priority=1), forward_only, toy.implementation("plain")))
    assert compiled(value, x, x) == [("other", "forward")]
    assert compiled(gradient, x, x) == both("private")

    use(toy.plugin(private_residuals.implementation(), forward_only, toy.implementation("plain", priority=1)))
    assert compiled(gradient, x, x) == [("plain", "backward"), ("other", "forward")]


def test_a_forward_only_kernel_stays_where_the_pair_would_not_be_chosen(use, x):
    """Without the first forward pass, the second one would be chosen, not that of the pair."""

    def second_in_backward(record, device, direction):
        return 1 if direction == "forward" else -1

    forward_only = toy.implementation("other", priority=2, backward=None, gradients=frozenset())
    use(
        toy.plugin(
            private_residuals.implementation(), forward_only, toy.implementation("plain", priority=second_in_backward)
        )
    )
    assert compiled(gradient, x, x) == [("plain", "backward"), ("other", "forward")]


def test_error_says_why_no_implementation_serves_both_passes(use, x):
    pair = private_residuals.implementation(gradients=frozenset({"x"}))
    forward_only = toy.implementation("other", backward=None, gradients=frozenset())
    use(toy.plugin(pair, forward_only))
    with pytest.raises(NoImplementationError, match="gives no gradient for bias"):
        gradient(x, x)

    needs = toy.implementation().requires
    pair = private_residuals.implementation(handles=frozenset({"bias", "scale"}), backward_requires=needs)
    use(toy.plugin(pair, forward_only))
    with pytest.raises(NoImplementationError, match="paired, and its forward refuses: power is not handled"):
        gradient(x, x)


def test_explain_says_that_a_pair_was_chosen(use, x):
    use(toy.plugin(private_residuals.implementation(priority=1), toy.implementation("other")))
    decision = ejkernel.explain("toy", x, x)

    for choice in (decision.forward, decision.backward):
        assert choice.implementation.name == "private"
        assert choice.verdicts[0].remark == "paired: serves both passes with one configuration"
    assert decision.differentiated_forward is None
    assert str(decision).count("paired: serves both passes with one configuration") == 2


def test_explain_says_why_a_pair_was_not_chosen(use, x):
    pair = private_residuals.implementation(priority=1, gradients=frozenset({"x"}))
    use(toy.plugin(pair, toy.implementation("other")))
    decision = ejkernel.explain("toy", x, x)

    assert decision.forward.implementation.name == "private"
    assert decision.differentiated_forward.implementation.name == decision.backward.implementation.name == "other"
    assert "where the call is differentiated, toy forward on" in str(decision)
    assert "paired, and its backward refuses: gives no gradient for bias" in str(decision)


def test_a_pair_without_a_backward_is_a_reported_declaration_error(use):
    with pytest.raises(ValueError, match="paired=True wants a backward, got None"):
        private_residuals.implementation(backward=None)


def test_tuning_measures_both_passes_and_stores_one_entry(use, x, store):
    use(toy.plugin(private_residuals.implementation()))
    made = ConfigSelectorChain(persistent=PersistentCache(), tuner=Tuner(warmup_iterations=0, timing_iterations=1))
    plan = make_plan(toy.OP, toy.ToyArguments(x=x), None, None, made)
    results = tune_call(plan, toy.ToyArguments(x=x))

    assert [result.key.direction for result in results] == ["both"]
    assert {part.q_blocksize for _, direction, part in toy.SEEN if direction == "backward"} == {2, 3, 64}
    assert None not in private_residuals.PRIVATE
    assert list(made.persistent.entries()) == [str(results[0].key)]
    best = results[0].fastest.part
    toy.SEEN.clear()
    jax.grad(lambda x: call(x, chain=made).sum())(x)
    call(x, chain=made)
    assert {part for _, _, part in toy.SEEN} == {best}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tuning_either_pass_of_a_pair_tunes_the_pair(use, x, chain, direction):
    use(toy.plugin(private_residuals.implementation()))
    plan = make_plan(toy.OP, toy.ToyArguments(x=x), None, None, chain)

    assert [result.key.direction for result in tune_call(plan, toy.ToyArguments(x=x), (direction,))] == ["both"]


def test_an_eager_call_under_an_autotune_policy_tunes_the_pair(use, x):
    use(toy.plugin(private_residuals.implementation()))
    policy = AutotunePolicy(cache_miss_fallback="autotune")
    chain = ConfigSelectorChain(policy=policy, tuner=Tuner(warmup_iterations=0, timing_iterations=1))
    call(x, chain=chain)

    assert ("private", "backward") in ran()
    assert ejkernel.explain(toy.toy, x).forward.tier == "heuristics"
    plan = make_plan(toy.OP, toy.ToyArguments(x=x), None, None, chain)
    record = toy.ToyArguments(x=x)
    forward, backward = plan.choose_both_passes(record, frozenset({"x"}))
    assert chain.has_stored_config(plan.request(forward, record))
    assert chain.has_stored_config(plan.request(backward, record))


def test_a_pair_whose_backward_refuses_is_tuned_by_its_forward_pass(use, x, chain):
    use(toy.plugin(private_residuals.implementation(gradients=frozenset())))
    args = toy.ToyArguments(x=x)
    plan = make_plan(toy.OP, args, None, None, chain)

    assert [result.key.direction for result in tune_call(plan, args)] == ["both"]
    assert {direction for _, direction in ran()} == {"forward"}


def test_recorded_calls_of_a_pair_are_tuned(use, x, chain):
    use(toy.plugin(private_residuals.implementation()))
    with record_calls():
        jax.jit(lambda x: call(x, chain=chain))(x)

    assert [result.key.direction for result in autotune_recorded()] == ["both"]


def test_a_pair_runs_both_passes_with_the_fwd_params_of_cfg(use, x, chain):
    use(toy.plugin(private_residuals.implementation()))
    cfg = toy.ToyConfig(fwd_params=FwdParams(q_blocksize=2), bwd_params=toy.BwdParams(q_blocksize=3))
    jax.grad(lambda x: call(x, cfg=cfg, chain=chain).sum())(x)

    assert {(direction, part.q_blocksize) for _, direction, part in toy.SEEN} == {("forward", 2), ("backward", 2)}
    assert "backward part has no meaning for private, which is paired" in str(ejkernel.explain("toy", x, cfg=cfg))


def test_a_pair_on_eight_devices_takes_the_configuration_of_a_shard(use, chain):
    use(toy.plugin(private_residuals.implementation()))
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("d",)), jax.sharding.PartitionSpec("d")
    made = ejkernel.explain("toy", jnp.ones((16, 8)), mesh=mesh, in_specs=(spec,), out_specs=spec)

    assert made.forward.config == made.backward.config
