"""The path of a call, and the seven tiers of a configuration."""

from pathlib import Path

from style import BLUE, GREEN, GREY, LIGHT_BLUE, MUTED, ORANGE, arrow, box, canvas, save

STEPS = (
    (
        "operation",
        "flash_attention(query, key, value, causal=True)",
        "one file: arguments, reference, cases",
    ),
    ("argument record", "frozen, one form for each way to say the same thing", "ValueError: wrong on every backend"),
    ("family record", "TiledAttention: every optional term is a field", "what backends implement"),
    ("verdicts", "each implementation: chosen, usable or refused", "a field outside of `handles` refuses, by name"),
    ("configuration", "seven tiers, the first that answers", "changes speed, never the answer"),
    ("kernel", "forward(record, config)", "output, residuals, private residuals"),
)
TIERS = (
    ("override", "cfg= of the call"),
    ("overlay", "an enclosing overlay_cache"),
    ("memory", "measured earlier in this process"),
    ("persistent", "the user's store, then shipped tables"),
    ("autotune", "a measurement, if the policy allows one"),
    ("heuristics", "the kernel's rule for shapes and device"),
    ("error", "the policy forbade what was left"),
)


def call_path(folder: Path) -> None:
    """The steps from the call to the kernel, with what each gives."""
    figure, axes = canvas(10, 6.4)
    for i, (name, what, why) in enumerate(STEPS):
        y = 5.6 - i
        box(axes, (0.2, y), (2.2, 0.6), name, (LIGHT_BLUE, GREEN)[name == "kernel"])
        axes.text(2.7, y + 0.40, what, va="center", fontsize=10.5)
        axes.text(2.7, y + 0.13, why, va="center", fontsize=9, color=MUTED)
        if i:
            arrow(axes, (1.3, y + 1), (1.3, y + 0.62))
    arrow(axes, (8.1, 0.9), (8.1, 2.9), bend=0.3, color=BLUE)
    axes.text(8.55, 1.9, "backward pass:\nits own verdicts\nand configuration", va="center", fontsize=9, color=BLUE)
    save(figure, "call_path", folder)


def tiers(folder: Path) -> None:
    """The tiers from top to bottom; which of them hold measured results."""
    figure, axes = canvas(8, 5.2)
    for i, (name, source) in enumerate(TIERS):
        y = 4.55 - 0.7 * i
        color = {"memory": GREEN, "persistent": GREEN, "autotune": GREEN, "error": GREY}.get(name, LIGHT_BLUE)
        box(axes, (0.2, y), (2.0, 0.5), f"{i + 1}  {name}", color)
        axes.text(2.5, y + 0.25, source, va="center", fontsize=10)
        if i:
            arrow(axes, (1.2, y + 0.7), (1.2, y + 0.52))
    arrow(axes, (7.0, 1.9), (7.0, 3.4), bend=0.3, color=ORANGE)
    axes.text(7.0, 1.7, "winners are stored", ha="center", va="top", fontsize=9, color=MUTED)
    save(figure, "tiers", folder)


def draw(folder: Path) -> None:
    """Draws both."""
    call_path(folder)
    tiers(folder)
