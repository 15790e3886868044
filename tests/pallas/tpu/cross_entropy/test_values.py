"""The cross-entropy's TPU kernels, simulated with races detected, compared with the family's meaning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import simulated

from ejkernel.families.cross_entropy import CrossEntropy, reference
from ejkernel.types.pullback import Pullback, run_both_passes
from ejkernel_pallas.tpu.cross_entropy import MAX_ROW_BYTES, config, implementations
from ejkernel_pallas.tpu.cross_entropy.backward import backward
from ejkernel_pallas.tpu.cross_entropy.config import TpuLossTiles
from ejkernel_pallas.tpu.cross_entropy.forward import forward

TILES = TpuLossTiles(block_t=16, block_v=256)
FIELDS = ("inputs", "lm_head")


def record(tokens=40, channels=24, entries=600, dtype="float32", **options):
    """A record with normal numbers, one token of weight 0 that holds NaN, and one without a target."""
    random = np.random.default_rng(2)
    hidden = random.normal(size=(tokens, channels))
    hidden[3] = np.nan
    targets = random.integers(0, entries, tokens)
    targets[5] = -1
    return CrossEntropy(
        inputs=jnp.asarray(hidden, dtype),
        targets=jnp.asarray(targets, jnp.int32),
        weights=jnp.asarray(random.uniform(size=tokens), jnp.float32).at[3].set(0),
        lm_head=jnp.asarray(random.normal(size=(channels, entries)), dtype),
        **options,
    )


CASES = {
    "sum, partial blocks": record(sum_over_tokens=True, z_loss=1e-2),
    "each, whole blocks": record(32, 24, 512, label_smoothing=0.2, logits_soft_cap=4.0),
    "bfloat16": record(40, 128, 600, "bfloat16", sum_over_tokens=True),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_without_races(name):
    made = CASES[name]
    wide = dataclasses.replace(made, **{field: getattr(made, field).astype(jnp.float32) for field in FIELDS})
    want, pull = jax.vjp(
        lambda fields: reference(dataclasses.replace(wide, **fields))[0],
        {field: getattr(wide, field) for field in FIELDS},
    )
    cotangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)), want)
    start = Pullback(record=made, residuals=None, output=None, cotangent=cotangent, grad_fields=frozenset(FIELDS))
    with simulated():
        output, gradients = jax.jit(lambda start: run_both_passes(forward, backward, start, TILES))(start)
    assert not found()
    tolerance = 2e-5 if made.inputs.dtype == jnp.float32 else 1e-2
    pairs = [*zip(output, want, strict=True), *((gradients[field], pull(cotangent)[0][field]) for field in FIELDS)]
    for mine, theirs in pairs:
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        assert mine.shape == theirs.shape
        assert np.linalg.norm(mine - theirs) < tolerance * max(np.linalg.norm(theirs), 1e-3)


def test_logits_and_rows_that_vmem_cannot_hold_are_refused():
    (implementation,) = implementations()
    made = record()
    assert not list(implementation.requires.extra(made))
    given = dataclasses.replace(made, inputs=jnp.zeros((40, 600)), lm_head=None)
    assert "lm_head: got none" in next(iter(implementation.requires.extra(given)))
    long = dataclasses.replace(made, lm_head=jax.ShapeDtypeStruct((MAX_ROW_BYTES // 4 + 1, 600), jnp.float32))
    assert "at most 4096" in next(iter(implementation.requires.extra(long)))


def test_default_blocks_have_the_bytes_that_vmem_holds():
    made = record()
    for channels, dtype in ((512, jnp.bfloat16), (4096, jnp.bfloat16), (8192, jnp.bfloat16)):
        shape = jax.ShapeDtypeStruct
        large = dataclasses.replace(
            made,
            inputs=shape((4096, channels), dtype),
            lm_head=shape((channels, 8192), dtype),
            weights=shape((4096,), dtype),
        )
        tiles = config.heuristic(large, None, "backward")
        assert tiles.block_t * channels * jnp.dtype(dtype).itemsize <= config.MAX_ROW_BYTES
    for name, value in (("block_t", 24), ("block_v", 100)):
        with pytest.raises(ValueError, match=name):
            TpuLossTiles(**{"block_t": 16, "block_v": 128, name: value})
