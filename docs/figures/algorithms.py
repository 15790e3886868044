"""Ring attention, pages of a KV cache, and a chunked recurrence."""

from pathlib import Path

from matplotlib.patches import Rectangle
from style import BLUE, GREEN, GREY, LIGHT_BLUE, MUTED, ORANGE, arrow, box, canvas, save

COLORS = (LIGHT_BLUE, "#fde68a", "#a7f3d0", "#fecaca")


def ring(folder: Path) -> None:
    """Keys and values travel; queries, accumulator and lse stay."""
    figure, axes = canvas(11, 4.6)
    for step in range(4):
        x0 = 0.2 + 2.7 * step
        axes.text(x0 + 1.2, 4.3, f"ring step {step}", ha="center", fontsize=11)
        for device in range(4):
            y, shard = 3.3 - 0.95 * device, (device - step) % 4
            box(axes, (x0, y), (1.0, 0.6), f"q{device}, lse{device}", "white")
            box(axes, (x0 + 1.3, y), (1.0, 0.6), f"k{shard} v{shard}", COLORS[shard])
            if device < 3 and step < 3:
                arrow(axes, (x0 + 1.8, y - 0.02), (x0 + 1.8, y - 0.33), color=MUTED)
        if step < 3:
            arrow(axes, (x0 + 2.35, 0.75), (x0 + 2.35, 3.6), bend=0.25, color=MUTED)
    axes.text(
        0.2,
        0.05,
        "zig-zag placement for causal masks: device i of n holds parts i and 2n-1-i: equal work",
        fontsize=9.5,
        color=MUTED,
    )
    save(figure, "ring", folder)


def pages(folder: Path) -> None:
    """Two sequences share a pool of pages through their rows of the block table."""
    figure, axes = canvas(10, 4.2)
    tables = {"sequence 0, context 11": (2, 5, 1), "sequence 1, context 6": (6, 3)}
    owner = {2: 0, 5: 0, 1: 0, 6: 1, 3: 1}
    for page in range(8):
        x = 0.4 + 1.18 * page
        box(axes, (x, 0.5), (1.0, 0.9), "", COLORS[owner[page]] if page in owner else GREY)
        axes.text(x + 0.5, 0.28, f"page {page}", ha="center", fontsize=9, color=MUTED)
        for slot in range(4):
            axes.add_patch(Rectangle((x + 0.1 + 0.21 * slot, 0.7), 0.17, 0.5, facecolor="none", edgecolor=MUTED))
    for row, (name, entries) in enumerate(tables.items()):
        y = 3.2 - 0.8 * row
        axes.text(0.4, y + 0.25, name, va="center", fontsize=10)
        for i, page in enumerate(entries):
            box(axes, (3.2 + 0.9 * i, y), (0.7, 0.5), str(page), COLORS[row])
            arrow(axes, (3.55 + 0.9 * i, y - 0.02), (0.9 + 1.18 * page, 1.45), color=MUTED)
    axes.text(6.4, 3.75, "block table: page of each 4 tokens", fontsize=10, color=MUTED)
    axes.text(6.4, 3.35, "grey pages are free: never read", fontsize=10, color=MUTED)
    save(figure, "pages", folder)


def recurrence(folder: Path) -> None:
    """A chunk's output is an inter-chunk product with the chunk state and an intra-chunk product."""
    figure, axes = canvas(10, 3.9)
    for chunk in range(4):
        x = 0.4 + 2.4 * chunk
        box(axes, (x, 2.6), (1.7, 0.8), f"chunk {chunk}\nq k v, log-decay", LIGHT_BLUE)
        box(axes, (x + 0.1, 0.5), (1.5, 0.8), f"output {chunk}", GREEN)
        arrow(axes, (x + 0.5, 2.58), (x + 0.5, 1.32), color=BLUE)
        axes.text(x + 0.42, 1.75, "intra-chunk", fontsize=8, color=BLUE, rotation=90, ha="right", va="center")
        if chunk < 3:
            box(axes, (x + 1.75, 1.75), (0.6, 0.5), f"S{chunk + 1}", ORANGE)
            arrow(axes, (x + 1.4, 2.58), (x + 1.9, 2.27), color=ORANGE)
            arrow(axes, (x + 2.05, 1.73), (x + 2.7, 1.32), color=ORANGE)
        if 0 < chunk < 3:
            arrow(axes, (x - 0.03, 2.0), (x + 1.73, 2.0), color=ORANGE)
    axes.text(
        0.4,
        0.1,
        "orange: state passing between chunks, sequential; blue: products inside a chunk, parallel",
        fontsize=9.5,
        color=MUTED,
    )
    save(figure, "recurrence", folder)


def draw(folder: Path) -> None:
    """Draws the three."""
    ring(folder)
    pages(folder)
    recurrence(folder)
