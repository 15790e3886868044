"""The kernels of the selected branch, interpreted, against the family's meaning."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import interpreted, simulated

from ejkernel.families.selected_attention import SelectedAttention, reference
from ejkernel.ops.device import target_device
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.selected_attention import _refusal_reasons, config
from ejkernel_pallas.tpu.selected_attention.backward import backward
from ejkernel_pallas.tpu.selected_attention.config import TpuSelected
from ejkernel_pallas.tpu.selected_attention.forward import forward

FIELDS = frozenset({"query", "key", "value"})


def make_record(shape, block_size, listed, dtype="float32", bounds=(), **fields):
    """A record of (B, T, H, Hk, D, Dv) whose queries list random blocks of their own sequence, and -1."""
    batch, tokens, heads, kv_heads, size, value_size = shape
    random = np.random.default_rng(3)
    bounds = bounds or (0, tokens)
    starts = [n for a, b in itertools.pairwise(bounds) for n in range(a, b, block_size)]
    indices = np.full((batch, tokens, kv_heads, listed), -1, np.int32)
    for token in range(bounds[0], bounds[-1]):
        begin = max(x for x in bounds[:-1] if x <= token)
        own = [n for n, start in enumerate(starts) if begin <= start <= token]
        for head in np.ndindex(batch, kv_heads):
            chosen = random.permutation(own)[:listed]
            indices[head[0], token, head[1], random.permutation(listed)[: len(chosen)]] = chosen
    if len(bounds) > 2 or bounds[-1] < tokens:
        ids = np.searchsorted(bounds, np.arange(tokens), side="right") - 1
        ids = jnp.asarray(np.where(np.arange(tokens) < bounds[-1], ids, -1)[None], jnp.int32)
        fields |= {"q_segment_ids": ids, "kv_segment_ids": ids, "block_starts": jnp.asarray(starts, jnp.int32)}

    def normal(*size):
        return jnp.asarray(random.normal(size=size), dtype)

    return SelectedAttention(
        query=normal(batch, tokens, heads, size),
        key=normal(batch, tokens, kv_heads, size),
        value=normal(batch, tokens, kv_heads, value_size),
        block_indices=jnp.asarray(indices),
        softmax_scale=size**-0.5,
        block_size=block_size,
        **fields,
    )


CASES = {
    "groups": (make_record((2, 90, 8, 2, 24, 40), 16, 3), TpuSelected(block_q=128, block_kv=128, readers=3)),
    "packed": (
        make_record((1, 150, 4, 1, 24, 24), 20, 2, bounds=(0, 1, 62, 141)),
        TpuSelected(block_q=128, block_kv=48, readers=4),
    ),
    "long blocks": (make_record((1, 300, 2, 1, 16, 16), 150, 2), TpuSelected(block_q=128, block_kv=128, readers=8)),
    "bfloat16": (
        make_record((1, 140, 16, 1, 24, 24), 16, 4, "bfloat16"),
        TpuSelected(block_q=64, block_kv=64, readers=4),
    ),
}


def passes(record, tiles):
    output, residuals = forward(record, tiles)
    cotangent = jnp.cos(jnp.arange(output.size)).reshape(output.shape).astype(output.dtype)
    pullback = Pullback(record=record, residuals=residuals, output=output, cotangent=cotangent, grad_fields=FIELDS)
    return output, residuals.selected.lse, cotangent, backward(pullback, tiles)


def check(record, got):
    output, lse, cotangent, gradients = got
    wide = dataclasses.replace(record, **{name: getattr(record, name).astype(jnp.float32) for name in FIELDS})
    exact, residuals = reference(wide)
    _, pull = jax.vjp(
        lambda x: reference(dataclasses.replace(wide, **x))[0], {name: getattr(wide, name) for name in FIELDS}
    )
    (of_fields,) = pull(cotangent.astype(jnp.float32))
    tolerance = 1e-6 if record.query.dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(lse, residuals.selected.lse, atol=10 * tolerance)
    for name, (mine, theirs) in {
        "output": (output, exact),
        **{name: (gradients[name], of_fields[name]) for name in FIELDS},
    }.items():
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        assert mine.shape == theirs.shape, name
        assert np.linalg.norm(mine - theirs) < tolerance * np.linalg.norm(theirs), name


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    record, tiles = CASES[name]
    with interpreted():
        check(record, jax.jit(passes, static_argnums=1)(record, tiles))


@pytest.mark.slow
def test_no_races():
    """The simulator takes long for each row of a query: few of them."""
    record = make_record((1, 10, 2, 1, 8, 8), 4, 2)
    tiles = TpuSelected(block_q=128, block_kv=16, readers=4)
    with simulated():
        check(record, jax.jit(passes, static_argnums=1)(record, tiles))
    assert not found()


def test_scores_beyond_the_range_of_weights():
    """Scores near 200 and -200, whose weights overflow and underflow unless they are relative to the largest."""
    record = make_record((1, 60, 4, 1, 24, 24), 16, 2)
    signs = jnp.where(jnp.arange(60) % 2, 1.0, -1.0)[None, :, None]
    record = dataclasses.replace(
        record,
        query=record.query.at[..., 0].set(signs),
        key=record.key.at[..., 0].set(200.0 / record.softmax_scale),
    )
    with interpreted():
        output, residuals = jax.jit(forward, static_argnums=1)(record, CASES["groups"][1])
    exact, expected = reference(record)
    # Float32 has scores of this size to within 2e-5.
    np.testing.assert_allclose(output, exact, atol=1e-4)
    np.testing.assert_allclose(residuals.selected.lse, expected.selected.lse, rtol=1e-6)


def test_new_block_lists_do_not_recompile():
    record, tiles = CASES["bfloat16"]
    other = dataclasses.replace(record, block_indices=jnp.where(jnp.arange(4) == 1, -1, record.block_indices))
    with interpreted():
        compiled = jax.jit(lambda x: passes(x, tiles)).lower(record).compile()
        check(other, compiled(other))


def long_record(tokens, listed, group=16):
    def shaped(*size, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(size, dtype)

    return SelectedAttention(
        query=shaped(1, tokens, group, 128),
        key=shaped(1, tokens, 1, 128),
        value=shaped(1, tokens, 1, 128),
        block_indices=shaped(1, tokens, 1, listed, dtype=jnp.int32),
        softmax_scale=1.0,
        block_size=64,
    )


def test_memory_limits_are_computed_and_refused():
    """Tiles shrink until they fit; what fits no tile is refused before a compilation."""
    with target_device("v7x"):
        for record in (long_record(16384, 16), long_record(2**20, 16), long_record(16384, 200, 64)):
            tiles = config.heuristic(record, None, "forward")
            assert config.vmem_bytes(record, tiles, "forward") <= config.MAX_VMEM_BYTES
            assert config.work_list_bytes(record, tiles) <= config.MAX_WORK_LIST_SMEM_BYTES
            assert not list(_refusal_reasons(record))
        (reason,) = _refusal_reasons(long_record(2**20, 4000))
    assert "SMEM" in reason
    (reason,) = _refusal_reasons(long_record(1024, 4, group=65))
    assert "65 query heads" in reason
