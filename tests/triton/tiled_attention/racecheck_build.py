"""Builds what `racecheck_run.py` launches on a Hopper GPU; needs Triton and JAX, and no GPU.

    python tests/triton/tiled_attention/racecheck_build.py FOLDER

A file a call: its arrays, what its kernels should give of them (from the XLA backend), and the machine code of each
kernel, once more with its barriers taken out. The code is Hopper's, or Ampere's assembled for Hopper.
"""

import dataclasses
import hashlib
import importlib
import importlib.resources
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.config.table import decode, entry_config_part
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton import ahead, launch
from ejkernel_triton.tiled_attention import backward, config, forward
from ejkernel_xla.tiled_attention import backward as xla_backward
from ejkernel_xla.tiled_attention import forward as xla_forward
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax

DEVICES = {
    "sm_90": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0),
    "sm_80": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100", compute_capability=8.0),
}
LENGTH, HEADS, KV_HEADS = 200, 2, 1
WHOLE = ChunkedSoftmax(block_q=LENGTH, block_kv=LENGTH)
FEATURES = {
    "bfloat16": ("causal", "packed", "everything", "numerator"),
    "float32": ("causal", "highest", "everything"),
}
WANTED = ("query", "key", "value", "bias")
BARRIER = re.compile(r"^\s*(bar|barrier)(\.cta)?\.sync\b.*;", re.MULTILINE)


def make_record(size, dtype, features):
    """A call with random arrays: odd lengths, so that the last tile is cut."""
    rng = np.random.default_rng(size)
    query, key, value = (
        jnp.asarray(rng.normal(size=(1, LENGTH, heads, size)), dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (1, LENGTH))) - (np.arange(LENGTH) >= LENGTH - 9), jnp.int32)
    segments = {"q_segment_ids": ids, "kv_segment_ids": ids}
    given = {
        "causal": {},
        "packed": {**segments, "q_positions": jnp.arange(LENGTH)[None], "kv_positions": jnp.arange(LENGTH)[None]},
        "everything": {
            **segments,
            "bias": jnp.asarray(rng.normal(size=(1, HEADS, LENGTH, LENGTH)), dtype),
            "mask": jnp.asarray(rng.random((1, 1, LENGTH, LENGTH)) < 0.8),
            "softmax_aux": jnp.asarray(rng.normal(size=HEADS), jnp.float32),
            "sliding_window": (70, 0),
            "logits_soft_cap": 5.0,
            "dropout_prob": 0.2,
            "dropout_seed": jnp.uint32(7),
        },
        "numerator": {"normalize_output": False},
        "highest": {"precision": lax.Precision.HIGHEST},
    }[features]
    return TiledAttention(query=query, key=key, value=value, softmax_scale=size**-0.5, causal=True, **given)


def pull_back(record):
    """The backward pass of a record: what goes in, and the gradients of the XLA backend."""
    output, residuals = xla_forward.forward(record, WHOLE)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=output.shape), output.dtype)
    wanted = frozenset(name for name in WANTED if getattr(record, name) is not None)
    pulled = Pullback(record=record, residuals=residuals, output=output, cotangent=cotangent, grad_fields=wanted)
    return pulled, xla_backward.backward(pulled, WHOLE)


def launches(pullback, parts):
    """Each launch of both passes, with its inputs."""
    inputs = []

    def record_inputs(kernel, arrays, outputs, **options):
        inputs.append([arrays[0] if x is None else x for x in arrays])
        return launch.launch(kernel, arrays, outputs, **options)

    with (
        launch.collect_launches() as calls,
        mock.patch.object(forward, "launch", record_inputs),
        mock.patch.object(backward, "launch", record_inputs),
    ):
        forward.forward(pullback.record, parts[0])
        backward.backward(pullback, parts[1])
    return list(zip(calls, inputs, strict=True))


def results(call, pullback, gradients):
    """What a launch should write, None for what it need not."""
    names = {
        "flash_fwd_kernel": ("output", "lse", "row_max", None),
        "flash_bwd_dkdv_kernel": (
            "key" if call.constants.get("DK") else None,
            "value" if call.constants.get("DV") else None,
        ),
        "flash_bwd_dq_kernel": ("query",),
        "flash_bwd_dbias_kernel": ("bias",),
    }[call.kernel.__name__]
    known = {**dataclasses.asdict(pullback.residuals), **gradients, "output": pullback.output}
    return [None if name is None else known[name] for name, _ in zip(names, call.outputs, strict=False)]


def assemble(ptx):
    """Machine code for Hopper."""
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    chip = "sm_90a" if re.search(r"^\.target sm_90a", ptx, re.MULTILINE) else "sm_90"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        subprocess.run([compiler.get_ptxas(90).path, f"--gpu-name={chip}", source, "-o", binary], check=True)
        return np.frombuffer(binary.read_bytes(), np.uint8)


class Bundle(dict):
    """The arrays of a file, each once."""

    def add(self, x):
        """The name of an array in the file."""
        x = np.asarray(x.view(jnp.uint16) if x.dtype == jnp.bfloat16 else x)
        name = hashlib.sha256(x.tobytes()).hexdigest()[:16]
        self[name] = x
        return name


def build(folder, name, chip, record, parts):
    """Writes the file of a call."""
    pullback, gradients = pull_back(record)
    bundle, described = Bundle(), []
    with target_device(DEVICES[chip]):
        for call, inputs in launches(pullback, parts):
            took = ahead.compile_for_chip(call, chip)
            described.append(
                {
                    "kernel": took.kernel,
                    "code": bundle.add(assemble(took.assembly)),
                    "without_barriers": bundle.add(assemble(BARRIER.sub("", took.assembly))),
                    "barriers": len(BARRIER.findall(took.assembly)),
                    "grid": call.grid,
                    "threads": 32 * call.num_warps,
                    "shared": took.shared_memory_bytes,
                    "inputs": [bundle.add(x) for x in inputs],
                    "outputs": [(x.shape, jnp.dtype(x.dtype).name) for x in call.outputs],
                    "results": [x if x is None else bundle.add(x) for x in results(call, pullback, gradients)],
                }
            )
    np.savez_compressed(folder / f"{name}.npz", launches=json.dumps(described), **bundle)
    print(name, [x["barriers"] for x in described], flush=True)


def from_rule(chip, record):
    device = DEVICES[chip]
    return config.heuristic(record, device, "forward"), config.heuristic(record, device, "backward")


def from_table():
    """All pairs of tiles in the table of an H200, by bits of the dtype and head size."""
    table = importlib.resources.files("ejkernel_triton").joinpath("tuned/NVIDIA_H200/flash_attention.json")
    found = {}
    for key, entry in decode(table.read_bytes()).items():
        direction, kind = key.split(" | ")[2], key.split(" | ")[5]
        part = entry_config_part(entry, config.TritonForward if direction == "forward" else config.TritonBackward, key)
        bits, size = int(kind.split()[0]), int(kind.split()[2].split("x")[0])
        found.setdefault((bits, size), {}).setdefault(direction, {})[part] = None
    for (bits, size), parts in found.items():
        yield bits, size, list(itertools.zip_longest(parts["forward"], parts["backward"]))


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for chip, size, dtype in itertools.product(DEVICES, (64, 128, 256), FEATURES):
        for features in FEATURES[dtype]:
            record = make_record(size, dtype, features)
            build(folder, f"{chip}-{dtype}-{size}-{features}", chip, record, from_rule(chip, record))
    for bits, size, pairs in from_table():
        dtype = "bfloat16" if bits == 16 else "float32"
        record = make_record(size, dtype, "causal")
        rule = from_rule("sm_90", record)
        for i, pair in enumerate(pairs):
            parts = tuple(own or other for own, other in zip(pair, rule, strict=True))
            build(folder, f"sm_90-{dtype}-{size}-table{i}", "sm_90", record, parts)


if __name__ == "__main__":
    main()
