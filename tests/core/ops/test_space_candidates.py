"""T-5: whatever tuning picks, the answer stays the same up to rounding."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.modules.operations import OPS
from ejkernel.ops import Invocation

SHAPE = (1, 300, 1, 8)  # more than one tile of the smallest candidate
OPTIONS = {"causal": True, "dropout_prob": 0.2, "dropout_seed": 3}


def inputs():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, SHAPE) for key in keys]


def candidates() -> list[FlashAttentionConfig]:
    """Configurations that hold every candidate of either pass, in as few compilations as possible."""
    invocation = Invocation("flash_attention", tuple(inputs()), {**OPTIONS, "platform": "xla"})
    listed = FlashAttention().candidate_cfgs(invocation)
    forward, backward = (list(dict.fromkeys(cfg.part(d) for cfg in listed)) for d in ("forward", "backward"))
    pairs = itertools.zip_longest(forward, backward)
    return [FlashAttentionConfig(fwd_params=f or forward[0], bwd_params=b or backward[0]) for f, b in pairs]


def test_every_candidate_of_flash_attention_gives_the_same_output_and_gradients():
    def gradients(cfg):
        def loss(query, key, value):
            output = flash_attention(query, key, value, cfg=cfg, **OPTIONS)
            return (output * output).sum(), output

        (_, output), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs())
        return output, *grads

    first, *others = [gradients(cfg) for cfg in candidates()]
    assert others
    for other in others:
        for got, wanted in zip(other, first, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_no_argument_that_changes_results_is_a_config_field(op):
    parts = [op.config, *op.config.part_types.values()]
    tunable = {field.name for part in parts for field in dataclasses.fields(part)}
    tunable -= op.config.call_argument_fields  # those repeat arguments, may not contradict them, and reach no kernel

    assert not tunable & {field.name for field in dataclasses.fields(op.family.record)}
