"""No times and no GPU: the machine code of the selective scan's candidates, compiled for an H200.

    python benchmarks/selective_scan/selective_scan_code.py              # B8 S4096 E4096, N 16
    python benchmarks/selective_scan/selective_scan_code.py --size 32

Of the forward kernel's main loop: instructions an element of a state and token, exponentials among them, and how many
instructions stand between a load and the first that reads it, least and median. Columns are loads of 128 bits (B and
C), tokens those of 16 bits (x and dt). Predicates are ignored, so that the store of states, which one block in many
runs, counts every time.
"""

import argparse
import importlib.util
import re
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_triton import ahead, launch
from ejkernel_triton.selective_scan import config
from ejkernel_triton.selective_scan.forward import forward

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("configuration", "registers", "spilled", "instructions", "exponentials", "columns", "tokens")
H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")

Instruction = tuple[str, str]


def record(size: int) -> SelectiveScan:
    """The shapes of a scan."""
    token, column = (jax.ShapeDtypeStruct((8, 4096, channels), jnp.bfloat16) for channels in (4096, size))
    decay, skip = jax.ShapeDtypeStruct((4096, size), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.float32)
    return SelectiveScan(x=token, step=token, decay=decay, write=column, read=column, skip=skip)


def main_loop(code: str) -> list[Instruction]:
    """(operation, operands) of the longest loop, without the loops around it."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    loops: list[list[Instruction]] = []
    for line in code.splitlines():
        if label := re.match(r"^\.(L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif parts := INSTRUCTION.match(line):
            found.append((parts[1], parts[2]))
            target = re.search(r"\.(L_x_\d+)", parts[2]) if parts[1].startswith("BRA") else None
            if target and target[1] in labels:
                loops.append(found[labels[target[1]] :])
    return max(loops, key=len)


def loaded(instruction: Instruction) -> set[str]:
    """The registers that a load writes."""
    operation, operands = instruction
    first = re.match(r"R(\d+)", operands)
    wide = 4 if ".128" in operation else 1
    return {f"R{int(first[1]) + n}" for n in range(wide)} if first else set()


def distances(loop: list[Instruction], kind: str) -> list[int]:
    """Instructions from each load of a kind to the first that reads it, around the loop."""
    count, found = len(loop), []
    for i, (operation, _) in enumerate(loop):
        if operation.startswith("LDG") and kind in operation:
            registers = loaded(loop[i])
            later = (loop[(i + n) % count][1].partition(",")[2] for n in range(1, count + 1))
            reads = (registers & set(re.findall(r"\bR\d+\b", operands)) for operands in later)
            found.append(next((n for n, read in enumerate(reads, 1) if read), count))
    return found


def row(tiles: config.ScanForward, scan: SelectiveScan) -> list[str]:
    """A configuration's line."""
    with target_device(H200), launch.collect_launches() as calls:
        jax.eval_shape(lambda scan: forward(scan, tiles)[0], scan)
    took = ahead.compile_for_chip(calls[-1], "sm_90")
    loop = main_loop(ahead.disassemble_to_sass(took.binary))
    elements = tiles.block_t * scan.decay.shape[1] * tiles.block_e / (32 * tiles.num_warps)
    exponentials = sum(operation.startswith("MUFU.EX2") for operation, _ in loop)
    spans = (distances(loop, kind) for kind in (".128", ".U16"))
    least = (f"{min(span)} / {statistics.median(span):.0f}" if span else "" for span in spans)
    shares = (f"{len(loop) / elements:.2f}", f"{exponentials / elements:.2f}")
    return [str(tiles), str(took.registers), str(took.spilled_bytes), *shares, *least]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same: nothing here takes long")
    parser.add_argument("--size", type=int, default=16, help="numbers a state")
    options = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        print("selective_scan_code.py needs Triton: nothing was compiled")
        return
    scan = record(options.size)
    candidates = config.candidates(scan, H200, "forward")
    print(shared.report.heading())
    print(shared.report.markdown_table(COLUMNS, [row(tiles, scan) for tiles in candidates]))


if __name__ == "__main__":
    main()
