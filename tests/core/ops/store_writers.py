"""What each process of `config/test_persistent_writers.py` runs: importable from the path of the tests."""

import warnings

from ejkernel.ops.config import persistent
from ejkernel.ops.config.persistent import Entry, PersistentCache, StoreWarning

WRITES = 8


def write(path, process):
    """Writes entries one by one; on a busy machine a writer may wait long for its turn, and must not give up."""
    persistent.LOCK_TIMEOUT_S = 800.0
    warnings.simplefilter("error", StoreWarning)
    warnings.filterwarnings("ignore", ".* was damaged", StoreWarning)
    for number in range(WRITES):
        cache = PersistentCache(path)
        cache.entries()  # a reader may be the first to see the damage
        cache.update({f"{process}/{number}": Entry({"q_blocksize": process * WRITES + number}, 1.0)})
