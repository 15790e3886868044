"""What is printed and drawn."""

import dataclasses
import io

import numpy as np
import profiled_kernels
import pytest
import recorded_schedules
from rich.console import Console

from ejkernel_pallas.tpu.profile import KernelReport, Report
from ejkernel_pallas.tpu.profile.scalars import pack_words
from ejkernel_pallas.tpu.profile.text import print_report


@pytest.fixture(scope="module")
def kernel():
    schedule = recorded_schedules.schedule("pages v6e")
    tables = {0: pack_words(profiled_kernels.LENGTHS), 1: pack_words(profiled_kernels.TABLE)}
    simulation = schedule.run(tables)
    return KernelReport(
        name="pages_kernel.1",
        target="v6e",
        grid=(4,),
        utilisation=schedule.utilisation,
        loops=schedule.loops(simulation.entries_per_block),
        vmem_bytes=schedule.vmem_bytes,
        known_operand_indices=(0, 1),
        simulation=simulation,
    )


@pytest.fixture(scope="module")
def report(kernel):
    return Report(label="pages", target="v6e", kernels=(kernel,), flops=1e6)


def printed(report: Report) -> str:
    out = io.StringIO()
    print_report(Console(file=out, width=160, highlight=False), report)
    return out.getvalue()


def test_bytes_sent_to_another_device_are_printed(report, kernel):
    copied = {**kernel.simulation.copied_bytes_by_kind, "hbm_to_ici": 4_000_000, "ici_to_hbm": 4_000_000}
    copies = {**kernel.simulation.num_copies_by_kind, "hbm_to_ici": 1, "ici_to_hbm": 1}
    simulation = dataclasses.replace(
        kernel.simulation, copied_bytes_by_kind=copied, num_copies_by_kind=copies, busiest_link_bytes=4_000_000
    )
    sending = dataclasses.replace(kernel, simulation=simulation)
    text = printed(dataclasses.replace(report, kernels=(sending,)))
    assert "to the next device   4 MB, 40 µs at 100 GB/s of a link" in text
    assert "the link to the next device" in text


def test_the_printed_report_has_every_figure(report, kernel):
    text = printed(report)
    first, last = kernel.loops
    for part in (
        "pages, on v6e: 3.52 µs predicted, 0.2838 TFLOP/s, MFU 0%",
        "kernel pages_kernel.1",
        "0.07629 MB read, 0.03277 MB written",
        "hbm_to_smem 0.00256 MB in 2; hbm_to_vmem 0.07373 MB in 9; vmem_to_hbm 0.03277 MB in 4",
        "at 1640 GB/s",
        "of 128",
        f"{first.start}..{first.end}",
        f"  {last.start}..{last.end}",
        "whole run",
    ):
        assert part in text
    assert "UNKNOWN" not in text
    assert "INCOMPLETE" not in text


def test_incomplete_simulations_and_unknown_reads_are_printed(report, kernel):
    simulation = dataclasses.replace(kernel.simulation, is_complete=False, unknown_reads={"allocation5": 4})
    text = printed(dataclasses.replace(report, kernels=(dataclasses.replace(kernel, simulation=simulation),)))
    assert "the simulation was stopped; every figure is too low" in text
    assert "allocation5 (4 times): read as 0, so the prediction means nothing" in text


def test_errors_and_reports_without_kernels_are_printed_as_a_line():
    failed = Report(label="big", target="v5e", error="RESOURCE_EXHAUSTED: [vmem]")
    assert printed(failed).strip() == "big, on v5e: RESOURCE_EXHAUSTED: [vmem]"
    assert "no Pallas kernel; XLA computes it all" in printed(Report(label="plain", target="v5e"))


def test_roofline_and_mfu_are_computed_from_flops(report, kernel):
    assert report.seconds == kernel.seconds
    assert report.mfu == pytest.approx(1e6 / kernel.seconds / 918e12)
    assert report.roofline_seconds == kernel.memory_seconds
    assert dataclasses.replace(report, flops=1e12).roofline_seconds == pytest.approx(1e12 / 918e12)
    assert dataclasses.replace(report, flops=None).mfu is None
    assert dataclasses.replace(report, flops=None).roofline_seconds is None


def test_plot_columns_are_slot_shares_of_issued_bundles(kernel):
    from ejkernel_pallas.tpu.profile.plot import slot_shares_over_schedule

    shares = slot_shares_over_schedule(kernel, columns=50)
    assert shares.shape == (len(kernel.utilisation.slots), 50)
    np.testing.assert_allclose(shares.mean(axis=1), list(kernel.slots.values()), rtol=1e-9)
    assert shares.min() >= 0
    assert shares.max() <= 1 + 1e-9


def test_the_plot_is_written_as_png(report, tmp_path):
    from ejkernel_pallas.tpu.profile.plot import draw_reports

    draw_reports([report, report], tmp_path / "slots.png")
    assert (tmp_path / "slots.png").read_bytes().startswith(b"\x89PNG")
