"""Copies share one HBM queue."""

import pytest

from ejkernel_pallas.tpu.profile import CHIPS
from ejkernel_pallas.tpu.profile.machine import ALLOCATION_ADDRESS_STRIDE, GRANULE_BYTES, SimulatedCore, operand_address

V5E = CHIPS["v5e"]
RATE = V5E.bandwidth / V5E.clock_hz  # bytes a cycle
READ, WRITE = V5E.latencies.dma_read_latency, V5E.latencies.dma_write_latency


@pytest.fixture
def machine():
    return SimulatedCore(V5E, {0: [7, 8]})


def read(machine, cycle, granules, semaphore=1):
    machine.start_copy(cycle, "hbm_to_vmem", granules, semaphore, 0, 0)


def test_a_copy_takes_its_transfer_time_plus_a_latency(machine):
    read(machine, 100, 1000)
    assert machine.wait(100, 1, 1000) == pytest.approx(1000 * GRANULE_BYTES / RATE + READ)
    assert machine.waited == pytest.approx(1000 * GRANULE_BYTES / RATE + READ)


def test_copies_queue_in_both_directions_and_overlap_their_latencies(machine):
    read(machine, 0, 1000, semaphore=1)
    machine.start_copy(0, "vmem_to_hbm", 1000, 2, 0, 0)
    assert machine.wait(0, 2, 1000) == pytest.approx(2 * 1000 * GRANULE_BYTES / RATE + WRITE)
    assert machine.copied == {"hbm_to_vmem": 32000, "vmem_to_hbm": 32000}


def test_arrived_copies_are_not_waited_for(machine):
    read(machine, 0, 10)
    assert machine.wait(1e6, 1, 10) == 0


def test_a_wait_consumes_the_granules_that_it_asks_for(machine):
    read(machine, 0, 10)
    read(machine, 0, 10)
    one, two = (k * 10 * GRANULE_BYTES / RATE + READ for k in (1, 2))
    assert machine.wait(0, 1, 6) == pytest.approx(one)
    assert machine.wait(0, 1, 4) == pytest.approx(one)
    assert machine.wait(0, 1, 4) == pytest.approx(two)
    assert machine.wait(0, 1, 6) == pytest.approx(two)
    assert machine.wait(0, 1, 1) == 0  # nothing is under way


def test_copies_inside_a_core_do_not_queue_for_hbm(machine):
    read(machine, 0, 100000)
    machine.start_copy(0, "vmem_to_vmem", 8, 2, 0, 0)
    assert machine.wait(0, 2, 8) == pytest.approx(100 + 8 * GRANULE_BYTES / 256)


REMOTE, SENT, ARRIVED = 1 << 14, 2 * ALLOCATION_ADDRESS_STRIDE, 3 * ALLOCATION_ADDRESS_STRIDE + 1


def test_a_copy_inside_hbm_is_read_and_written(machine):
    machine.start_copy_between(0, "hbm_to_hbm", 1000, SENT, ARRIVED, 0)
    assert machine.wait(0, ARRIVED, 1000) == pytest.approx(2 * 1000 * GRANULE_BYTES / RATE + READ)
    assert machine.copied == {"hbm_to_hbm": 32000}


def test_copies_to_the_next_device_queue_for_the_link(machine):
    link = V5E.link_bandwidth / V5E.clock_hz
    for _ in range(2):  # the other's semaphore is named with bits that say whose it is
        machine.start_copy_between(0, "hbm_to_hbm", 1000, SENT, ARRIVED | REMOTE | 1 << 13, REMOTE | 5)
    assert machine.copied == {"hbm_to_ici": 64000, "ici_to_hbm": 64000}
    one, two = (count * 1000 * GRANULE_BYTES / link + WRITE for count in (1, 2))
    assert machine.wait(0, SENT, 1000) == pytest.approx(one)
    assert machine.wait(0, ARRIVED, 1000) == pytest.approx(one)
    assert machine.wait(0, ARRIVED, 1000) == pytest.approx(two)
    read(machine, 0, 10)
    assert machine.wait(0, 1, 10) == pytest.approx(10 * GRANULE_BYTES / RATE + READ)  # HBM's queue is another


def test_tables_are_copied_to_scalar_memory(machine):
    machine.start_copy(0, "hbm_to_smem", 16, 1, operand_address(0), 5 * ALLOCATION_ADDRESS_STRIDE)
    assert [machine.load_word(5 * ALLOCATION_ADDRESS_STRIDE + k) for k in range(3)] == [7, 8, 0]
    assert machine.unknown_reads({"allocation4": 5}) == {"allocation4": 1}


def test_reads_of_unknown_operands_are_counted_by_index(machine):
    assert machine.scalar_operand(0) == 7
    assert machine.scalar_operand(3) == 0
    assert machine.unknown_reads({}) == {"operand 3": 1}


def test_both_cores_of_a_v5p_share_its_bandwidth():
    assert CHIPS["v5p"].core_bandwidth == CHIPS["v5p"].bandwidth / 2
    assert V5E.core_bandwidth == V5E.bandwidth


@pytest.mark.parametrize(("chip", "address"), [("v5e", 2), ("v5p", 32), ("v6e", 32), ("v7x", 32)])
def test_a_copy_to_scalar_memory_stores_only_the_words_of_its_block(chip, address):
    machine = SimulatedCore(CHIPS[chip], {1: list(range(512))})
    machine.start_copy(0, "hbm_to_smem", 4, 1, operand_address(1) + address, 7 * ALLOCATION_ADDRESS_STRIDE)
    assert [machine.load_word(7 * ALLOCATION_ADDRESS_STRIDE + n) for n in (0, 31)] == [256, 287]
    assert machine.load_word(7 * ALLOCATION_ADDRESS_STRIDE + 32) == 0
    assert sum(machine.unknown.values()) == 1
