"""Public fields of configurations only tune: none of them makes a call fail or chooses a kernel."""

import dataclasses
import typing

import jax
import numpy as np
import pytest

from ejkernel.compat.upstream import handwritten_tables, unread_fields
from ejkernel.modules import (
    GroupedMatmulConfig,
    MultiLatentRaggedPageAttentionConfig,
    MultiLatentRaggedPageAttentionV2Config,
    UnifiedAttentionConfig,
)
from ejkernel.modules.operations import configs
from ejkernel.ops.call import call, decide
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import BaseOperationConfig, specified_leaf_fields
from ejkernel.ops.plugins import registry

OPS = sorted(name for name, op in registry().ops.items() if op.function.__module__.startswith("ejkernel."))


def fields(config: type) -> typing.Iterator[tuple[str, typing.Any]]:
    """The fields of a configuration class that a caller may set, each with a value that it takes."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        choices = typing.get_args(hints[field.name])
        literals = [x for kind in choices if typing.get_origin(kind) is typing.Literal for x in typing.get_args(kind)]
        if field.name in getattr(config, "call_argument_fields", ()):
            continue
        parts = [kind for kind in choices if dataclasses.is_dataclass(kind)]
        if parts:
            yield from ((field.name, parts[0](**{name: value})) for name, value in fields(parts[0]))
        elif bool in choices:
            yield field.name, True
        elif str in choices:
            yield field.name, "auto"
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
    unread = plain.implementation.config.unread_fields(cfg.part("forward"), "forward")
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
def test_fields_that_servers_set_change_no_result(name):
    op = registry().op(name)
    record = op.cases[0].make(jax.random.key(0))
    for got, want in zip(
        jax.tree.leaves(call(op, record, cfg=SERVERS[name])), jax.tree.leaves(call(op, record)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


UNREAD = {name: frozenset(names) for name, names in handwritten_tables()["unread"].items()}


def pairs(name: str) -> list[tuple[str, BaseOperationConfig]]:
    """The public fields of an operation that only tune, each with a configuration that sets it alone."""
    config = registry().op(name).config
    alone = [config(**{field: value}) for field, value in fields(config)]
    parts = [(cfg.part("forward") or cfg.part("backward"), cfg) for cfg in alone]
    return [
        (leaf, cfg)
        for part, cfg in parts
        for leaf in specified_leaf_fields(part)
        if leaf not in config.call_argument_fields
    ]


def test_the_table_of_fields_that_nothing_reads_is_that_of_the_kernels():
    """A field that is added to a configuration without a kernel that reads it, or loses its last one, shows here."""
    ours = {name: fields for name, fields in unread_fields(registry()).items() if hasattr(configs, name)}
    assert {name: frozenset(names) for name, names in ours.items()} == UNREAD


@pytest.mark.whole
@pytest.mark.parametrize("name", OPS)
def test_every_public_field_is_accepted_by_some_kernel(name):
    op = registry().op(name)
    record = op.cases[0].make(jax.random.key(0))
    for leaf, cfg in pairs(name):
        decision = decide(op, record, cfg=cfg)
        assert decision.forward.implementation is not None, leaf
        if leaf in UNREAD.get(op.config.__name__, ()) and cfg.part("forward") is not None:
            assert f"{leaf}: no effect" in str(decision), leaf


def test_fields_of_another_kernels_own_type_are_refused():
    """Public fields may have no effect; a kernel's own type has no field that its kernel does not read."""
    op = registry().op("flash_attention")
    record = op.cases[0].make(jax.random.key(0))
    own = registry().implementations["flash_attention"]
    triton = next(i for i in own if i.platform == "triton").config
    device = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
    part = triton.heuristic(op.lower(record), device, "forward")
    verdicts = decide(op, record, cfg=op.config(fwd_params=part)).forward.verdicts
    xla = next(v for v in verdicts if v.implementation.name == "xla")
    assert xla.reasons == (f"cfg: {type(part).__name__} is a configuration of another kernel",)
