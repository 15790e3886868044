"""Executors: a chain of one's own, explained, and frozen into compiled functions."""

import jax
import jax.numpy as jnp
import pytest
import toy
from toy import Toy, ToyConfig

from ejkernel.ops import (
    BwdParams,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Kernel,
    NoImplementationError,
    create_default_executor,
    overlay_cache,
)
from ejkernel.ops.call import default_chain

OWN = ToyConfig(
    fwd_params=FwdParams(q_blocksize=7, kv_blocksize=9), bwd_params=BwdParams(q_blocksize=3, kv_blocksize=5)
)


@pytest.fixture
def executor(chain):
    return Executor(chain)


def test_an_executor_uses_its_own_config_chain(plain, x, executor, chain):
    chain.store(toy.request(chain, x).key(), FwdParams(q_blocksize=2, kv_blocksize=2), 1.0, "")

    executor(Toy(), x)
    Toy().run(x)

    assert [toy.blocks(part) for part in toy.seen()] == [(2, 2), (64, 64)]


def test_an_executor_passes_cfg_to_the_kernel(plain, x, executor):
    executor(Toy(), x, cfg=OWN)

    assert toy.blocks(toy.seen()[-1]) == (7, 9)


def test_choose_config_returns_the_configuration_a_call_would_use(plain, x, executor, chain):
    chain.store(toy.request(chain, x).key(), FwdParams(q_blocksize=2, kv_blocksize=2), 1.0, "")
    choice = executor.choose_config(Toy(), x)

    assert isinstance(choice, ToyConfig)
    assert toy.blocks(choice.fwd_params) == (2, 2)
    assert toy.blocks(choice.bwd_params) == (64, 64)
    assert executor.choose_config(Toy(), x, cfg=OWN).to_dict() == OWN.to_dict()


def test_choose_config_raises_without_a_usable_implementation(plain, x, executor):
    with pytest.raises(NoImplementationError):
        executor.choose_config(Toy(), x, platform="triton")


def test_executor_explain_uses_its_own_config_chain(plain, x, executor, chain):
    chain.store(toy.request(chain, x).key(), FwdParams(q_blocksize=2, kv_blocksize=2), 1.0, "")
    decision = executor.explain(Toy(), x)

    assert decision.forward.tier == "memory"
    assert decision.backward.tier == "heuristics"
    assert "config from memory: q_blocksize=2" in str(decision)


def test_executor_compile_fixes_the_configuration(plain, x, executor, chain):
    with overlay_cache({"toy": OWN}):
        compiled = executor.compile(Toy(), jax.ShapeDtypeStruct(x.shape, x.dtype), power=3)
    chain.store(toy.request(chain, x).key(), FwdParams(q_blocksize=2, kv_blocksize=2), 1.0, "")

    assert (compiled(2 * x) == 8 * x).all()
    jax.grad(lambda x: compiled(x).sum())(x)

    assert {toy.blocks(part) for part in toy.seen("forward")} == {(7, 9)}
    assert {toy.blocks(part) for part in toy.seen("backward")} == {(3, 5)}


def test_executor_compile_fixes_the_platform(use, x, executor):
    use(toy.plugin(toy.implementation("best", platform="cuda", priority=1), toy.implementation("asked")))
    toy.SEEN.clear()

    executor.compile(Toy(), x, cfg=ToyConfig(platform="xla"))(x)

    assert [name for name, *_ in toy.SEEN] == ["asked"]


def test_executor_compile_traces_only_once(plain, x, executor):
    compiled = executor.compile(Toy(), x)
    compiled(x)
    compiled(x + 1)

    assert len(toy.SEEN) == 1


def test_functions_of_executor_compile_accept_new_keyword_arrays(executor):
    from ejkernel.modules import FlashAttention
    from ejkernel.types import MaskInfo

    array = jax.random.normal(jax.random.key(0), (1, 8, 1, 4))
    ids = jnp.zeros((1, 8), jnp.int32)
    masks = [MaskInfo.from_segments(ids), MaskInfo.from_segments(ids.at[0, 4:].set(1))]
    compiled = executor.compile(FlashAttention(), array, array, array, mask_info=masks[0])

    outputs = [compiled(array, array, array, mask_info=mask) for mask in masks]

    assert (compiled(array, array, array) == outputs[0]).all()
    assert not (outputs[0] == outputs[1]).all()


def test_the_default_executor_autotunes_eager_calls_and_stores_the_result(plain, x, store):
    executor = create_default_executor(warmup_iterations=0, timing_iterations=1)
    executor(Toy(), x)

    assert executor.chooser.cache.size() == 1
    assert store.exists()
    again = create_default_executor()
    assert again.explain(Toy(), x).forward.tier == "persistent"


def test_an_executor_without_autotuning_uses_heuristics(plain, x, store):
    executor = create_default_executor(enable_autotuning=False)
    executor(Toy(), x)

    assert executor.chooser.cache.size() == 0
    assert not store.exists()


def test_executors_share_no_memory_cache(plain, x):
    one, other = (Executor(ConfigSelectorChain()) for _ in range(2))
    one.chooser.store(toy.request(one.chooser, x).key(), FwdParams(q_blocksize=2, kv_blocksize=2), 1.0, "")

    assert other.choose_config(Toy(), x).fwd_params.q_blocksize == 64
    assert default_chain().cache.size() == 0


@pytest.mark.parametrize(
    ("kernel", "message"),
    [(toy.toy, "kernel: got toy, wants a Kernel, such as"), (Toy, r"kernel: got Toy, wants an object, Toy\(\)")],
)
def test_what_is_no_kernel_object_is_refused(x, executor, kernel, message):
    for call in (executor, executor.explain, executor.choose_config, executor.compile):
        with pytest.raises(ValueError, match=message):
            call(kernel, x)


def test_explain_refuses_a_kernel_without_an_operation(executor):
    with pytest.raises(ValueError, match="kernel: got mine, which has no operation"):
        executor.explain(Kernel("mine"))
