"""Selection from whole rows of scores: the same keys, in the same order, as merged tiles of keys give."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules.operations.lightning_indexer import OP
from ejkernel.ops.device import current_device, find_device
from ejkernel.ops.plugins import registry
from ejkernel_xla.lightning_indexer.config import IndexerTiles, heuristic
from ejkernel_xla.lightning_indexer.forward import forward

CASES = {case.name: case for case in OP.cases if "ci" in case.tags}
MERGED = IndexerTiles(block_q=5, block_k=8)
WHOLE_ROWS = dataclasses.replace(MERGED, whole_rows=True)


@pytest.mark.parametrize("name", sorted(CASES))
def test_both_selections_of_a_case_are_the_same(name):
    record = OP.lower(CASES[name].make(jax.random.key(0)))
    (merged, whole), _ = zip(
        *(jax.jit(forward, static_argnums=1)(record, x) for x in (MERGED, WHOLE_ROWS)), strict=True
    )
    for want, got in zip(merged, whole, strict=True):
        np.testing.assert_array_equal(got, want)


def test_gpus_keep_rows_of_scores_and_cpus_merge_tiles():
    args = jax.eval_shape(lambda: CASES["equal scores"].make(jax.random.key(0)))
    record = jax.eval_shape(OP.lower, args)
    (xla,) = (x for x in registry().implementations["lightning_indexer"] if x.name == "xla")
    gpu, cpu = find_device("h200"), current_device()
    assert xla.config.heuristic(record, gpu, "forward").whole_rows
    assert not xla.config.heuristic(record, gpu, "backward").whole_rows
    assert not xla.config.heuristic(record, cpu, "forward").whole_rows
    assert {x.whole_rows for x in xla.config.candidates(record, cpu, "forward")} == {True, False}


def test_memory_of_whole_rows_is_linear_in_the_keys():
    """All scores of a tile of queries are in memory: the tile has fewer queries where there are more keys."""

    def temporaries(num_keys):
        shapes = {"query": (1, 4096, 4, 32), "key": (1, num_keys, 32), "weights": (1, 4096, 4)}
        arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        record = jax.eval_shape(lambda arrays: OP.lower(OP.arguments(**arrays, top_k=64)), arrays)
        config = heuristic(record, find_device("h200"), "forward")
        compiled = jax.jit(forward, static_argnums=1).lower(record, config).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(16384), temporaries(65536)
    assert large < 1.5 * small
    assert large < 4096 * 65536 * 4
