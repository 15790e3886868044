"""The table of measured tiles that ships for a GPU. Needs none."""

import hashlib
import importlib.resources

import jax
import pytest

import ejkernel
from ejkernel.modules import flash_attention, scaled_dot_product_attention
from ejkernel.modules.operations.flash_attention import OP, FlashAttentionArguments
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.selection import Request
from ejkernel.ops.config.table import decode, entry_config_part
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.gpu.tiled_attention import config, implementations
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec

TABLE = importlib.resources.files("ejkernel_pallas").joinpath("tuned/NVIDIA_H200/flash_attention.json")
H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
PARTS = {"forward": config.HopperForward, "backward": config.HopperBackward}


def record(size, length=8192):
    array = jax.ShapeDtypeStruct((4, length, 2048 // size, size), "bfloat16")
    return OP.lower(FlashAttentionArguments(query=array, key=array, value=array, causal=True))


def test_tiles_of_every_tuned_entry_are_valid():
    entries = decode(TABLE.read_bytes())
    assert {key.split(" | ")[2] for key in entries} == set(PARTS)
    for key, entry in entries.items():
        direction, kind = (key.split(" | ")[n] for n in (2, 5))
        spec, part = (
            make_spec(record(int(kind.split("x")[1].split()[0]))),
            entry_config_part(entry, PARTS[direction], key),
        )
        (config.forward_tile if direction == "forward" else config.backward_tile)(part, spec)


@pytest.mark.parametrize("direction", PARTS)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("length", "source"), [(8192, "persistent: shipped table"), (512, "heuristics")])
def test_a_call_takes_its_tuned_entry_or_else_the_heuristic(direction, size, length, source):
    implementation, _ = implementations()
    call = record(size, length)
    request = Request(op=OP, implementation=implementation, direction=direction, device=H200, record=call)
    selection = ConfigSelectorChain().choose(request)
    assert selection.trail[-1].startswith(source)
    assert selection.part == request.complete_with_heuristic(selection.part)


def test_tuned_entries_are_unchanged_since_they_were_measured():
    """The digest is of the table as it was measured, in the public fields `q_blocksize kv_blocksize num_stages`."""
    lines: list[str] = []
    for key, entry in decode(TABLE.read_bytes()).items():
        direction, kind = (key.split(" | ")[n] for n in (2, 5))
        part = entry_config_part(entry, PARTS[direction], key)
        tile = f"{part.block_q} {part.block_kv} {part.stages}"
        lines.append(f"{direction} {kind}: {tile} {entry.seconds} {entry.measured_at}")
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    assert digest == "1a243faa1bfe29abef1124a6d692ba1addfe5cbe5b34085230c7111eac00f3a4"


def test_other_operations_of_the_family_use_what_was_measured_for_flash_attention():
    array = jax.ShapeDtypeStruct((4, 8192, 16, 128), "bfloat16")
    with target_device(H200):
        flash = ejkernel.explain(flash_attention, array, array, array, causal=True, platform="pallas")
        other = ejkernel.explain(scaled_dot_product_attention, array, array, array, causal=True, platform="pallas")
    for one, two in ((flash.forward, other.forward), (flash.backward, other.backward)):
        assert (one.tier, two.tier) == ("persistent", "persistent")
        assert one.config == two.config
    assert any("shipped table of flash_attention" in step for step in other.forward.trail)
