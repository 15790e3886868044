"""T-7: writers in several processes never lose each other's entries."""

import multiprocessing

from store_writers import WRITES, write

from ejkernel.ops.config.persistent import PersistentCache

PROCESSES = 8


def test_64_writers_in_8_processes_over_a_truncated_file_lose_no_entry(store):
    store.parent.mkdir()
    store.write_bytes(b'{"entries":{"old":{"config":{')
    context = multiprocessing.get_context("forkserver")  # processes of their own, with one import for all
    context.set_forkserver_preload(["store_writers"])

    workers = [context.Process(target=write, args=(store, process)) for process in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    entries = PersistentCache(store).entries()
    assert {key: entry.config for key, entry in entries.items()} == {
        f"{process}/{number}": {"q_blocksize": process * WRITES + number}
        for process in range(PROCESSES)
        for number in range(WRITES)
    }
    assert len(list(store.parent.glob("*damaged*"))) == 1
