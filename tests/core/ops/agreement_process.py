"""One process of a job of two, for `test_agreement_across_processes`: `python agreement_process.py PORT RANK FOLDER`.

Goes through all scenarios, and prints what this process ended up with in each as one line of JSON.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy
import toy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel import _compat
from ejkernel.errors import AgreementError
from ejkernel.ops import (
    AutotunePolicy,
    BwdParams,
    ConfigSelectorChain,
    FwdParams,
    PersistentCache,
    autotune_recorded,
    clear_recorded,
    explain,
    get_recorded,
    plugins,
    policy_override,
)
from ejkernel.ops.config.measurement import Measurement, TuningResult

X = jax.ShapeDtypeStruct((4, 8), "float32")


class Counting:
    """A tuner that measures nothing, counts, and finds 16 fastest."""

    asked = 0

    def tune(self, request: Any, kernel_argument: Any) -> TuningResult:
        self.asked += 1
        part = request.implementation.config.candidates(request.record, request.device, request.direction)[0]
        return TuningResult(request.key(), request.implementation.name, (Measurement(part, 1.0),))


def chain(store: Path, **policy: Any) -> ConfigSelectorChain:
    return ConfigSelectorChain(policy=AutotunePolicy(**policy), tuner=Counting(), persistent=PersistentCache(store))


def gradient(made: ConfigSelectorChain) -> None:
    jax.grad(lambda x: toy.toy(x, chain=made).sum())(jax.numpy.ones((4, 8)))


def traced() -> dict[str, list[int]]:
    """The tiles that kernels were traced with, without repetitions."""
    tiles = {d: [part.q_blocksize for part in toy.seen(d)] for d in ("forward", "backward")}
    return {d: [tile for tile, _ in itertools.groupby(found)] for d, found in tiles.items()}


def different_stores(rank: int, store: Path) -> Any:
    """Process 0 has both passes in its store, process 1 has other ones; then a call that neither has."""
    made = chain(store)
    request = toy.request(made, X)
    made.persistent.put(request.key(), FwdParams(q_blocksize=3 + rank, kv_blocksize=3), 1.0)
    if rank == 0:
        made.persistent.put(toy.request(made, X, "backward").key(), BwdParams(q_blocksize=5, kv_blocksize=5), 1.0)
    gradient(made)
    toy.toy(jax.numpy.ones((2, 2)), chain=made)
    trail = made.choose(toy.request(made, X)).trail
    return {"traced": traced(), "kept": len(made.cache.keys()), "trail": trail}


def only_process_0_may_rule(rank: int, store: Path) -> Any:
    """What process 1 may not do by itself it need not do."""
    made = chain(store, allow_heuristics=rank == 0)
    gradient(made)
    return {"traced": traced()}


def autotuning(rank: int, store: Path) -> Any:
    """An eager call under autotuning, a gradient under heuristics, then both recorded and tuned offline."""
    made = chain(store, cache_miss_fallback="autotune")
    x = jax.numpy.ones((4, 8))
    with policy_override(cache_miss_fallback="heuristics"):
        toy.toy(x, chain=made)
    toy.toy(x, chain=made)
    gradient(made)
    results = autotune_recorded()
    gradient(made)
    counted = {"asked": made.tuner.asked, "results": len(results), "stored": len(made.persistent.entries())}
    return {"traced": traced(), "generation": made.cache.generation, **counted}


def failing_at_process_0(rank: int, store: Path) -> Any:
    """Process 0 has no configuration; the other is told so, and may ask again."""
    made = chain(store, allow_heuristics=False)
    errors = []
    for _ in range(2):
        try:
            gradient(made)
        except RuntimeError as error:
            errors.append([type(error).__name__, str(error)])
    made.policy = AutotunePolicy()
    gradient(made)
    return {"errors": errors, "traced": traced()}


def missing_call(rank: int, store: Path) -> Any:
    """Process 1 makes a call of its own; asking for an explanation is no call."""
    decision = explain("toy", X)
    errors = []
    if rank == 1:
        os.environ["EJKERNEL_AGREEMENT_TIMEOUT_S"] = "1"
        try:
            gradient(chain(store))
        except AgreementError as error:
            errors.append(str(error))
    return {"errors": errors, "tier": decision.forward.tier}


def two_executors(rank: int, store: Path) -> Any:
    """Each chain's decisions are its own, even about one call."""
    one, other = chain(store), chain(store)
    one.cache.put(toy.request(one, X).key(), FwdParams(q_blocksize=1, kv_blocksize=1))
    for made in (one, other):
        gradient(made)
    return {"traced": traced()["forward"]}


def arrays_spread_over_processes(rank: int, store: Path) -> Any:
    """One process cannot measure with half an array, nor may it wait for the other to join in."""
    made = chain(store, cache_miss_fallback="autotune")
    sharding = NamedSharding(Mesh(jax.devices(), "d"), PartitionSpec("d"))
    x = jax.make_array_from_callback((32, 8), sharding, lambda index: numpy.ones((32, 8), "float32")[index])
    toy.toy(x, chain=made)
    return {"traced": traced(), "asked": made.tuner.asked, "recorded": len(get_recorded())}


SCENARIOS = (
    arrays_spread_over_processes,
    different_stores,
    only_process_0_may_rule,
    autotuning,
    failing_at_process_0,
    two_executors,
    missing_call,  # the last: it leaves the processes out of step
)


def main(port: str, rank: int, folder: Path) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    plugins._entry_points = lambda: [toy.plugin(toy.implementation())]
    found: dict[str, Any] = {"processes": jax.process_count()}
    for scenario in SCENARIOS:
        toy.SEEN.clear()
        clear_recorded()
        found[scenario.__name__] = scenario(rank, folder / scenario.__name__)
    print(json.dumps(found))
    _compat.coordination_client().wait_at_barrier("done", 60_000)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
