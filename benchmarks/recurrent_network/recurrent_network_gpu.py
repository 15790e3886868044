"""`rnn`, `gru` and `lstm` on a GPU, forward and with all gradients, beside cuDNN's through PyTorch.

    python benchmarks/recurrent_network/recurrent_network_gpu.py  # the table
    python benchmarks/recurrent_network/recurrent_network_gpu.py --quick  # one size, few rounds
    # no times: small networks anywhere
    JAX_PLATFORMS=cpu python benchmarks/recurrent_network/recurrent_network_gpu.py --check

All sides get the same float32 arrays and cotangents. A side is timed only if its output and gradients agree with the
formula's at the highest precision. Sides are interleaved, several calls a sample, and medians are printed. cuDNN's
`lstm` through JAX is in `lstm_cudnn.py`.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel.ops.plugins import registry

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from selective_scan.selective_scan_gpu import Side, compiled, error, medians

COLUMNS = ("network", "pass", "precision", "side", "ms")
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
TOLERANCES = {"highest": 1e-3, "tensorfloat32": 3e-2}
"""What matrix products are taken at, and the relative error that is then not one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One network of one direction, with as many features as units, forward or with gradients."""

    kind: str
    rows: int = 64
    tokens: int = 512
    size: int = 1024
    layers: int = 1
    precision: str = "highest"
    gradients: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.rows} x {self.tokens} x {self.size}, {self.layers} deep"

    def arrays(self) -> dict[str, jax.Array]:
        """The operation's arguments; states begin as zeros."""
        gates = GATES[self.kind] * self.size
        shapes = {
            "x": (self.rows, self.tokens, self.size),
            "weight_ih": (1, gates, self.size),
            "weight_hh": (self.layers, 1, gates, self.size),
            "bias_ih": (self.layers, 1, gates),
            "bias_hh": (self.layers, 1, gates),
        }
        if self.layers > 1:
            shapes["weight_ih_deep"] = (self.layers - 1, 1, gates, self.size)
        keys = jax.random.split(jax.random.key(0), len(shapes))
        made = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
        return {name: x / x.shape[-1] ** 0.5 if "weight" in name else x for name, x in made.items()}


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """What is measured."""
    sizes: tuple[dict[str, int], ...] = ({},)
    if options.check:
        sizes = ({"rows": 3, "tokens": 5, "size": 8}, {"rows": 3, "tokens": 5, "size": 8, "layers": 2})
    elif not options.quick:
        sizes += ({"size": 512}, {"size": 512, "layers": 2})
    for kind in (kind for kind in GATES if options.kind in ("", kind)):
        for size in sizes:
            for precision in TOLERANCES:
                yield Cell(kind=kind, precision=precision, **size)
                yield Cell(kind=kind, precision=precision, gradients=True, **size)


def call(cell: Cell, arrays: dict[str, jax.Array], weights: jax.Array | None, *, formula: bool = False) -> Any:
    """Output, and gradients of all arrays in the order of their names, by the operation or by its reference."""
    op = registry().ops[cell.kind]

    def output(arrays: dict[str, jax.Array]) -> jax.Array:
        made = op.reference(op.arguments(**arrays)) if formula else op.function(**arrays, platform="xla")
        return made[0]

    if weights is None:
        return (output(arrays),)
    made, pull = jax.vjp(output, arrays)
    return made, *(x for _, x in sorted(pull(weights)[0].items()))


def cudnn(cell: Cell, arrays: dict[str, jax.Array], weights: jax.Array | None) -> Iterator[tuple[str, Side]]:
    """PyTorch's network, which is cuDNN's on a GPU, where it is installed."""
    if not importlib.util.find_spec("torch"):
        return
    try:
        import torch

        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = cell.precision != "highest"
        given = {name: torch.from_dlpack(x) for name, x in arrays.items()}
        network = getattr(torch.nn, cell.kind.upper())(cell.size, cell.size, cell.layers, batch_first=True)
        network = network.to(given["x"].device)
        with torch.no_grad():
            for layer in range(cell.layers):
                into = given["weight_ih"][0] if layer == 0 else given["weight_ih_deep"][layer - 1, 0]
                getattr(network, f"weight_ih_l{layer}").copy_(into)
                for name in ("weight_hh", "bias_ih", "bias_hh"):
                    getattr(network, f"{name}_l{layer}").copy_(given[name][layer, 0])
        network.flatten_parameters()
        run = _passes(cell, network, given["x"].clone(), weights)
        run()
    except Exception as failure:  # noqa: BLE001  whatever another library fails with is its result
        print(f"<!-- PyTorch on {cell}: {type(failure).__name__}: {str(failure)[:200]} -->", flush=True)
        return
    yield "cuDNN (PyTorch)", Side(run)


def _passes(cell: Cell, network: Any, x: Any, weights: jax.Array | None) -> Any:
    """A call of PyTorch's network, which waits for it: output and, as `call` has them, gradients."""
    import torch

    names = ("bias_hh", "bias_ih", "weight_hh", "weight_ih")
    cotangent = None if weights is None else torch.from_dlpack(weights)

    def run() -> Any:
        if cotangent is None:
            with torch.no_grad():
                made: list[Any] = [network(x)[0]]
        else:
            x.requires_grad_(True)
            leaves = {name: [getattr(network, f"{name}_l{n}") for n in range(cell.layers)] for name in names}
            output = network(x)[0]
            wanted = [*(leaf for some in leaves.values() for leaf in some), x]
            found = list(torch.autograd.grad(output, wanted, cotangent))
            grouped = {name: [found.pop(0) for _ in some] for name, some in leaves.items()}
            deep = grouped["weight_ih"][1:]
            grouped["weight_ih"] = grouped["weight_ih"][:1]
            if deep:
                grouped["weight_ih_deep"] = deep
            made = [output.detach(), *(grouped[name] for name in sorted(grouped)), found[0]]
        if x.is_cuda:
            torch.cuda.synchronize()
        return made

    return run


def numbers(made: Any) -> list[np.ndarray]:
    """Each result as one line of float32, on the host: layers' gradients follow each other."""

    def line(x: Any) -> np.ndarray:
        if isinstance(x, list):
            return np.concatenate([line(y) for y in x])
        return np.asarray(x if isinstance(x, jax.Array) else x.cpu().numpy(), np.float32).ravel()

    return [line(x) for x in made]


def timed(cell: Cell, options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side that is right."""
    arrays = cell.arrays()
    weights = jax.random.normal(jax.random.key(2), (cell.rows, cell.tokens, cell.size)) if cell.gradients else None
    with jax.default_matmul_precision("highest"):
        want = numbers(jax.jit(functools.partial(call, cell, formula=True))(arrays, weights))
    with jax.default_matmul_precision(cell.precision):
        contenders = {"ejkernel xla": compiled(functools.partial(call, cell), arrays, weights)}
    contenders |= dict(cudnn(cell, arrays, weights))
    for name in list(contenders):
        off = error(numbers(contenders[name].run()), want)
        if not off < TOLERANCES[cell.precision]:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    words = [str(cell), "with gradients" if cell.gradients else "forward", cell.precision]
    if options.check:
        yield from ([*words, name, "right"] for name in contenders)
        return
    for name, seconds in medians(contenders, 3 if options.quick else 7).items():
        yield [*words, name, f"{seconds * 1e3:.2f}"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size, few rounds")
    parser.add_argument("--kind", default="", choices=("", *GATES), help="one kind of network; without it all")
    parser.add_argument("--check", action="store_true", help="small networks on any device, no times")
    options = parser.parse_args()
    if options.check or shared.report.has_gpu():
        shared.report.print_rows_as_measured(COLUMNS, (row for cell in cells(options) for row in timed(cell, options)))


if __name__ == "__main__":
    main()
