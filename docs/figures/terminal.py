"""What `ejkernel explain` and `ejkernel tune` print, as pictures of a terminal.

The text is what the commands printed, kept in `terminal_*.txt`: `explain` for an H200, which need not be here; `tune`
measured on the CPU of the machine at hand. `python docs/figures/terminal.py` runs both again and keeps what they print.
"""

import io
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).parent
CALL = ["flash_attention", "--shape", "1,2048,8,128", "--dtype", "bfloat16", "-o", "causal=true"]
SMALL = ["flash_attention", "--shape", "1,512,4,64", "-o", "causal=true"]
WIDTH = 112
# Colours by what a line says; the commands colour the same words.
STYLES = {r"\bchosen\b": "bold green", r"\busable\b": "cyan", r"\brefused\b": "red", r"^\$ .*": "bold", r"^─+$": "dim"}


def draw(folder: Path) -> None:
    """Writes `terminal_explain.svg` and `terminal_tune.svg`."""
    for name in ("explain", "tune"):
        console = Console(record=True, width=WIDTH, file=io.StringIO())
        text = Text((HERE / f"terminal_{name}.txt").read_text().rstrip())
        for pattern, style in STYLES.items():
            text.highlight_regex(re.compile(pattern, re.MULTILINE), style)
        console.print(text)
        svg = console.export_svg(title=f"ejkernel {name}", theme=MONOKAI, unique_id=f"ejkernel-{name}")
        # Fonts of the reader's system: pages ask no server for one.
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
        (folder / f"terminal_{name}.svg").write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE))


def record() -> None:
    """Runs both commands and keeps what they print."""
    from click.testing import CliRunner

    from ejkernel.cli import main
    from ejkernel.ops.device import DeviceInfo, target_device

    os.environ["COLUMNS"] = str(WIDTH)
    h200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
    with target_device(h200):
        said = CliRunner().invoke(main, ["explain", *CALL], catch_exceptions=False).output
    _keep("explain", CALL, said.split("\n\nflash_attention, backward")[0])
    with tempfile.TemporaryDirectory() as store:
        options = ["--direction", "forward", "--store", str(Path(store, "configs.json"))]
        said = CliRunner().invoke(main, ["tune", *SMALL, *options], catch_exceptions=False).output
    _keep("tune", [*SMALL, *options[:2]], said.split("\n\nstored in")[0])


def _keep(name: str, words: list[str], said: str) -> None:
    lines = [line.rstrip() for line in f"$ ejkernel {name} {' '.join(words)}\n{said.strip()}".splitlines()]
    (HERE / f"terminal_{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    record()
    draw(HERE)
