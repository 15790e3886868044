"""The tables of predicted attention tiles that ship with the package. Needs no libtpu."""

import hashlib
import importlib.resources

import jax
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.flash_attention import OP
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.selection import Request
from ejkernel.ops.config.table import decode, entry_config_part
from ejkernel.ops.device import DeviceInfo
from ejkernel_pallas.tpu.profile import CHIPS
from ejkernel_pallas.tpu.tiled_attention import config, implementations
from ejkernel_pallas.tpu.tiled_attention.config import backward_blocks, forward_blocks
from ejkernel_pallas.tpu.tiled_attention.spec import make_spec

FILES = sorted(importlib.resources.files("ejkernel_pallas").joinpath("tuned").glob("TPU*/flash_attention.json"))
SHIPPED = [(chip, direction) for chip in CHIPS for direction in ("forward", "backward")]
PARTS = {"forward": config.TpuForward, "backward": config.TpuBackward}
(FLASH,) = implementations()

PREDICTED = "heuristics: predicted and not measured, shipped table"


def record(length, size=128, **options):
    query = jax.ShapeDtypeStruct((1, length, 8, size), "bfloat16")
    return TiledAttention(query=query, key=query, value=query, softmax_scale=1.0, **options)


def chosen(chip, made, direction):
    """The configuration that a call gets, and where from."""
    device = DeviceInfo(platform="tpu", vendor="google", kind=CHIPS[chip].kind)
    request = Request(op=OP, implementation=FLASH, direction=direction, device=device, record=made)
    selection = ConfigSelectorChain().choose(request)
    return request.complete_with_heuristic(selection.part), selection.trail[-1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_tiles_of_tuned_entries_are_valid(file):
    assert file.parent.name in {chip.kind.replace(" ", "_") for chip in CHIPS.values()}
    for key, entry in decode(file.read_bytes()).items():
        direction = key.split(" | ")[2]
        part = entry_config_part(entry, PARTS[direction], key)
        blocks = [forward_blocks(part)] if direction == "forward" else backward_blocks(part)
        for found in blocks:
            made = make_spec(record(4096, causal=True), found)
            assert (made.block_q, made.block_kv, made.chunk_q, made.chunk_kv) == found[:4]


@pytest.mark.parametrize(("chip", "direction"), SHIPPED)
def test_long_calls_use_tuned_entries_and_short_ones_the_heuristic(chip, direction):
    for size in (64, 128, 256):
        for causal in (True, False):
            assert chosen(chip, record(4096, size, causal=causal), direction)[1] == PREDICTED
            assert chosen(chip, record(2048, size, causal=causal), direction)[1] != PREDICTED


@pytest.mark.parametrize(("chip", "direction"), SHIPPED)
def test_heads_of_64_use_the_tiles_of_heads_of_128(chip, direction):
    """The kernels have them padded."""
    assert chosen(chip, record(4096, 64), direction) == chosen(chip, record(4096, 128), direction)


def tile(chip, made, direction="forward"):
    """Queries of the tile that the rule gives."""
    device = DeviceInfo(platform="tpu", vendor="google", kind=CHIPS[chip].kind)
    return FLASH.config.heuristic(made, device, direction).block_q


def test_wide_heads_get_large_tiles_on_wide_matrix_units():
    """Rings keep smaller ones: a kernel of theirs has tiles of both backward passes in memory."""
    long = record(8192, 256, causal=True)
    assert {chip: tile(chip, long) for chip in CHIPS} == {"v5e": 1024, "v5p": 1024, "v6e": 2048, "v7x": 2048}
    assert tile("v6e", record(2048, 256, causal=True)) == 1024
    device = DeviceInfo(platform="tpu", vendor="google", kind=CHIPS["v6e"].kind)
    assert config.heuristic(long, device, "backward", max_head_dim=128).dkv.block_q == 1024


def test_tuned_tiles_match_their_recorded_digest():
    """The digest is of the tables as they were made: of tiles, products and, of the backward pass, both kernels."""
    lines: list[str] = []
    for file in FILES:
        for key, entry in decode(file.read_bytes()).items():
            device, direction, kind = (key.split(" | ")[n] for n in (3, 2, 5))
            part = entry_config_part(entry, PARTS[direction], key)
            if direction == "forward":
                sizes = (part.block_q, part.block_kv, part.chunk_q, part.chunk_kv)
            else:
                sizes = (part.dkv.block_q, part.dkv.block_kv, part.dq.block_q, part.dq.block_kv, part.chunk)
            tile = " ".join(map(str, sizes))
            lines.append(f"{device} {direction} {kind}: {tile} {entry.seconds} {entry.measured_at}")
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    assert digest == "3e447e1cd0c527b6961e296bfa5888c54d381f502248f231116181864b4ae37f"
