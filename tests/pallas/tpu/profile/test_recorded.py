"""The calibrated figures of recorded schedules, and what follows from the kernels themselves."""

import numpy as np
import profiled_kernels
import pytest
import recorded_schedules

from ejkernel_pallas.tpu.profile import CHIPS, KernelReport
from ejkernel_pallas.tpu.profile.scalars import pack_words

AFTER = {0: [1]}
TABLES = {0: pack_words(profiled_kernels.LENGTHS), 1: pack_words(profiled_kernels.TABLE)}
PAGE = 16 * 128 * 4


def profiled(name: str, operands=None) -> KernelReport:
    schedule = recorded_schedules.schedule(name)
    tables = {"pages": TABLES, "neighbours": AFTER}
    given = tables.get(name.split()[0], {}) if operands is None else operands
    simulation = schedule.run(given)
    return KernelReport(
        name=name,
        target=name.split()[1],
        grid=(),
        utilisation=schedule.utilisation,
        loops=schedule.loops(simulation.entries_per_block),
        vmem_bytes=schedule.vmem_bytes,
        known_operand_indices=tuple(given),
        simulation=simulation,
    )


@pytest.mark.parametrize("name", recorded_schedules.NAMES)
def test_simulated_figures_match_the_recorded_ones(name):
    kernel = profiled(name)
    assert kernel.simulation.is_complete
    assert kernel.simulation.unknown_reads == {}
    assert recorded_schedules.figures_of(kernel) == recorded_schedules.figures()[name]


@pytest.mark.parametrize("target", CHIPS)
def test_trips_of_loops_over_a_table_are_counted(target):
    """v7x ends the delay slots of a branch early, where the next region starts."""
    assert [loop.num_trips for loop in profiled(f"pages {target}").loops] == [5, 9]


@pytest.mark.parametrize("target", CHIPS)
def test_copied_bytes_match_the_block_specs(target):
    softmax, matmul = profiled(f"softmax {target}").simulation, profiled(f"matmul {target}").simulation
    assert (softmax.hbm_read_bytes, softmax.hbm_written_bytes) == (512 * 256 * 4, 512 * 256 * 4)
    # Two row blocks, one column block, two steps: a block of each factor for every step.
    assert (matmul.hbm_read_bytes, matmul.hbm_written_bytes) == (2 * 4 * 256 * 256 * 2, 512 * 256 * 2)


@pytest.mark.parametrize("target", CHIPS)
def test_copies_to_the_next_device_are_counted_and_waited_for(target):
    kernel, part = profiled(f"neighbours {target}"), 512 * 128 * 4
    assert (
        kernel.simulation.copied_bytes_by_kind["hbm_to_ici"]
        == kernel.simulation.copied_bytes_by_kind["ici_to_hbm"]
        == part
    )
    assert kernel.simulation.bytes_sent_to_devices == part
    assert kernel.link_seconds == part / CHIPS[target].link_bandwidth
    assert kernel.link_seconds < kernel.simulation.waited_cycles / CHIPS[target].clock_hz < kernel.seconds


@pytest.mark.parametrize("target", CHIPS)
def test_busy_cycles_of_matrix_units_match_the_products(target):
    """The units do 512 x 512 x 256 products; the table says how many a cycle, at the clock that gives the peak."""
    chip = CHIPS[target]
    products_a_second = chip.flops / chip.cores / 2
    want = 512 * 512 * 256 / (products_a_second / chip.clock_hz)
    assert profiled(f"matmul {target}").simulation.mxu_cycles == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (5, 5, 5, 5), (1, 0, 0, 4)])
def test_loops_and_copies_follow_the_prefetched_values(target, lengths):
    operands = {0: pack_words(np.array(lengths, np.int32)), 1: TABLES[1]}
    kernel = profiled(f"pages {target}", operands)
    assert kernel.simulation.copied_bytes_by_kind.get("hbm_to_vmem", 0) == sum(lengths) * PAGE
    assert kernel.simulation.copied_bytes_by_kind["vmem_to_hbm"] == 4 * PAGE


def test_each_awaited_page_costs_its_copy_latency():
    clock = CHIPS["v5e"].clock_hz
    short, long = (profiled("pages v5e", {0: [n] * 4, 1: TABLES[1]}).simulation for n in (1, 5))
    page = PAGE / (CHIPS["v5e"].bandwidth / clock) + CHIPS["v5e"].latencies.dma_read_latency
    assert long.cycles - short.cycles >= 16 * page
    assert long.cycles - short.cycles < 16 * page * 1.1


def test_unknown_lengths_are_reported_and_unknown_pages_are_not():
    assert set(profiled("pages v5e", {}).simulation.unknown_reads) == {"allocation5"}
    # Where a page lies in HBM makes no difference to the time that it takes.
    assert profiled("pages v5e", {0: TABLES[0]}).simulation == profiled("pages v5e").simulation


def test_predicted_seconds_are_computed_from_cycles_and_bytes():
    kernel = profiled("softmax v5e")
    assert kernel.seconds == kernel.simulation.cycles / 1.5e9
    assert kernel.memory_seconds == 2 * 512 * 256 * 4 / 819e9
    assert kernel.compute_seconds < kernel.seconds
    assert kernel.spills == kernel.fills == 0
    assert kernel.bundles == len(kernel.utilisation.used_slots)
