"""What kernels lower to, so that two trees can be compared: a change of names must leave machine code as it was.

    python tests/project/machine_code.py v6e --out after.json            # in the tree as it is
    PYTHONPATH=<packages of the other tree> python tests/project/machine_code.py v6e --out before.json
    python tests/project/machine_code.py --compare before.json after.json

Every implementation of a backend lowers the conformance cases it serves, both passes, for a chip that need not be
there. Kept are the Mosaic modules of TPU and Hopper kernels, the PTX of Triton kernels, and whole StableHLO programs of
the XLA backend (`cpu --backend xla`), without locations, debug information and symbol names; dispatch wants jax-triton
installed for PTX. Modules are compared as a set for each call: the order of a program's kernels is XLA's.

Of the CUDA backend (`h200 --backend cuda`), nvcc compiles the C++ of each FFI handler. What counts of a kernel is its
machine code: instructions, registers, parameters and shared memory, whatever its name and namespace.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.plugins import registry

CHIPS = {
    "cpu": DeviceInfo(platform="cpu", vendor="", kind="cpu"),
    "v5e": DeviceInfo(platform="tpu", vendor="google", kind="TPU v5 lite"),
    "v6e": DeviceInfo(platform="tpu", vendor="google", kind="TPU v6 lite"),
    "v7x": DeviceInfo(platform="tpu", vendor="google", kind="TPU7x"),
    "h200": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0),
}
LOWERING_PLATFORM = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
KERNEL_CALLS = re.compile("tpu_custom_call|mosaic_gpu")
NAMES_AND_LOCATIONS = re.compile(r'@[\w$.]+|@"[^"]*"|sym_name = "[^"]*"|loc\([^()]*\)|#loc.*')
PTX_DEBUG_LINES = re.compile(r"^\s*(//.*|\.loc\b.*|\.file\b.*|\$L__(tmp|func)\w*:.*)$|//.*$", re.MULTILINE)


def main() -> int:
    """Writes what kernels lower to, or compares two files of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("chip", nargs="?", choices=sorted(CHIPS))
    parser.add_argument("--backend", default="pallas", choices=("pallas", "triton", "xla", "cuda"))
    parser.add_argument("--only", default="", help="regular expression: operation-implementation-case")
    parser.add_argument("--tag", default="ci", help="tag of the cases; empty for all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--texts", type=Path, help="folder for the modules themselves")
    parser.add_argument("--compare", nargs=2, type=Path)
    args = parser.parse_args()
    if args.compare:
        return compare(*(json.loads(path.read_text()) for path in args.compare))
    if not args.chip or not args.out:
        parser.error("a chip and --out, or --compare")
    found = {}
    of_cuda = args.backend == "cuda"
    listed = compiled(args.chip, args.only) if of_cuda else modules(args.chip, args.backend, args.only, args.tag)
    for label, texts in listed:
        found[label] = sorted({hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts})
        print(label, len(found[label]), flush=True)
        for text in texts if args.texts else ():
            args.texts.mkdir(parents=True, exist_ok=True)
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            (args.texts / f"{re.sub(r'[^A-Za-z0-9]+', '_', label)}.{name}.txt").write_text(text)
        args.out.write_text(json.dumps(found, indent=1))
    return 0


def compare(before: dict[str, list[str]], after: dict[str, list[str]]) -> int:
    """Prints what differs; 0 where nothing does."""
    both = before.keys() & after.keys()
    different = sorted(label for label in both if before[label] != after[label])
    for label in different:
        print("differs:", label)
    for label in sorted(before.keys() ^ after.keys()):
        print("in one alone:", label)
    kernels = len({name for label in both for name in after[label]})
    print(f"{len(both) - len(different)} of {len(both)} calls lower to the same, {kernels} different kernels")
    return 1 if different or not both else 0


def compiled(chip: str, only: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name of each FFI handler, and what identifies the machine code of each kernel that its source is compiled to."""
    from ejkernel.ops.source_digest import ffi_handlers
    from ejkernel_conformance.confirm.programs import cubins

    for name, path in sorted(ffi_handlers("ejkernel_cuda").items()):
        root = next(parent for parent in path.parents if parent.name == "csrc")
        if re.search(only, name):
            yield name, cubins.kernels_of(path, root, CHIPS[chip].compute_capability or 0)


def modules(chip: str, backend: str, only: str, tag: str) -> Iterator[tuple[str, list[str]]]:
    """Label and kernels of each call of the conformance suite that an implementation serves on a chip."""
    from ejkernel_conformance import subjects

    with target_device(CHIPS[chip]):
        for op in registry().ops.values():
            for implementation in registry().implementations[op.name]:
                if implementation.backend != backend and implementation.platform != backend:
                    continue
                for case in op.cases:
                    subject = subjects.Subject(op=op, implementation=implementation, case=case)
                    if (tag and tag not in case.tags) or not re.search(only, str(subject)):
                        continue
                    if not subjects.refusal(subject, "forward"):
                        yield str(subject), kernels(subject, chip, backend)


def kernels(subject: Any, chip: str, backend: str) -> list[str]:
    """The kernels of a call and, where the implementation serves it, of its gradients."""
    from ejkernel_conformance import running, subjects

    args = subjects.abstract_args(subject.case)
    plan = subjects.pinned_plan(subject.op, subject.implementation)
    back = subject.implementation.backward and not subjects.refusal(subject, "backward")

    def call(args: Any) -> Any:
        return running.call(plan, args)

    def gradients(args: Any) -> Any:
        output, pull = jax.vjp(call, args)
        return output, pull(jax.tree.map(jnp.ones_like, output))

    run = gradients if back else call
    if backend == "xla":
        program = jax.jit(run).trace(args).lower(lowering_platforms=(LOWERING_PLATFORM[CHIPS[chip].platform],))
        return [NAMES_AND_LOCATIONS.sub("@", program.as_text())]
    return triton_kernels(run, args, chip) if backend == "triton" else mosaic_kernels(run, args, chip)


def mosaic_kernels(run: Any, args: Any, chip: str) -> list[str]:
    """The Mosaic modules of a program, printed without locations and names."""
    # The parser of MLIR that JAX lowers with; JAX has no public one.
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    program = jax.jit(run).trace(args).lower(lowering_platforms=(LOWERING_PLATFORM[CHIPS[chip].platform],))
    found: list[str] = []

    def collect_kernel(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and KERNEL_CALLS.search(str(op.attributes["call_target_name"])):
            found.append(kernel_text(op, mlir.make_ir_context(), ir))
        return ir.WalkResult.ADVANCE

    program.compiler_ir("stablehlo").operation.walk(collect_kernel)
    return found


def kernel_text(op: Any, context: Any, ir: Any) -> str:
    """The module within a custom call."""
    # Each kind of kernel has a dialect of its own, which the parser must know.
    from jax._src.lib import mosaic_gpu_dialect, tpu

    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    mosaic_gpu_dialect.register_dialect(context)
    with context:
        if "mhlo.backend_config" in op.attributes:
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            body = ir.StringAttr(config["module"]).value_bytes
        else:
            import base64

            config = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
            body = base64.b64decode(config["custom_call_config"]["body"])
        module = ir.Module.parse(body, context=context)
        return NAMES_AND_LOCATIONS.sub("@", module.operation.get_asm(enable_debug_info=False))


def triton_kernels(run: Any, args: Any, chip: str) -> list[str]:
    """PTX of what a program launches, without debug information and names."""
    from ejkernel_triton import ahead, launch

    with launch.collect_launches() as calls:
        jax.eval_shape(run, args)
    made: dict[Any, str] = {}
    for call in calls:
        arrays = tuple(x.dtype.name for x in (*call.inputs, *call.outputs))
        key = (str(call.kernel), arrays, str(sorted(map(str, call.constants.items()))), call.num_warps, call.num_stages)
        if key not in made:
            built = ahead.compile_for_chip(call, f"sm_{round((CHIPS[chip].compute_capability or 0) * 10)}")
            text = built.assembly.split(".section\t.debug")[0].replace(built.kernel, "kernel")
            made[key] = re.sub(r"\n\s*\n+", "\n", PTX_DEBUG_LINES.sub("", text))
    return list(made.values())


if __name__ == "__main__":
    sys.exit(main())
