"""Overlays: nested, innermost first, exact keys before names, and part of every compiled function's key."""

import threading

import jax
import pytest
import toy
from toy import ToyConfig
from toy import toy as call

from ejkernel.modules import FlashAttentionConfig
from ejkernel.ops import BwdParams, FwdParams, NoConfigError, overlay_cache, policy_override
from ejkernel.ops.config.overlay import overlays


def config(size: int) -> ToyConfig:
    return ToyConfig(fwd_params=tile(size))


def tile(size: int) -> FwdParams:
    return FwdParams(q_blocksize=size, kv_blocksize=size)


def used(run) -> int:
    start = len(toy.SEEN)
    run()
    (part,) = toy.seen(since=start)
    return part.q_blocksize


def test_the_innermost_overlay_wins_and_leaving_restores_the_outer_one(plain, x, chain):
    def run():
        return call(x, chain=chain)

    with overlay_cache({"toy": config(1)}):
        with overlay_cache({"toy": config(2)}):
            assert used(run) == 2
        assert used(run) == 1
    assert used(run) == 64


def test_an_inner_overlay_for_another_operation_keeps_the_outer_one(plain, x, chain):
    with overlay_cache({"toy": config(1)}), overlay_cache({"flash_attention": FlashAttentionConfig()}):
        assert used(lambda: call(x, chain=chain)) == 1


def backward_sizes(run) -> set[int]:
    start = len(toy.SEEN)
    run()
    return {part.q_blocksize for part in toy.seen("backward", since=start)}


def test_a_backward_pass_traced_after_the_block_has_the_overlay_of_its_call(plain, x, chain):
    both = ToyConfig(fwd_params=tile(2), bwd_params=BwdParams(q_blocksize=2, kv_blocksize=2))
    outer = ToyConfig(fwd_params=tile(4), bwd_params=BwdParams(q_blocksize=4, kv_blocksize=4))

    def loss(x):
        with overlay_cache({"toy": both}):
            return call(x, chain=chain).sum()

    assert backward_sizes(lambda: jax.grad(loss)(x)) == {2}
    assert backward_sizes(lambda: jax.jit(jax.grad(jax.checkpoint(loss)))(x.T)) == {2}
    with overlay_cache({"toy": outer}):
        assert backward_sizes(lambda: jax.jit(jax.grad(loss))(x[:2])) == {2}


def test_a_backward_pass_traced_after_the_block_has_the_policy_of_its_call(plain, x, chain):
    def loss(x):
        with overlay_cache({"toy": config(2)}), policy_override(allow_heuristics=False):
            return call(x, chain=chain).sum()

    loss(x)
    with pytest.raises(NoConfigError, match="backward"):
        jax.grad(loss)(x)


def test_an_exact_key_beats_a_name_of_the_same_overlay(plain, x, chain):
    key = toy.request(chain, x).key()

    with overlay_cache({"toy": config(1), key: tile(2)}):
        assert used(lambda: call(x, chain=chain)) == 2
        assert used(lambda: call(x.T, chain=chain)) == 1


def test_an_inner_name_beats_an_outer_exact_key(plain, x, chain):
    key = toy.request(chain, x).key()

    with overlay_cache({key: tile(2)}), overlay_cache({"toy": config(1)}):
        assert used(lambda: call(x, chain=chain)) == 1


def test_a_function_jitted_outside_is_traced_again_inside(plain, x, chain):
    jitted = jax.jit(lambda x: call(x, chain=chain))
    assert used(lambda: jitted(x)) == 64

    with overlay_cache({"toy": config(1)}):
        assert used(lambda: jitted(x)) == 1
    start = len(toy.SEEN)
    jitted(x)
    with overlay_cache({"toy": config(1)}):
        jitted(x)
    assert toy.SEEN[start:] == []  # both are compiled by now


def test_params_missing_from_an_inner_overlay_come_from_the_outer_one(plain, x, chain):
    with overlay_cache({"toy": config(1)}), overlay_cache({"toy": ToyConfig()}):
        assert used(lambda: call(x, chain=chain)) == 1


def test_an_overlay_made_for_another_device_does_not_apply(plain, x, chain):
    elsewhere = ToyConfig(backend="gpu", fwd_params=tile(1))

    with overlay_cache({"toy": elsewhere}):
        assert used(lambda: call(x, chain=chain)) == 64


def test_overlays_belong_to_their_thread(plain):
    found = []
    with overlay_cache({"toy": config(1)}):
        thread = threading.Thread(target=lambda: found.append(overlays()))
        thread.start()
        thread.join()

    assert found == [()]


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"toi": ToyConfig()}, "no operation 'toi'"),
        ({"toy": FlashAttentionConfig()}, "got FlashAttentionConfig, wants ToyConfig"),
        ({"toy": FwdParams()}, "got FwdParams, wants ToyConfig"),
    ],
)
def test_an_overlay_that_could_never_apply_is_refused(plain, overlay, message):
    with pytest.raises(ValueError, match=message), overlay_cache(overlay):
        pass


def test_an_exception_ends_the_overlay_block(plain):
    with pytest.raises(KeyError), overlay_cache({"toy": config(1)}):
        raise KeyError

    assert overlays() == ()
