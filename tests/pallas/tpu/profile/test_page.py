"""The help text and the chips in `docs/tpu_profile.md` are those of the program."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ejkernel_pallas.tpu.profile import CHIPS
from ejkernel_pallas.tpu.profile.command import profile

PAGE = (Path(__file__).parents[4] / "docs" / "tpu_profile.md").read_text()


def test_profile_help_in_the_docs_is_current(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    names = {"help_option_names": ["-h", "--help"]}  # the command line's own, which a command inherits
    shown = CliRunner().invoke(profile, ["--help"], prog_name="ejkernel profile", **names).output
    text = "\n".join(line.rstrip() for line in shown.rstrip().splitlines())
    assert f"$ ejkernel profile --help\n{text}\n```" in PAGE


@pytest.mark.parametrize("target", CHIPS)
def test_chip_figures_in_the_docs_are_current(target):
    chip = CHIPS[target]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{target}` |"))
    for figure in (
        f"{chip.clock_hz / 1e9:.2f} GHz",
        f"{chip.flops / 1e12:.0f} TFLOP/s",
        f"{chip.bandwidth / 1e9:.0f} GB/s",
        f"{chip.vmem >> 20} MiB",
        f"{chip.link_bandwidth / 1e9:.0f} GB/s",
    ):
        assert f"| {figure} |" in row
