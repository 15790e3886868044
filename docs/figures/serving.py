"""Bars of paged attention's measured speed: decoding beside a copy, prefill beside dense attention, from the table."""

from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, GREY, LIGHT_BLUE, MUTED, save, table_rows

LAYOUT = " H32/8 D128 page "
DECODING = (
    ("B64 ctx 8192{}64", "64 of 8192 tokens"),
    ("B64 ctx 8192{}16", "the same, pages of 16"),
    ("B64 ctx 2048{}64", "64 of 2048"),
    ("B64 ctx 16384{}64, lengths 1 to 16384", "64 of 1 to 16384"),
    ("B64 ctx 8192{}64, float8_e4m3fn cache", "64 of 8192, float8 cache"),
)
PREFILL = (
    ("B8 ctx 8192{}64, 512 new", "8 chunks of 512 after 8192"),
    ("B8 ctx 8192{}64, 2048 new", "8 chunks of 2048 after 8192"),
)
DECODERS = (
    ("ejkernel cuda", BLUE, "ejkernel, CUDA C++"),
    ("ejkernel triton", LIGHT_BLUE, "Triton"),
    ("copy", GREY, "copy"),
)
PREFILLERS = (
    ("ejkernel pallas", BLUE, "ejkernel, Mosaic GPU"),
    ("ejkernel triton", LIGHT_BLUE, "Triton"),
    ("flash_attention, dense", GREY, "dense flash attention"),
)


def rates(shape: str, sides: list[str]) -> list[float]:
    """Returns the rates of a shape on several sides, from the first table in which one run measured them all."""
    measured: dict[str, float] = {}
    for name, side, _, rate in table_rows("paged_attention_gpu.md"):
        if name == "shape":
            measured = {}
        elif name == shape and rate[:1].isdigit():
            measured[side] = float(rate.split()[0])
            if measured.keys() >= set(sides):
                return [measured[side] for side in sides]
    raise ValueError(f"no table of paged_attention_gpu.md has {shape!r} for all of {sides}")


def panel(axes: object, shapes: tuple[tuple[str, str], ...], sides: tuple, unit: str, offset: float) -> None:
    """One kind of call; `offset` is where its legend is."""
    for i, (shape, _) in enumerate(shapes):
        measured = rates(shape.format(LAYOUT), [side for side, *_ in sides])
        for slot, (rate, (_, color, label)) in enumerate(zip(measured, sides, strict=True)):
            at = i + (slot - 1) * 0.27
            axes.barh(at, rate, 0.25, color=color, label=None if i else label)
            ink = "white" if color == BLUE else "black"
            axes.text(rate * 0.98, at, f"{rate:.0f}", va="center", ha="right", fontsize=9, color=ink)
    axes.set(xlabel=unit, yticks=range(len(shapes)), yticklabels=[name for _, name in shapes])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, offset), ncols=3, frameon=False, fontsize=10)


def draw(folder: Path) -> None:
    """Paged attention on an H200."""
    figure, panels = plt.subplots(2, 1, figsize=(8, 7.6), height_ratios=(5, 2.2))
    panel(panels[0], DECODING, DECODERS, "decoding, sequences of a batch: GB/s of keys and values", -0.14)
    panel(panels[1], PREFILL, PREFILLERS, "prefill over pages: TFLOP/s", -0.32)
    source = "H200, bfloat16, 32/8 heads of 128, JAX 0.11.2; benchmarks/paged_attention/paged_attention_gpu.py"
    figure.text(0.99, -0.02, source, ha="right", fontsize=8.5, color=MUTED)
    figure.tight_layout()
    save(figure, "serving", folder)
