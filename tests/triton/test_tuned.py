"""The tables of measured tiles that the Triton backend ships. Needs no Triton."""

import hashlib
import importlib.resources

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules.operations.flash_attention import OP, FlashAttentionArguments
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.key import schema_hash
from ejkernel.ops.config.selection import Request
from ejkernel.ops.config.table import decode, entry_config_part
from ejkernel.ops.device import DeviceInfo
from ejkernel_triton.tiled_attention import config, implementations

PARTS = {"forward": config.TritonForward, "backward": config.TritonBackward}
FILES = sorted(importlib.resources.files("ejkernel_triton").joinpath("tuned").glob("*/flash_attention.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_tuned_entries_match_the_config_schema_and_have_valid_tiles(file):
    entries = decode(file.read_bytes())
    kinds = {direction: set() for direction in PARTS}
    for key, entry in entries.items():
        _, implementation, direction, device, schema, kind, _ = key.split(" | ")
        assert (implementation, device.replace(" ", "_")) == ("triton", file.parent.name)
        assert schema == schema_hash(PARTS[direction])
        part = entry_config_part(entry, PARTS[direction], key)
        config.forward_tile(part) if direction == "forward" else config.backward_tiles(part)
        kinds[direction].add(kind)
    assert kinds["forward"] == kinds["backward"] != set()


@pytest.mark.parametrize("direction", PARTS)
@pytest.mark.parametrize("batch", [4, 3])
def test_a_call_finds_the_tuned_entry_of_its_kind(direction, batch):
    array = jax.ShapeDtypeStruct((batch, 8192, 32, 128), jnp.float16)
    record = OP.lower(FlashAttentionArguments(query=array, key=array, value=array, causal=True))
    device = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
    implementation, _ = implementations()
    request = Request(op=OP, implementation=implementation, direction=direction, device=device, record=record)
    selection = ConfigSelectorChain().choose(request)
    assert selection.trail[-1] == "persistent: shipped table"
    assert selection.part == request.complete_with_heuristic(selection.part)


def test_tuned_entries_are_unchanged_since_they_were_measured():
    """The digest is of the H200's table as it was measured, in the fields that the tiles had then.

    Those were, of the backward pass, block_q, block_kv, warps and stages for keys, and block_q, block_kv and stages for
    queries, whose warps followed.
    """
    (file,) = (file for file in FILES if file.parent.name == "NVIDIA_H200")
    lines: list[str] = []
    for key, entry in decode(file.read_bytes()).items():
        direction, kind = (key.split(" | ")[n] for n in (2, 5))
        part = entry_config_part(entry, PARTS[direction], key)
        first = part if direction == "forward" else part.dkv
        sizes = [first.block_q, first.block_kv, first.num_warps, first.num_stages]
        if direction == "backward":
            sizes += [part.dq.block_q, part.dq.block_kv, part.dq.num_stages]
            assert part.dq.num_warps == config.query_gradient_warps(part.dq.block_q, part.dq.block_kv)
        lines.append(f"{direction} {kind}: {' '.join(map(str, sizes))} {entry.seconds} {entry.measured_at}")
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    assert digest == "651ba0fbf60667f88f8ec539055f4cffeb61c2f3bce4282defcb0c0641ab9aba"
