"""T-3: a chosen platform or configuration is used as it is, and no configuration object ever changes."""

import dataclasses

import pytest
import toy
from toy import ToyConfig
from toy import toy as call

import ejkernel
from ejkernel.modules import FlashAttentionConfig
from ejkernel.ops import FwdParams, NoImplementationError, overlay_cache

CONFIG = ToyConfig(platform="slow", fwd_params=FwdParams(q_blocksize=7, kv_blocksize=9))


@pytest.fixture
def several(use):
    toy.SEEN.clear()
    return use(
        toy.plugin(
            toy.implementation("favourite", platform="cuda", priority=9),
            toy.implementation("modest", platform="slow"),
        )
    )


def test_the_platform_of_a_configuration_is_not_replaced_by_a_better_one(several, x, chain):
    call(x, cfg=CONFIG, chain=chain)

    assert [name for name, *_ in toy.SEEN] == ["modest"]
    assert toy.blocks(toy.seen()[0]) == (7, 9)


def test_an_explicit_platform_is_not_replaced_by_a_better_one(several, x, chain):
    call(x, platform="slow", chain=chain)

    assert [name for name, *_ in toy.SEEN] == ["modest"]


def test_an_explicit_platform_that_refuses_is_not_replaced_either(use, x, chain):
    use(
        toy.plugin(
            toy.implementation("able", platform="xla"),
            toy.implementation("unable", platform="slow", extra=lambda record: ["too small"]),
        )
    )

    with pytest.raises(NoImplementationError, match="too small"):
        call(x, platform="slow", chain=chain)


def test_tiles_for_one_platform_are_not_given_to_another(several, x, chain):
    with overlay_cache({"toy": CONFIG}):
        decision = ejkernel.explain("toy", x, platform="cuda")

    assert decision.forward.tier == "heuristics"
    assert "overlay: skipped, made for platform slow, not cuda" in decision.forward.trail


def test_calls_do_not_modify_their_configuration(several, x, chain):
    before = CONFIG.to_dict()
    call(x, cfg=CONFIG, chain=chain)

    assert CONFIG.to_dict() == before


@pytest.mark.parametrize(
    ("config", "field"),
    [(FlashAttentionConfig(), "platform"), (FlashAttentionConfig(), "fwd_params"), (FwdParams(), "q_blocksize")],
)
def test_configurations_are_frozen(config, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, 1)
