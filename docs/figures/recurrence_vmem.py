"""What the TPU kernel of the linear recurrence holds in VMEM over three grid steps."""

from pathlib import Path

from matplotlib.patches import Rectangle
from style import BLUE, GREEN, INK, LIGHT_BLUE, MUTED, ORANGE, arrow, canvas, save

STEP, LEFT = 2.5, 2.6
ROWS = {
    "inputs, slot 0": 4.1,
    "inputs, slot 1": 3.4,
    "state [16, 128, 128]": 2.5,
    "registers, matrix unit": 1.8,
    "output, slot 0": 0.9,
    "output, slot 1": 0.2,
}


def span(axes: object, row: str, start: float, length: float, text: str, color: str) -> None:
    """One use of a buffer, from a step on, in steps."""
    x, y = LEFT + start * STEP, ROWS[row]
    axes.add_patch(Rectangle((x, y), length * STEP, 0.55, facecolor=color, edgecolor=MUTED, linewidth=0.8))
    axes.text(
        x + length * STEP / 2,
        y + 0.275,
        text,
        ha="center",
        va="center",
        fontsize=9,
        color="white" if color == BLUE else INK,
    )


def draw(folder: Path) -> None:
    """Inputs arrive one step ahead in two slots, the state stays, and outputs leave one step later."""
    figure, axes = canvas(10.4, 5.2)
    for name, y in ROWS.items():
        axes.text(LEFT - 0.1, y + 0.275, name, ha="right", va="center", fontsize=10)
    for step in range(3):
        axes.text(LEFT + (step + 0.5) * STEP, 4.85, f"grid step {step}", ha="center", fontsize=10)
        span(axes, "registers, matrix unit", step, 1, f"chunk {step}: 16 heads", ORANGE)
        span(axes, "state [16, 128, 128]", step, 1, "initial" if not step else f"after chunk {step - 1}", GREEN)
        span(axes, f"inputs, slot {step % 2}", step, 1, f"read chunk {step}", BLUE)
        if step < 2:
            span(axes, f"inputs, slot {(step + 1) % 2}", step, 1, f"copy chunk {step + 1} in", LIGHT_BLUE)
        span(axes, f"output, slot {step % 2}", step, 1, f"write chunk {step}", BLUE)
        if step:
            span(axes, f"output, slot {(step - 1) % 2}", step, 1, f"copy chunk {step - 1} out", LIGHT_BLUE)
    arrow(axes, (LEFT, 0.05), (LEFT + 3 * STEP, 0.05), color=MUTED)
    save(figure, "recurrence_vmem", folder)
