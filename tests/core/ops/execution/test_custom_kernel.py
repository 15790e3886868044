"""What code written around executors relies on: own kernels, events, stamps, and the short names of options."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.errors import EjkernelRuntimeError, NoConfigError
from ejkernel.modules import FlashAttention, FlashAttentionConfig, FwdParams, flash_attention
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Tuner,
    forward_autotune_only,
    get_invocations,
    record_invocation,
    vmap_with_config,
)
from ejkernel.ops.recording import clear_recorded

X = jnp.arange(8.0)
QKV = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
TUNES = AutotunePolicy(cache_miss_fallback="autotune")


@dataclasses.dataclass(frozen=True)
class Chunks:
    size: int = 4
    fails: bool = False


class Doubled(Kernel):
    """A kernel of one's own: doubles, a chunk at a time."""

    def __init__(self):
        super().__init__("doubled")
        self.seen = []

    def run(self, x, *, cfg, scale=1.0):
        if cfg.fails:
            raise ValueError("does not run")
        self.seen.append(cfg)
        return jnp.concatenate([2 * scale * x[at : at + cfg.size] for at in range(0, len(x), cfg.size)])

    def heuristic_cfg(self, inv):
        assert inv.op_id == "doubled"
        return Chunks()

    def candidate_cfgs(self, inv):
        return Chunks(2), Chunks(8), Chunks(8, fails=True)


def test_a_custom_kernel_uses_its_heuristic_or_the_callers_configuration():
    executor, kernel = Executor(ConfigSelectorChain(ConfigCache(), policy=AutotunePolicy())), Doubled()
    np.testing.assert_array_equal(executor(kernel, X), 2 * X)
    np.testing.assert_array_equal(executor(kernel, X, cfg=Chunks(3), scale=2.0), 4 * X)
    assert kernel.seen == [Chunks(), Chunks(3)]
    assert executor.choose_config(kernel, X) == Chunks()
    np.testing.assert_array_equal(executor.compile(kernel, X)(X), 2 * X)
    np.testing.assert_array_equal(jax.jit(lambda x: executor(kernel, x))(X), 2 * X)


def test_a_custom_kernel_is_autotuned_once_if_the_policy_allows():
    events = []
    chain = ConfigSelectorChain(
        policy=TUNES, tuner=Tuner(warmup=0, iters=1), on_event=lambda name, op, **rest: events.append((name, op))
    )
    executor, kernel = Executor(chain), Doubled()
    for _ in range(2):
        np.testing.assert_array_equal(executor(kernel, X), 2 * X)
    names = ["autotune_start", "autotune_finish", "cache_hit"]
    assert events == [(name, "doubled") for name in names]
    assert chain.cache.size() == 1
    assert executor.choose_config(kernel, X) in (Chunks(2), Chunks(8))
    executor(kernel, X[:4])
    assert chain.cache.size() == 2


def test_a_policy_without_heuristics_refuses_a_custom_kernel():
    chain = ConfigSelectorChain(policy=AutotunePolicy(allow_heuristics=False))
    with pytest.raises(NoConfigError):
        Executor(chain)(Doubled(), X)


def test_a_kernel_of_an_operation_keeps_its_name():
    assert FlashAttention().op_id == "flash_attention"
    with pytest.raises(ValueError, match="op_id: got 'mine', wants None"):
        FlashAttention("mine")


def test_events_name_the_tier_that_answered():
    events = []
    chain = ConfigSelectorChain(on_event=lambda name, op, **rest: events.append((name, op, rest.get("direction"))))
    executor = Executor(chain)
    executor(FlashAttention(), *QKV)
    assert events == [("heuristics", "flash_attention", "forward")]
    executor(FlashAttention(), *QKV, cfg=FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=8, kv_blocksize=8)))
    assert events[-1] == ("override", "flash_attention", "forward")
    count = len(events)
    executor.explain(FlashAttention(), *QKV)
    assert len(events) == count


def test_forbid_reautotune_raises_on_a_second_measurement():
    chain = ConfigSelectorChain(policy=TUNES, tuner=Tuner(warmup=0, iters=1), forbid_reautotune=True)
    executor = Executor(chain)
    executor(FlashAttention(), *QKV)
    chain.cache.clear()
    with pytest.raises(EjkernelRuntimeError, match="forbid_reautotune"):
        executor(FlashAttention(), *QKV)


@pytest.mark.parametrize("persists", [True, False])
def test_persist_autotune_decides_whether_measurements_are_stored_on_disk(persists, tmp_path):
    path = tmp_path / "store.json"
    tuner = Tuner(warmup=0, iters=1)
    chain = ConfigSelectorChain(policy=TUNES, tuner=tuner, persistent=PersistentCache(path), persist_autotune=persists)
    Executor(chain)(FlashAttention(), *QKV)
    assert path.exists() == persists
    assert chain.cache.size() == 1


def test_explain_says_that_the_policy_does_not_autotune_backward_passes():
    def measured(chain):
        executor = Executor(chain)
        executor(FlashAttention(), *QKV)
        decision = executor.explain(FlashAttention(), *QKV)
        return str(decision.backward)

    tuner = Tuner(warmup=0, iters=1)
    forward = AutotunePolicy(cache_miss_fallback="autotune", validate_backward=False)
    assert "the policy measures forward passes alone" in measured(ConfigSelectorChain(policy=forward, tuner=tuner))
    with forward_autotune_only():
        assert "the policy measures forward passes alone" in measured(ConfigSelectorChain(policy=TUNES, tuner=tuner))
    assert "forward passes alone" not in measured(ConfigSelectorChain(policy=TUNES, tuner=tuner))


def test_tuner_accepts_the_aliases_warmup_and_iters():
    assert Tuner(warmup=3, iters=7) == Tuner(warmup_iterations=3, timing_iterations=7)
    with pytest.raises(ValueError, match="timing_iterations: got 0"):
        Tuner(iters=0)


def test_stamp_prefix_appears_in_the_compiled_program():
    def text(executor, **options):
        program = jax.jit(lambda *x: executor(FlashAttention(), *x, **options)).lower(*QKV)
        return program.as_text(debug_info=True)

    chain = ConfigSelectorChain()
    assert "mine#flash_attention@v" in text(Executor(chain, stamp_prefix="mine"))
    assert "mine#" not in text(Executor(chain, stamp_prefix="mine"), stamp=False)
    assert "#flash_attention@v" not in text(Executor(chain))


def test_vmap_with_config_equals_separate_calls():
    executor = Executor(ConfigSelectorChain())
    batch = jnp.stack([QKV, 2 * QKV], axis=1)
    run = vmap_with_config(executor, FlashAttention())
    want = jnp.stack([flash_attention(*batch[:, n], causal=True) for n in range(2)])
    np.testing.assert_allclose(run(*batch, causal=True), want, rtol=1e-5, atol=1e-6)
    shared = vmap_with_config(executor, FlashAttention(), in_axes=(0, None, None))
    np.testing.assert_allclose(shared(batch[0], *QKV[1:])[0], flash_attention(*QKV), rtol=1e-5, atol=1e-6)
    for axes in (None, (0, 0)):
        with pytest.raises(ValueError, match=r"in_axes: got .*, wants an axis or None for each, and at least one"):
            vmap_with_config(executor, FlashAttention(), in_axes=axes)(*QKV)
    own = vmap_with_config(executor, Doubled())
    np.testing.assert_array_equal(own(jnp.stack([X, -X])), 2 * jnp.stack([X, -X]))


def test_record_invocation_records_a_call_by_its_shapes_once():
    clear_recorded()
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in QKV)
    for _ in range(2):
        record_invocation(Invocation("flash_attention", shapes, {"causal": True}))
    (noted,) = get_invocations()
    assert noted.args.causal
    assert noted.plan.op.name == "flash_attention"
    clear_recorded()
