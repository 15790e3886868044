"""The counter that gives blocks of a grouped matmul their tiles: warpgroups as threads, in any order of their steps."""

import collections
import random
import threading
import time
import types

import jax.numpy as jnp
import pytest

from ejkernel_pallas.gpu.grouped_matmul.kernels import work_queue
from ejkernel_pallas.gpu.grouped_matmul.spec import CONSUMER_WARPGROUPS

STEPS, BLOCKS, TILES, PATIENCE = 3, 4, 21, 30.0


class Barrier:
    """A barrier in shared memory, of which every thread sees each phase."""

    def __init__(self, arrivals):
        self.arrivals, self.missing, self.phase = arrivals, arrivals, 0
        self.changed, self.seen = threading.Condition(), collections.Counter()

    def arrive(self):
        with self.changed:
            self.missing -= 1
            if not self.missing:
                self.missing, self.phase = self.arrivals, self.phase + 1
                self.changed.notify_all()

    def wait(self):
        thread = threading.get_ident()
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase > self.seen[thread], PATIENCE), "a barrier is never full"
            self.seen[thread] += 1
            # The chip has a bit for the phase: a thread that is two phases late waits for ever.
            assert self.phase == self.seen[thread]


class Places(list):
    """Numbers or barriers in shared memory, whose views `at` gives."""

    @property
    def at(self):
        return self

    def __getitem__(self, place):
        found = super().__getitem__(int(place))
        return found if isinstance(found, Barrier) else (self, int(place))


@pytest.fixture
def numbers(monkeypatch):
    """What the chip does, for threads: the numbers that a counter has given."""
    given, lock = [], threading.Lock()

    def fetch(counter):
        with lock:
            given.append(counter)
            return jnp.int32(len(given) - 1)

    def store(view, number):
        places, place = view
        places[place] = int(number)

    def load(view):
        places, place = view
        return jnp.int32(list(places)[place])

    for name, function in (("fetch_tile_index", fetch), ("store_tile_index", store), ("load_tile_index", load)):
        monkeypatch.setattr(work_queue.tile_scheduler, name, function)
    waits = {"barrier_wait": Barrier.wait, "barrier_arrive": Barrier.arrive}
    monkeypatch.setattr(work_queue, "plgpu", types.SimpleNamespace(**waits))
    when = lambda condition: lambda run: run() if condition else None  # noqa: E731
    monkeypatch.setattr(work_queue, "pl", types.SimpleNamespace(when=when))
    return given


def make_call(dynamic_schedule):
    shared = types.SimpleNamespace(
        next_tile_index=Places([None] * work_queue.TILE_INDEX_SLOTS),
        next_tile_full=Places(Barrier(1) for _ in range(work_queue.TILE_INDEX_SLOTS)),
        next_tile_free=Places(Barrier(CONSUMER_WARPGROUPS) for _ in range(work_queue.TILE_INDEX_SLOTS)),
    )
    spec = types.SimpleNamespace(dynamic_schedule=dynamic_schedule, steps_per_tile=STEPS)
    return types.SimpleNamespace(spec=spec, shared_memory=shared, num_blocks=BLOCKS, tile_counter="counter")


def produce(call, block, taken):
    number, steps_done = jnp.int32(block), jnp.int32(0)
    while number < TILES:
        taken.append(int(number))
        requested_tile = work_queue.request_next_tile(call, number)
        number, steps_done = work_queue.publish_next_tile(call, requested_tile, steps_done), steps_done + STEPS


def consume(call, block, taken):
    number, steps_done = jnp.int32(block), jnp.int32(0)
    while number < TILES:
        taken.append(int(number))
        # Products take longer than copies, and not equally long: the producer is ahead as far as barriers let it.
        time.sleep(random.random() / 50)
        number, steps_done = work_queue.wait_for_next_tile(call, number, steps_done), steps_done + STEPS


@pytest.mark.parametrize("dynamic_schedule", [False, True])
def test_every_tile_is_processed_by_exactly_one_block(numbers, dynamic_schedule):
    blocks = [[[] for _ in range(1 + CONSUMER_WARPGROUPS)] for _ in range(BLOCKS)]
    threads = []
    for block, warpgroups in enumerate(blocks):
        call = make_call(dynamic_schedule)
        for work, taken in zip((produce, *[consume] * CONSUMER_WARPGROUPS), warpgroups, strict=True):
            threads.append(threading.Thread(target=work, args=(call, block, taken), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert all(taken == warpgroups[0] for warpgroups in blocks for taken in warpgroups)
    assert sorted(number for warpgroups in blocks for number in warpgroups[0]) == list(range(TILES))
    # A block asks once for each of its tiles, and is told of the end by the last number.
    assert len(numbers) == (TILES if dynamic_schedule else 0)
