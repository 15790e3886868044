"""Measures configurations of linear recurrences on a GPU, into the tables that `ejkernel-triton` ships for it.

    python benchmarks/linear_recurrence/linear_recurrence_gpu_tune.py \
        --export packages/ejkernel-triton/src/ejkernel_triton/tuned
    python benchmarks/linear_recurrence/linear_recurrence_gpu_tune.py --only state_space_v2  # one operation, no table

Each line is one `ejkernel tune`, which measures both passes together, since they share chunks; a call stands for all of
its kind: bits of a number, channels of keys and values, gates, and whether heads share keys. An interrupted run leaves
the lines that it finished.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from ejkernel.cli import main as ejkernel

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

TOKENS = "4,8192,16"
QKV = ("--shape", f"{TOKENS},128")
CALLS: dict[str, tuple[str, ...]] = {
    "state_space_v2": tuple(
        word
        for shape in (
            "x=8,8192,64,64",
            "A=64:float32",
            "B=8,8192,1,128",
            "C=8,8192,1,128",
            "D=64:float32",
            "dt=8,8192,64",
        )
        for word in ("--shape", shape)
    ),
    "gated_linear_attention": (*QKV, "--shape", f"g={TOKENS},128:float32"),
    "recurrent_attention": (*QKV, "--shape", f"g={TOKENS}:float32"),
    "lightning_attention": (*QKV, "-o", "layer_idx=1", "-o", "num_layers=8"),
}
CALLS |= {
    "kernel_delta_attention": (*QKV, "--shape", f"beta={TOKENS}", "--shape", f"decay={TOKENS},128:float32"),
    "gated_delta_rule": (*QKV, "--shape", f"beta={TOKENS}", "--shape", f"decay={TOKENS}:float32"),
}
"""Operation -> what follows it in `ejkernel tune`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CALLS, default=list(CALLS), help="these operations")
    parser.add_argument("--repeat", default="5", help="samples of a candidate")
    parser.add_argument("--export", type=Path, help="folder of tables")
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    with tempfile.TemporaryDirectory() as folder:
        further = ["--platform", "triton", "--dtype", "bfloat16", "--repeat", options.repeat]
        further += ["--store", str(Path(folder, "store.json"))]
        further += ["--export", str(options.export)] if options.export else []
        for name in options.only:
            print(f"\n$ ejkernel tune {name} {' '.join(CALLS[name])}", flush=True)
            ejkernel(["tune", name, *CALLS[name], *further], standalone_mode=False)


if __name__ == "__main__":
    main()
