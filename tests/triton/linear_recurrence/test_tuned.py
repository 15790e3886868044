"""The tables of measured tiles for linear recurrences that the Triton backend ships."""

import dataclasses
import hashlib
import importlib.metadata
import importlib.resources
import json

import jax
import jax.numpy as jnp
import pytest
from gradients_of import gradients_of
from triton_chips import H200

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.key import schema_hash
from ejkernel.ops.config.selection import Request
from ejkernel.ops.config.table import decode, entry_config_part
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel_triton import ahead, launch
from ejkernel_triton.linear_recurrence.config import DEFAULT_WARPS

FILES = sorted(
    file
    for file in importlib.resources.files("ejkernel_triton").joinpath("tuned").glob("*/*.json")
    if registry().ops[file.stem].family.name == "linear_recurrence"
)
THEN = {"fused": "walk", "fused_block_v": "walk_block_v", "fused_stages": "walk_stages", "segments": "splits"}
"""What fields were called when the tables were measured."""

FROZEN = {"state_warps": DEFAULT_WARPS, "score_warps": DEFAULT_WARPS, "score_stages": 1, "walk_warps": DEFAULT_WARPS}
"""Fields that had one value then, which the launches have now."""

SPILLED = {(3, 9): 160}
"""Bytes a thread that kernels may spill, by version of Triton: with 3.6, which measured them, nothing."""


def record_of(tokens=8192):
    """A call with a gate a channel, as the entry for such calls has it."""
    tokens = jax.ShapeDtypeStruct((4, tokens, 16, 128), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct(tokens.shape, jnp.float32)
    return LinearRecurrence(query=tokens, key=tokens, value=tokens, softmax_scale=0.1, decay=gates)


def implementation(op, name):
    return next(i for i in registry().implementations[op] if i.name == name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name} {file.stem}")
def test_tuned_entries_match_the_current_config_schema(file):
    entries = decode(file.read_bytes())
    assert entries
    for key, entry in entries.items():
        op, name, direction, device, schema, _, core = key.split(" | ")
        part = implementation(file.stem, name).config.forward
        assert (op.partition("@")[0], direction, core) == (file.stem, "both", "shipped")
        assert (device.replace(" ", "_"), schema) == (file.parent.name, schema_hash(part))
        assert entry_config_part(entry, part, key) is not None


def test_tuned_entries_are_unchanged_since_they_were_measured():
    """The digest is of the H200's table as it was measured, with the fields that the configuration had then."""
    (file,) = (file for file in FILES if file.stem == "gated_linear_attention")
    lines: list[str] = []
    for key, entry in decode(file.read_bytes()).items():
        direction, kind = (key.split(" | ")[n] for n in (2, 5))
        part = dataclasses.asdict(entry_config_part(entry, implementation(file.stem, "triton").config.forward, key))
        fields = {THEN.get(name, name): value for name, value in part.items()} | FROZEN
        lines.append(f"{direction} {kind}: {json.dumps(fields, sort_keys=True)} {entry.seconds}")
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    assert digest == "ccc554673bd28fe607d37ebb6e849969e4e25fd7721d7c462476b191759a551a"


@pytest.mark.parametrize("op", ["gated_linear_attention", "recurrent_attention"])
def test_calls_of_the_measured_kind_find_the_tuned_entry(op):
    """Operations of a family share it."""
    request = Request(
        op=registry().ops[op],
        implementation=implementation(op, "triton"),
        direction="both",
        device=H200,
        record=record_of(),
    )
    selection = ConfigSelectorChain().choose(request)
    assert selection.trail[-1].startswith("persistent: shipped table")
    assert (selection.part.gradient_block_k, selection.part.gradient_stages) == (32, 1)


def test_the_kernels_fit_the_chip_and_spill_nothing():
    kernels, record = implementation("gated_linear_attention", "triton"), record_of()
    (file,) = (file for file in FILES if file.stem == "gated_linear_attention")
    ((key, entry),) = decode(file.read_bytes()).items()
    part = entry_config_part(entry, kernels.config.forward, key)
    wanted = ("query", "key", "value", "decay")

    def both(record):
        results = kernels.function("forward")(record, part)
        return gradients_of(record, results, kernels.function("backward"), part, wanted)

    with target_device(H200), launch.collect_launches() as calls:
        jax.eval_shape(both, record)
    version = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    for call in calls:
        took = ahead.compile_for_chip(call, "sm_90")
        assert took.spilled_bytes <= SPILLED.get(version, 0), (took.kernel, took.registers, took.spilled_bytes)
        assert not ahead.miscompiled_shifts(took.assembly), took.kernel
