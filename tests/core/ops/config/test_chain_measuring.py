"""What a policy lets a chain measure."""

import pytest
import toy
from toy import OP, ToyArguments

from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Tuner, TunerError
from ejkernel.ops.call import make_plan

FORWARD_ALONE = "autotune: the policy measures forward passes alone"


def test_validate_backward_decides_whether_backward_passes_are_autotuned(plain, x):
    def step(validate_backward, direction):
        policy = AutotunePolicy(cache_miss_fallback="autotune", validate_backward=validate_backward)
        chain = ConfigSelectorChain(policy=policy, tuner=Tuner())
        return FORWARD_ALONE in chain.choose(toy.request(chain, x, direction)).trail

    assert step(False, "backward")
    assert not step(True, "backward")
    assert not step(False, "forward")


def test_explicit_tune_raises_if_the_policy_disallows_autotuning(plain, x):
    chain = ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False), tuner=Tuner())
    with pytest.raises(TunerError, match="the policy does not allow measuring toy"):
        chain.tune(toy.request(chain, x), lambda: ToyArguments(x=x))


def test_config_keys_include_static_field_values_except_floats(plain, x, chain):
    def key(**fields):
        record = ToyArguments(x=x, **fields)
        plan = make_plan(OP, record, None, None, chain)
        return plan.request(plan.choose_implementation(record, "forward"), record).key()

    assert key(power=3) == key(power=3)
    assert key(power=3) != key(power=4)
    assert key(scale=2.0) == key(scale=3.0) != key()
