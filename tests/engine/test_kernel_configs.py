"""A kernel's configuration has the kernel's own type, from the caller's words to the store and back."""

import dataclasses
import warnings

import jax.numpy as jnp
import pytest
import toy
from toy import ToyConfig
from toy import toy as call

from ejkernel.ops import (
    BwdParams,
    ConfigSelectorChain,
    ConfigSpace,
    FwdParams,
    Invocation,
    KernelConfig,
    NoImplementationError,
    PersistentCache,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """What the toy's kernels are told."""

    chunk: int
    depth: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Others:
    """What another kernel is told."""

    block: int


def rule(record, device, direction):
    return Chunks(chunk=64, depth=2)


SPACE = ConfigSpace(
    forward=Chunks,
    backward=Chunks,
    faces={"forward": {"q_blocksize": "chunk"}, "backward": {"kv_blocksize": "chunk"}},
    heuristic=rule,
    candidates=lambda record, device, direction: (Chunks(chunk=16, depth=1), Chunks(chunk=32, depth=1)),
)


@pytest.fixture
def own(use):
    """One implementation of `toy`, whose kernels have a configuration type of their own."""
    toy.SEEN.clear()
    return use(toy.plugin(toy.implementation(config=SPACE)))


def told(**options):
    since = len(toy.SEEN)
    call(jnp.ones((len(toy.SEEN) + 1, 8)), **options)
    return toy.seen(since=since)[-1]


def test_the_rules_configuration_reaches_the_kernel(own):
    assert told() == Chunks(chunk=64, depth=2)


def test_public_fields_are_translated_and_the_rest_is_the_rules(own):
    assert told(cfg=ToyConfig(fwd_params=FwdParams(q_blocksize=8))) == Chunks(chunk=8, depth=2)


def test_one_public_field_may_mean_different_things_to_the_two_passes(own, x):
    cfg = ToyConfig(fwd_params=FwdParams(q_blocksize=8), bwd_params=BwdParams(kv_blocksize=4))
    request = toy.request(ConfigSelectorChain(), x, "backward", cfg=cfg)
    assert request.completed(cfg.part("backward")) == Chunks(chunk=4, depth=2)


def test_a_public_field_that_the_kernel_does_not_have_refuses_it_by_name(own):
    with pytest.raises(NoImplementationError, match="num_warps means nothing to Chunks, which is set by q_blocksize"):
        told(cfg=ToyConfig(fwd_params=FwdParams(num_warps=4)))


def test_a_kernels_own_configuration_is_taken_as_it_is(own):
    assert told(cfg=KernelConfig(forward=Chunks(chunk=3, depth=9))) == Chunks(chunk=3, depth=9)


def test_another_kernels_configuration_refuses_it(own):
    with pytest.raises(NoImplementationError, match="Others is the configuration of another kernel"):
        told(cfg=KernelConfig(forward=Others(block=1)))


def test_a_kernel_without_a_type_of_its_own_refuses_others_configurations(plain):
    with pytest.raises(NoImplementationError, match="Others is the configuration of another kernel"):
        told(cfg=KernelConfig(forward=Others(block=1)))


def test_what_was_measured_is_found_in_its_own_type_by_the_next_process(own, store, x):
    request = toy.request(ConfigSelectorChain(), x)
    ConfigSelectorChain(persistent=PersistentCache(store)).store(request.key(), Chunks(chunk=5, depth=7), 1e-3, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an entry that cannot be read is a warning
        selection = ConfigSelectorChain(persistent=PersistentCache(store)).choose(request)
    assert (selection.tier, selection.part) == ("persistent", Chunks(chunk=5, depth=7))


def test_candidates_are_configurations_that_can_be_passed_on(own, x):
    kernel = toy.Toy()
    listed = kernel.candidate_cfgs(Invocation("toy", (x,)))
    assert KernelConfig(forward=Chunks(chunk=16, depth=1), backward=rule(None, None, None), platform="xla") in listed
    assert {told(cfg=cfg).chunk for cfg in listed} == {16, 32, 64}
