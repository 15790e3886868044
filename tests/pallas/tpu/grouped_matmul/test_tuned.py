"""The tables of predicted tiles that ship with the package. Needs no libtpu."""

import hashlib
import importlib.resources

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules.operations.grouped_matmul import OP, GroupedMatmulArguments
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.key import schema_hash
from ejkernel.ops.config.selection import Request
from ejkernel.ops.config.table import decode, entry_config_part
from ejkernel.ops.device import DeviceInfo
from ejkernel_pallas.tpu.grouped_matmul import implementations
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul
from ejkernel_pallas.tpu.grouped_matmul.spec import fit_blocks_to_arrays, tile_sizes_of
from ejkernel_pallas.tpu.profile import CHIPS

FILES = sorted(importlib.resources.files("ejkernel_pallas").joinpath("tuned").glob("*/grouped_matmul.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_tuned_entries_are_current_and_have_valid_tiles(file):
    assert file.parent.name in {chip.kind.replace(" ", "_") for chip in CHIPS.values()}
    for key, entry in decode(file.read_bytes()).items():
        _, implementation, _, device, schema, _, _ = key.split(" | ")
        assert (implementation, device.replace(" ", "_")) == ("mosaic_tpu", file.parent.name)
        assert schema == schema_hash(TpuMatmul)
        fit_blocks_to_arrays(tile_sizes_of(entry_config_part(entry, TpuMatmul, key)), 2**20, 2**20)


# On v7x no tiles are faster forward than those of the rule, so that its table has no entry.
PASSES = [(chip, direction) for chip in CHIPS for direction in ("forward", "backward")]
PASSES.remove(("v7x", "forward"))


@pytest.mark.parametrize("rows", [8192, 10240])
@pytest.mark.parametrize(("chip", "direction"), PASSES)
def test_a_call_finds_its_tuned_table_entry(chip, direction, rows):
    args = GroupedMatmulArguments(
        lhs=jax.ShapeDtypeStruct((rows, 4096), "bfloat16"),
        rhs=jax.ShapeDtypeStruct((8, 4096, 4096), "bfloat16"),
        group_sizes=jax.ShapeDtypeStruct((8,), "int32"),
        preferred_element_type=jnp.bfloat16,
    )
    implementation, _ = implementations()
    device = DeviceInfo(platform="tpu", vendor="google", kind=CHIPS[chip].kind)
    record = jax.eval_shape(OP.lower, args)
    request = Request(op=OP, implementation=implementation, direction=direction, device=device, record=record)
    selection = ConfigSelectorChain().choose(request)
    assert selection.trail[-1] == "heuristics: predicted and not measured, shipped table"
    assert selection.part == request.complete_with_heuristic(selection.part)


def test_tuned_tiles_match_their_recorded_digest():
    """The digest is of the tables as they were made."""
    lines: list[str] = []
    for file in FILES:
        for key, entry in decode(file.read_bytes()).items():
            device, direction, kind = (key.split(" | ")[n] for n in (3, 2, 5))
            part = entry_config_part(entry, TpuMatmul, key)
            tile = f"{part.block_m} {part.block_k} {part.block_n}"
            lines.append(f"{device} {direction} {kind}: {tile} {entry.seconds} {entry.measured_at}")
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    assert digest == "b0efaeb1e1b5b99574554e8e3ae68c052d5c9b9680c4e868170aef7be550648b"
