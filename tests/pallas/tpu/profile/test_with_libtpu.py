"""From a function to a report, with libtpu's compiler."""

from pathlib import Path

import profiled_kernels
import pytest
import recorded_schedules
from click.testing import CliRunner
from distributions import add_distribution

from ejkernel.ops import plugins
from ejkernel_pallas.tpu.profile import Case, profile, profile_many
from ejkernel_pallas.tpu.profile.command import profile as command

pytestmark = pytest.mark.needs("libtpu")

BUILDERS = Path(profiled_kernels.__file__)


def doubled(x, *, block):
    """A function with an argument that is no array."""
    del block
    return 2 * x


def abort():
    """What a compiler that crashes does to its process."""
    import os

    os.abort()


def test_every_case_gets_a_report_even_if_others_fail():
    cases = [
        Case(label="matmul", build=f"{BUILDERS}:matmul"),
        Case(label="wrong", build=f"{BUILDERS}:matmul", kwargs={"tile": 3}),
        Case(label="abort", build=f"{__file__}:abort"),
        Case(label="pages", build=f"{BUILDERS}:pages"),
        Case(label="neighbours", build=f"{BUILDERS}:neighbours"),
        Case(label="too many", build=f"{BUILDERS}:neighbours", kwargs={"devices": 9}),
    ]
    seen: list[str] = []
    reports = profile_many(cases, target="v6e", on_report=lambda report: seen.append(report.label))
    assert seen == [case.label for case in cases]
    matmul, wrong, died, pages, neighbours, many = reports
    assert "unexpected keyword argument 'tile'" in (wrong.error or "")
    assert "ended without a report" in (died.error or "")
    assert "wants at most 8 devices" in (many.error or "")
    for report, products in ((matmul, 2 * 512 * 512 * 256), (pages, None), (neighbours, None)):
        assert report.error is None
        assert report.flops == products
        ((kernel),) = report.kernels
        assert kernel.simulation.unknown_reads == {}
        # Another libtpu may schedule otherwise, and copies the same bytes.
        recorded = recorded_schedules.figures()[f"{report.label} v6e"]
        assert kernel.simulation.copied_bytes_by_kind == recorded["copied"]
        assert kernel.simulation.cycles == pytest.approx(recorded["cycles"], rel=0.2)


def test_profiled_functions_take_static_arguments():
    report = profile(f"{__file__}:doubled", profiled_kernels.LENGTHS, target="v5e", block=3)
    assert (report.error, report.kernels) == (None, ())


BACKEND = """
import dataclasses
import jax
from ejkernel.ops import hookimpl
from ejkernel_xla.tiled_attention import IMPLEMENTATIONS

def forward(record, config):
    from jax.experimental import pallas as pl

    def copy_kernel(query, out):
        out[...] = query[...]

    query = record.query
    return pl.pallas_call(copy_kernel, out_shape=query, name="copy_kernel")(query), None

@hookimpl
def ejkernel_implementations():
    base = IMPLEMENTATIONS[0]
    requires = dataclasses.replace(base.requires, devices=frozenset({"tpu"}))
    made = dict(name="copy", platform="pallas", forward=f"{__name__}:forward", requires=requires, priority=1000)
    return [dataclasses.replace(base, **made)]
"""


@pytest.fixture
def backend(tmp_path, monkeypatch):
    """A backend whose kernel is chosen for attention on TPUs, and on no other device."""
    entry_point = "[ejkernel]\ncopying = copying_backend"
    add_distribution(monkeypatch, tmp_path, Path("copying_backend.py"), BACKEND, entry_point)
    monkeypatch.setenv("EJKERNEL_PLUGINS", "copying,xla")
    plugins.reload()
    yield
    plugins.reload()


CALL = ("flash_attention", "--shape", "1,256,2,128", "--dtype", "bfloat16")


@pytest.mark.usefixtures("backend")
def test_the_profile_command_profiles_the_dispatched_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    plot, keep = tmp_path / "slots.png", tmp_path / "kept"
    arguments = (
        *CALL,
        "--target",
        "v5e",
        "--target",
        "v7x",
        "--flops",
        "1e6",
        "--plot",
        str(plot),
        "--keep",
        str(keep),
    )
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    # 256 tokens of 2 heads of 128 numbers of 2 bytes.
    assert result.output.count("0.1311 MB read, 0.1311 MB written") == 2
    for target in ("v5e", "v7x"):
        assert f"on {target}: " in result.output
        assert list((keep / target).glob("0.dumps/*copy_kernel*final_bundles.txt"))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_profile_command_reports_calls_without_kernels(monkeypatch):
    monkeypatch.setenv("EJKERNEL_PLUGINS", "xla")
    plugins.reload()
    try:
        shape = ("mean_pooling", "--shape", "1,64,2,64")
        result = CliRunner().invoke(command, [*shape, "--target", "v5e"])
    finally:
        plugins.reload()
    assert result.exit_code == 1, result.output
    assert "no Pallas kernel; XLA computes it all" in " ".join(result.output.split())
