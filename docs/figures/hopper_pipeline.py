"""The Hopper forward kernel over time: one producer warpgroup, two consumer warpgroups in ping-pong."""

from pathlib import Path

from style import BLUE, GREEN, LIGHT_BLUE, MUTED, ORANGE, arrow, canvas, save

UNIT = 0.52
ROWS = {"producer": 3.2, "consumer 0": 2.0, "consumer 1": 0.8}


def span(axes: object, row: str, start: float, length: float, text: str, color: str) -> None:
    """One piece of work of a warpgroup."""
    from matplotlib.patches import Rectangle

    x, y = 1.5 + start * UNIT, ROWS[row]
    axes.add_patch(Rectangle((x, y), length * UNIT, 0.7, facecolor=color, edgecolor=MUTED, linewidth=0.8))
    axes.text(x + length * UNIT / 2, y + 0.35, text, ha="center", va="center", fontsize=8)


def draw(folder: Path) -> None:
    """Copies on top; below, products of one consumer run while the other exponentiates."""
    figure, axes = canvas(12, 4.4)
    for name, y in ROWS.items():
        axes.text(1.4, y + 0.35, name, ha="right", va="center", fontsize=10)
    span(axes, "producer", 0, 1.4, "TMA q", LIGHT_BLUE)
    for i in range(4):
        span(axes, "producer", 1.5 + 4 * i, 1.2, f"k{i}", LIGHT_BLUE)
        span(axes, "producer", 2.8 + 4 * i, 1.2, f"v{i}", LIGHT_BLUE)
    for warpgroup, shift in (("consumer 0", 3.0), ("consumer 1", 5.0)):
        for i in range(3):
            span(axes, warpgroup, shift + 4 * i, 1.0, f"q·k{i}", BLUE)
            span(axes, warpgroup, shift + 1.0 + 4 * i, 1.0, f"p·v{i - 1}" if i else "", BLUE if i else "none")
            span(axes, warpgroup, shift + 2.0 + 4 * i, 2.0, f"softmax {i}", ORANGE)
        span(axes, warpgroup, shift + 12, 1.0, "p·v2", BLUE)
        span(axes, warpgroup, shift + 13, 1.6, "epilogue", GREEN)
    for start, end in ((5.0, 5.0), (7.0, 7.0), (9.0, 9.0), (11.0, 11.0), (13.0, 13.0)):
        down = (start - 5.0) % 4 == 0
        y = (2.0, 1.5) if down else (1.5, 2.0)
        arrow(axes, (1.5 + start * UNIT, y[0]), (1.5 + end * UNIT, y[1]), color=MUTED)
    axes.text(1.5, 4.15, "WGMMA", color=BLUE, fontsize=10)
    axes.text(2.6, 4.15, "exponentials, masks", color=ORANGE, fontsize=10)
    axes.text(4.9, 4.15, "arrows: barriers that hand the tensor cores over (ping-pong)", color=MUTED, fontsize=10)
    arrow(axes, (1.5, 0.35), (11.6, 0.35), color=MUTED)
    axes.text(11.6, 0.1, "time", ha="right", color=MUTED, fontsize=9)
    save(figure, "hopper_pipeline", folder)
