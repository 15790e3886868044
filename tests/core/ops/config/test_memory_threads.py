"""The memory tier and the store hold up under many threads."""

import dataclasses
import threading
from collections.abc import Callable

import pytest
import toy
from toy import toy as call

from ejkernel.ops import ConfigCache, ConfigKey, ConfigSelectorChain, FwdParams, PersistentCache, policy_override

KEY = ConfigKey(op="toy@1", implementation="plain@1.0", direction="forward", device="cpu", schema="0", call="")
THREADS, ROUNDS = 8, 100


def tile(size: int) -> FwdParams:
    return FwdParams(q_blocksize=size, kv_blocksize=size)


def key(number: int) -> ConfigKey:
    return dataclasses.replace(KEY, call=str(number))


def together(work: Callable[[int], None]) -> None:
    """Runs `work(i)` on every thread, all starting at once, and raises what any of them raised."""
    barrier, problems = threading.Barrier(THREADS, timeout=600), []

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except Exception as error:  # noqa: BLE001 - raised again on the main thread
            problems.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def test_concurrent_puts_lose_no_entry_of_the_memory_cache():
    cache = ConfigCache()

    together(lambda number: [cache.put(key(number * ROUNDS + i), tile(1)) for i in range(ROUNDS)])

    assert cache.size() == THREADS * ROUNDS
    assert set(cache.keys()) == {key(i) for i in range(THREADS * ROUNDS)}


def test_cache_generation_counts_changes_of_configs_in_use():
    cache = ConfigCache()
    for number in range(THREADS):
        cache.note_selected_part(key(number), tile(1))

    together(lambda number: cache.put(key(number), tile(2)))

    assert cache.generation == THREADS


@pytest.mark.parametrize(
    ("steps", "generation"),
    [
        ([("put", 1)], 0),
        ([("note_selected_part", 1), ("put", 1)], 0),
        ([("note_selected_part", 1), ("put", 2)], 1),
        ([("note_selected_part", 1), ("put", 2), ("put", 2)], 1),
        ([("note_selected_part", 1), ("put", 2), ("note_selected_part", 2), ("put", 1)], 2),
        ([("put", 2), ("note_selected_part", 1)], 1),  # a thread was answered just before another stored
    ],
)
def test_cache_generation_changes_only_if_a_selected_config_changed(steps, generation):
    cache = ConfigCache()
    for method, size in steps:
        getattr(cache, method)(KEY, tile(size))

    assert cache.generation == generation


def test_clearing_the_cache_invalidates_compiled_calls():
    cache = ConfigCache()
    cache.put(KEY, tile(1))
    cache.settled.add("call")
    cache.clear()

    assert (cache.size(), cache.generation, cache.settled) == (0, 1, set())


def test_threads_that_write_one_store_lose_no_entry(store):
    cache = PersistentCache(store)

    together(lambda number: [cache.put(key(number * 5 + i), tile(1), 1.0) for i in range(5)])

    assert len(PersistentCache(store).entries()) == THREADS * 5


def test_threads_read_back_entries_they_stored(store):
    cache = PersistentCache(store)

    def work(number: int) -> None:
        for i in range(4):
            own = key(number * 4 + i)
            cache.put(own, tile(1), 1.0)
            assert cache.get(own, FwdParams) == tile(1)

    together(work)


def test_calls_from_threads_with_different_policies(plain, x):
    chain = ConfigSelectorChain()

    def work(number: int) -> None:
        fallback = ("heuristics", "autotune")[number % 2]
        with policy_override(cache_miss_fallback=fallback):
            assert (call(x, chain=chain) == x * x).all()

    together(work)

    assert chain.cache.size() == 1
    assert {toy.blocks(part)[1] for part in toy.seen()} == {64}
