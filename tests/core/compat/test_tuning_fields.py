"""Public fields of configurations only tune: none of them makes a call fail or chooses a kernel."""

import dataclasses
import typing

import jax
import numpy as np
import pytest

from ejkernel.modules import (
    GroupedMatmulConfig,
    MultiLatentRaggedPageAttentionConfig,
    MultiLatentRaggedPageAttentionV2Config,
    UnifiedAttentionConfig,
)
from ejkernel.ops.call import call, decide
from ejkernel.ops.plugins import registry

OPS = sorted(name for name, op in registry().ops.items() if op.function.__module__.startswith("ejkernel."))


def fields(config: type) -> typing.Iterator[tuple[str, typing.Any]]:
    """The fields of a configuration class that a caller may set, each with a value that it takes."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        choices = typing.get_args(hints[field.name])
        literals = [x for kind in choices if typing.get_origin(kind) is typing.Literal for x in typing.get_args(kind)]
        if field.name in getattr(config, "about_call", ()):
            continue
        parts = [kind for kind in choices if dataclasses.is_dataclass(kind)]
        if parts:
            yield from ((field.name, parts[0](**{name: value})) for name, value in fields(parts[0]))
        elif bool in choices:
            yield field.name, True
        else:
            yield field.name, literals[0] if literals else 16


@pytest.mark.parametrize("name", OPS)
def test_all_public_fields_together_are_served_by_the_same_kernel(name):
    op = registry().op(name)
    record = op.cases[0].make(jax.random.key(0))
    plain = decide(op, record).forward
    assert plain.implementation is not None
    cfg = op.config(**dict(fields(op.config)))
    tuned = decide(op, record, cfg=cfg).forward
    assert tuned.implementation is plain.implementation
    unread = plain.implementation.config.unread(cfg.part("forward"), "forward")
    assert not unread or f"{', '.join(unread)}: no effect, {plain.implementation.name} does not read it" in str(tuned)


SERVERS = {
    "unified_attention": UnifiedAttentionConfig(
        num_warps=8, num_stages=2, num_par_softmax_segments=4, seq_threshold_3d=64
    ),
    "multi_latent_ragged_page_attention": MultiLatentRaggedPageAttentionConfig(num_queries_per_block=8),
    "multi_latent_ragged_page_attention_v2": MultiLatentRaggedPageAttentionV2Config(num_queries_per_block=8),
    "grouped_matmul": GroupedMatmulConfig(block_m=128, block_n=128, block_k=64),
}


@pytest.mark.parametrize("name", SERVERS)
def test_what_a_server_sets_changes_no_result(name):
    op = registry().op(name)
    record = op.cases[0].make(jax.random.key(0))
    for got, want in zip(
        jax.tree.leaves(call(op, record, cfg=SERVERS[name])), jax.tree.leaves(call(op, record)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
