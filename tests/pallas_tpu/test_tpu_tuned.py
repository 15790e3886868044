"""The tables of predicted tiles that ship with the package. Needs no libtpu."""

import importlib.resources

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules.operations.configs import GroupedMatmulConfig
from ejkernel.modules.operations.grouped_matmul import OP, GroupedMatmulArguments
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.key import schema_hash
from ejkernel.ops.config.selection import Request
from ejkernel.ops.config.table import as_part, decode
from ejkernel.ops.device import DeviceInfo
from ejkernel_pallas.tpu.grouped_matmul import implementations
from ejkernel_pallas.tpu.grouped_matmul.spec import blocks_of, fitting
from ejkernel_pallas.tpu.profile import CHIPS

FILES = sorted(importlib.resources.files("ejkernel_pallas").joinpath("tuned").glob("*/grouped_matmul.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_entries_are_of_this_version_and_kernels_can_have_their_tiles(file):
    assert file.parent.name in {chip.kind.replace(" ", "_") for chip in CHIPS.values()}
    for key, entry in decode(file.read_bytes()).items():
        _, implementation, _, device, schema, _, _ = key.split(" | ")
        assert (implementation, device.replace(" ", "_")) == ("pallas_tpu", file.parent.name)
        assert schema == schema_hash(GroupedMatmulConfig)
        fitting(blocks_of(as_part(entry, GroupedMatmulConfig, key)), 2**20, 2**20)


# On v7x no tiles are faster forward than those of the rule, so that its table has no entry.
PASSES = [(chip, direction) for chip in CHIPS for direction in ("forward", "backward")]
PASSES.remove(("v7x", "forward"))


@pytest.mark.parametrize("rows", [8192, 10240])
@pytest.mark.parametrize(("chip", "direction"), PASSES)
def test_a_call_finds_the_entry_of_its_kind(chip, direction, rows):
    args = GroupedMatmulArguments(
        lhs=jax.ShapeDtypeStruct((rows, 4096), "bfloat16"),
        rhs=jax.ShapeDtypeStruct((8, 4096, 4096), "bfloat16"),
        group_sizes=jax.ShapeDtypeStruct((8,), "int32"),
        preferred_element_type=jnp.bfloat16,
    )
    (implementation,) = implementations()
    device = DeviceInfo(platform="tpu", vendor="google", kind=CHIPS[chip].kind)
    record = jax.eval_shape(OP.lower, args)
    request = Request(op=OP, implementation=implementation, direction=direction, device=device, record=record)
    selection = ConfigSelectorChain().choose(request)
    assert selection.trail[-1] == "persistent: shipped table"
    assert selection.part == request.completed(selection.part)
