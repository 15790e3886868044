"""The decode kernel of native sparse attention compared with the family's meaning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_block_records import record, with_empty_list, with_nan
from tpu_records import close, interpreted

from ejkernel.families.selected_attention import reference
from ejkernel.ops.device import find_device
from ejkernel_pallas.tpu.selected_attention_decode import config, implementations
from ejkernel_pallas.tpu.selected_attention_decode.config import TpuSelectedDecode
from ejkernel_pallas.tpu.selected_attention_decode.forward import forward

TILES = TpuSelectedDecode(block_kv=256, lists=2)
SMALL = (2, 2, 6, 2, 32)
CASES = {
    "pairs of heads, two steps of a list": record(blocks=(64, 6)),
    "window of all heads, pages of parts of blocks": record(SMALL, slots=16, entries=20, window_size=70),
    "tokens of a single head, longer pages": record((2, 1, 3, 1, 128), blocks=(32, 4), slots=64, window_size=33),
    "float32, dense, an empty list": with_empty_list(
        record(SMALL, "float32", blocks=(32, 3), slots=160, entries=1, pages=False)
    ),
    "one list per step": record((2, 1, 6, 6, 32), "float32", blocks=(16, 9), slots=16, entries=10),
}


@pytest.mark.parametrize("name", CASES)
def test_values_with_nan_in_padding(name):
    given = CASES[name]
    tiles = dataclasses.replace(TILES, lists=1) if name == "one list per step" else TILES
    with interpreted():
        output, residuals = jax.jit(lambda given: forward(given, tiles))(with_nan(given))
    expected, expected_residuals = reference(given)
    close(output, expected, given.query.dtype)
    for branch in ("selected", "window"):
        if getattr(residuals, branch) is not None:
            close(getattr(residuals, branch).lse, getattr(expected_residuals, branch).lse, given.query.dtype)


def test_lists_by_vmap():
    given = record(SMALL, "float32", blocks=(32, 3), slots=32, entries=4)
    lists = jnp.stack([given.block_indices, jnp.roll(given.block_indices, 1, axis=1)])
    with interpreted():
        run = jax.vmap(lambda x: forward(dataclasses.replace(given, block_indices=x), TILES)[0])
        outputs = jax.jit(run)(lists)
    for output, blocks in zip(outputs, lists, strict=True):
        close(output, reference(dataclasses.replace(given, block_indices=blocks))[0], given.query.dtype)


def test_calls_that_the_kernel_cannot_hold_are_refused():
    (implementation,) = implementations()
    reasons = lambda given: list(implementation.requires.extra(given))  # noqa: E731
    shape, given = jax.ShapeDtypeStruct, record()
    assert not reasons(given)
    for changes, sentence in (
        ({"query": shape((2, 1, 260, 128), jnp.bfloat16)}, "query: got 65 query heads per KV head"),
        ({"key": shape((13, 64, 3, 128), jnp.bfloat16)}, "key: got 3 KV heads of bfloat16, wants 1 or a multiple of 2"),
        ({"block_size": 8192}, "block_size: got 8192"),
        ({"block_size": 60}, "key: got rows or pages of 64 tokens and blocks of 60"),
        ({"key": shape((13, 36, 4, 128), jnp.bfloat16), "block_size": 36}, "got 36"),
        ({"block_tables": shape((2, 2**16), jnp.int32)}, "words of lists and pages"),
    ):
        assert sentence in " ".join(reasons(dataclasses.replace(given, **changes)))
    for name in (
        "query",
        "key",
        "value",
    ):  # of another dtype, which `Requires` refuses: limits are asked for all the same
        assert not reasons(dataclasses.replace(given, **{name: shape(getattr(given, name).shape, "float64")}))
    with pytest.raises(ValueError, match="lists: got 0"):
        TpuSelectedDecode(block_kv=64, lists=0)


def test_order_of_choice():
    (implementation,) = implementations()
    priority = lambda given: implementation.priority(given, find_device("v5e"), "forward")  # noqa: E731
    dense = record(blocks=(64, 4), slots=64, entries=16, pages=False)
    many = jnp.broadcast_to(dense.query[:, :1], (2, 4, 8, 128))
    assert priority(record()) == priority(dense) == 20
    assert priority(dataclasses.replace(dense, query=many)) == 5
    assert priority(record(slots=16)) < 0


@pytest.mark.parametrize("listed", [1, 16, 400])
def test_default_tiles_fit_memory_and_have_whole_blocks(listed):
    given = dataclasses.replace(record(), block_indices=jnp.asarray(np.zeros((2, 1, 4, listed)), jnp.int32))
    for window in (None, 512):
        given = dataclasses.replace(given, window_size=window)
        for tiles in config.candidates(given, None, "forward"):
            assert config.vmem_bytes(given, tiles) <= config.MAX_VMEM_BYTES
            assert tiles.block_kv % given.block_size == tiles.block_kv % 128 == given.key.shape[2] % tiles.lists == 0
