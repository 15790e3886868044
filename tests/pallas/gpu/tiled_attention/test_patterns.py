"""Patterns for the Hopper kernels: lists that visit what attends, and words that say what threads test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.block_maps import block_map
from ejkernel.types.sparse_masks import LocalMask, MultiHeadMask, NumpyMask
from ejkernel_pallas.gpu.tiled_attention.plan.pattern import key_block_lists, query_block_lists

LENGTH, BLOCK = 512, 128
SEEN = np.random.RandomState(0).rand(LENGTH, LENGTH) < 0.3
SEEN[:, 256:384] = False  # keys that nobody sees
SEEN[128:256] = False  # queries that see nothing
SEEN[384:, :128] = True
PATTERNS = {
    "pairs": NumpyMask(SEEN),
    "heads": MultiHeadMask([NumpyMask(SEEN), LocalMask((LENGTH, LENGTH), (100, 0))]),
}


def make(pattern, **fields):
    query = jax.ShapeDtypeStruct((1, LENGTH, 2, 64), jnp.bfloat16)
    return TiledAttention(query=query, key=query, value=query, softmax_scale=1.0, pattern=pattern, **fields)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("fields", [{}, {"causal": True}], ids=["full", "causal"])
def test_lists_have_full_blocks_first_and_at_least_one_block_per_tile(pattern, fields):
    record = make(PATTERNS[pattern], **fields)
    found = block_map(record, BLOCK, BLOCK)
    forward = {name: np.asarray(x) for name, x in key_block_lists(record, BLOCK, BLOCK).items()}
    backward = {name: np.asarray(x) for name, x in query_block_lists(record, BLOCK, BLOCK)[0].items()}
    for lists, some, every in (
        (forward, found.any_allowed, found.all_allowed),
        (backward, found.any_allowed.swapaxes(2, 3), found.all_allowed.swapaxes(2, 3)),
    ):
        for place in np.ndindex(lists["blocks"].shape[:3]):
            start, full_start, full_end, stop = lists["table"][place]
            blocks = lists["blocks"][place]
            assert start == 0 == full_start
            assert stop >= 1
            assert set(blocks[full_start:full_end]) == set(np.flatnonzero(every[place]))
            if some[place].any():
                assert sorted(blocks[:stop]) == list(np.flatnonzero(some[place]))
            else:
                assert stop == 1
                assert lists["mask_ids"][place][0] == 1  # the empty mask


def rank(lists, head, tile, block):
    """The rank of a key tile's block, from its list."""
    (place,) = np.flatnonzero(lists["blocks"][0, head, tile, : lists["table"][0, head, tile, 3]] == block)
    return lists["ranks"][0, head, tile, place]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ranks_of_key_tiles_count_up_from_the_last_tile(pattern):
    lists = {name: np.asarray(x) for name, x in query_block_lists(make(PATTERNS[pattern]), BLOCK, BLOCK)[0].items()}
    for head in range(lists["ranks"].shape[1]):
        for block in range(LENGTH // BLOCK):
            adding = [
                tile
                for tile in range(LENGTH // BLOCK)
                if block in lists["blocks"][0, head, tile, : lists["table"][0, head, tile, 3]]
            ]
            assert [rank(lists, head, tile, block) for tile in adding] == list(range(len(adding)))[::-1]
            assert (lists["first"][0, head, block] == LENGTH // BLOCK) == (not adding)


@pytest.mark.parametrize("kv_block", [64, 128, 192])
def test_mask_words_have_the_bits_of_a_threads_columns(kv_block):
    """Thread `t` of the four of a row has columns `8 n + 2 t` and the next one, two bits for each eight."""
    record, spans = make(PATTERNS["pairs"]), -(-kv_block // 128)
    masks = np.asarray(block_map(record, BLOCK, kv_block).tile_masks)
    words = np.asarray(key_block_lists(record, BLOCK, kv_block)["mask_words"]).view(np.uint32)
    words = words.reshape(len(masks), BLOCK, spans, 4)
    for column in range(kv_block):
        eight, rest = divmod(column % 128, 8)
        bit = words[:, :, column // 128, rest // 2] >> (2 * eight + rest % 2) & 1
        np.testing.assert_array_equal(bit, masks[:, :, column])
