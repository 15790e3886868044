"""Writes `fixtures/`: weights, inputs, outputs and gradients of the original layers, computed by PyTorch on a CPU.

Weights and inputs are drawn by NumPy and rounded to bfloat16, so that 16 bits hold them exactly. The same versions of
PyTorch, transformers and NumPy write the same bits again; `versions.json` says which wrote the files.

    python -m tests.models.make_fixtures                   # write all
    python -m tests.models.make_fixtures llama mamba2      # write some
    python -m tests.models.make_fixtures --check           # compare with what is committed, write nothing
"""

import argparse
import importlib
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from tests.models.originals.common import call, draw, initialise

FOLDER = Path(__file__).parent / "fixtures"
VERSIONS = FOLDER / "versions.json"
BATCH, TOKENS, LENGTHS = 2, 21, (8, 1, 12)


def families() -> list[str]:
    """The names of the files in `originals/`."""
    return sorted(x.stem for x in (Path(__file__).parent / "originals").glob("[!_]*.py") if x.stem != "common")


def fixture(family: str) -> dict[str, np.ndarray]:
    """Everything that the tests of one family compare with."""
    original = importlib.import_module(f"tests.models.originals.{family}")
    seed = zlib.crc32(family.encode())
    torch.manual_seed(seed)  # what a layer's own initialisation draws
    rng = np.random.default_rng(seed)
    if hasattr(original, "generated"):
        model, arrays = original.generated(rng)
        return arrays | {f"w.{name}": half(parameter) for name, parameter in model.named_parameters()}
    layer = original.build().float().eval()
    getattr(original, "initialise", initialise)(layer, rng)
    width = getattr(original, "WIDTH", 32)
    x = draw(rng, (BATCH, getattr(original, "TOKENS", TOKENS), width), 1.0).requires_grad_()
    run = getattr(original, "call", call)
    y = run(layer, x)
    dy = draw(rng, tuple(y.shape), 1.0)
    y.backward(dy)
    arrays = {"x": half(x), "dy": half(dy), "y": y.detach().numpy(), "dx": x.grad.numpy()}
    for name, parameter in layer.named_parameters():
        arrays[f"w.{name}"] = half(parameter)
        if parameter.grad is not None:
            arrays[f"dw.{name}"] = parameter.grad.numpy()
    buffers = dict(layer.named_buffers())
    arrays |= {f"b.{name}": half(buffers[name]) for name in getattr(original, "BUFFERS", ())}
    if getattr(original, "PACKED", True):
        with torch.no_grad():
            pieces = torch.split(x[:1], LENGTHS, dim=1)
            arrays["y_packed"] = torch.cat([run(layer, piece) for piece in pieces], dim=1).numpy()
    if broken := [name for name, x in arrays.items() if x.dtype == np.float32 and not np.isfinite(x).all()]:
        raise ValueError(f"{family}: {', '.join(broken)} are not finite: `build` must initialise every parameter")
    return arrays


def half(x: torch.Tensor) -> np.ndarray:
    """The upper 16 bits of float32 numbers whose lower ones are zero, as uint16."""
    bits = x.detach().contiguous().numpy().view(np.uint32)
    if np.any(bits & 0xFFFF):
        raise ValueError("a number is not exact in bfloat16: draw weights and inputs with `draw`")
    return (bits >> 16).astype(np.uint16)


def versions() -> dict[str, str]:
    """The versions of what computes the fixtures."""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}


def check(family: str, arrays: dict[str, np.ndarray]) -> list[str]:
    """Says which arrays differ from the committed ones, and by how much."""
    with np.load(FOLDER / f"{family}.npz") as committed:
        if set(committed.files) != set(arrays):
            return [f"{family}: other arrays: {sorted(set(committed.files) ^ set(arrays))}"]
        return [
            f"{family}: {name} differs by up to {np.max(np.abs(committed[name].astype(np.float64) - x)):.3g}"
            for name, x in arrays.items()
            if committed[name].tobytes() != x.tobytes()
        ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[[], *families()], default=[])
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    differences: list[str] = []
    for family in args.families or families():
        arrays = fixture(family)
        if args.check:
            differences += check(family, arrays)
        else:
            np.savez_compressed(FOLDER / f"{family}.npz", **arrays)
            print(f"{family}: {(FOLDER / f'{family}.npz').stat().st_size / 1024:.0f} KiB")
    if not args.check:
        VERSIONS.write_text(json.dumps(versions(), indent=2) + "\n")
        return
    written = json.loads(VERSIONS.read_text())
    for name, version in versions().items():
        if written[name] != version:
            print(f"{name}: {version} here, {written[name]} wrote the fixtures")
    sys.exit("\n".join(differences) or 0)


if __name__ == "__main__":
    main()
