"""In which order blocks of the Mosaic GPU backward kernel add to a tile of queries, and that none waits for ever."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.tiled_attention import backward
from ejkernel_pallas.gpu.tiled_attention.config import BackwardTile
from ejkernel_pallas.gpu.tiled_attention.kernels.backward_call import Call, QueryBlockRuns, for_each_query_block
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import num_tiles, pad_segment_ids, query_block_ranges
from ejkernel_pallas.gpu.tiled_attention.plan.dq_order import find_first_dq_adders
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec

BLOCKS = (4, 8)
CALLS = {
    "full": (40, 64, {}),
    "causal": (64, 64, {"causal": True}),
    "more keys": (20, 70, {"causal": True}),
    "more queries": (90, 30, {"causal": True, "sliding_window": (5, None)}),
    "window": (64, 64, {"causal": True, "sliding_window": (9, None)}),
    "segments": (64, 64, {"causal": True}),
    "segments in no order": (50, 64, {}),
}


def table(name):
    """QueryRuns of a call's tiles of keys, and how many tiles of queries there are."""
    queries, keys, fields = CALLS[name]
    rng, ids = np.random.default_rng(0), None
    if name.startswith("segments"):
        ids = [rng.integers(-1, 4, (2, n)) for n in (queries, keys)]
        ids = ids if "no order" in name else [np.sort(x, axis=1) for x in ids]
        fields = fields | {"q_segment_ids": jnp.asarray(ids[0]), "kv_segment_ids": jnp.asarray(ids[1])}
        ids = (
            pad_segment_ids(fields["q_segment_ids"], BLOCKS[0], -1),
            pad_segment_ids(fields["kv_segment_ids"], BLOCKS[1], -2),
        )
    q, k = (jax.ShapeDtypeStruct((2, n, 2, 64), jnp.bfloat16) for n in (queries, keys))
    spec = make_spec(TiledAttention(query=q, key=k, value=k, softmax_scale=1.0, **fields))
    return query_block_ranges(spec, ids, *BLOCKS), num_tiles(queries, BLOCKS[0])


@pytest.mark.parametrize("name", CALLS)
def test_order_of_a_key_tile_counts_the_earlier_tiles_that_add_to_dq(name):
    visits, count = table(name)
    earliest = np.asarray(find_first_dq_adders(visits, count))
    seen = np.zeros((len(visits), count), int)
    for row, key in np.ndindex(visits.shape[:2]):
        first, _, _, last = np.asarray(visits)[row, key]
        assert first < last
        for query in range(first, last):
            assert key - earliest[row, query] == seen[row, query]
            seen[row, query] += 1
    assert ((earliest < visits.shape[1]) == (seen > 0)).all()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("room", "folded"), [(1, False), (3, False), (3, True)])
def test_blocks_that_wait_in_order_of_dq_never_deadlock(name, room, folded):
    """However few blocks run at a time: `room` of them, which begin in the order of the list and add in any."""
    visits, count = table(name)
    earliest = np.asarray(find_first_dq_adders(visits, count))
    visits, batch, heads = np.asarray(visits), 2, 2
    plan = tile_scheduler.make_tile_schedule(
        visits.shape[1],
        batch_size=batch,
        heads_per_batch_row=heads,
        reverses_tiles=False,
        head_bytes=2**24,
        heads_per_group=1,
        is_persistent=False,
    )
    plan = dataclasses.replace(plan, interleaves_bundles=folded)
    added = np.zeros((batch, heads, count), int)
    waiting, running = list(range(plan.num_items)), []
    while waiting or running:
        while waiting and len(running) < room:
            item = tile_scheduler.locate_work_tile(plan, np.int32(waiting.pop(0)))
            place = int(item.batch_row), int(item.head), int(item.tile_in_head)
            first, _, _, last = visits[min(place[0], len(visits) - 1), place[2]]
            running.append((place, list(range(first, last))))
        moved = False
        for block in reversed(running):
            (b, h, key), left = block
            query = left[-1]
            if added[b, h, query] == key - earliest[min(b, len(earliest) - 1), query]:
                added[b, h, query] += 1
                left.pop()
                moved = True
        assert moved, "blocks wait for each other"
        running = [block for block in running if block[1]]
    assert (added == np.broadcast_to(visitors(visits, count), (2, count))[:, None]).all()


@pytest.mark.parametrize(("heads", "tiles", "bundle"), [(4, 6, 2), (4, 7, 2), (6, 1, 2), (3, 5, 3), (4, 2, 1)])
def test_interleaved_bundles_alternate_later_tiles_with_the_next_bundles_earlier_ones(heads, tiles, bundle):
    plan = tile_scheduler.TileSchedule(
        heads,
        tiles,
        bundle,
        heads * tiles,
        heads * tiles,
        reverses_tiles=False,
        is_persistent=False,
        interleaves_bundles=True,
    )
    listed = [tile_scheduler.locate_work_tile(plan, np.int32(n)) for n in range(plan.num_items)]
    later, bundles = tiles // 2, heads // bundle
    steps = [(0, tile) for tile in range(tiles - later)]
    for n in range(1, bundles):
        for tile in range(tiles - later):
            steps += [(n, tile)] + [(n - 1, tiles - later + tile)] * (tile < later)
    steps += [(bundles - 1, tiles - later + tile) for tile in range(later)]
    wanted = [(n * bundle + head, tile) for n, tile in steps for head in range(bundle)]
    assert [(int(item.head), int(item.tile_in_head)) for item in listed] == wanted


@pytest.mark.parametrize(
    ("mask", "folded", "loops_by_head"),
    [
        ({}, False, False),
        ({"causal": True}, True, False),
        ({"causal": True, "sliding_window": (1024, None)}, False, True),
    ],
)
def test_queries_in_use_by_running_blocks_fit_the_l2_cache(mask, folded, loops_by_head):
    """A folded list of heads whose queries fit; with a window, not all heads of a group at a time."""
    q, k = (jax.ShapeDtypeStruct((16, 2048, heads, 256), jnp.bfloat16) for heads in (32, 8))
    spec = make_spec(TiledAttention(query=q, key=k, value=k, softmax_scale=1.0, **mask))
    tile = BackwardTile(256, 256, 128, 64, 2)
    visits = query_block_ranges(spec, None, tile.block_q, tile.block_kv)
    plan = backward._tile_schedule_maker(visits, spec, tile)(spec.batch_size)
    assert (plan.interleaves_bundles, backward._should_loop_by_head(visits, spec, tile)) == (folded, loops_by_head)
    if folded:
        assert (
            plan.heads_per_bundle * spec.group_size * spec.q_len * tile.hbm_bytes_per_query(spec)
            <= 1.5 * tile_scheduler.L2_BYTES_PER_BUNDLE
        )


@pytest.mark.parametrize("loops_by_head", [False, True])
def test_query_blocks_are_processed_in_reverse_in_runs_of_partial_and_full_ones(loops_by_head):
    q, k = (jax.ShapeDtypeStruct((1, 64, heads, 64), jnp.bfloat16) for heads in (4, 2))
    spec = make_spec(TiledAttention(query=q, key=k, value=k, softmax_scale=1.0, causal=True))
    call = Call(spec, None, None, loops_by_head, None, None, None, None, None)
    visits = QueryBlockRuns(None, jnp.int32(2), tuple(map(jnp.int32, (1, 3, 5, 7))))

    def note(masking, head, index, state):
        count, seen = state
        return count + 1, seen.at[count].set(jnp.array([head, index, masking], jnp.int32))

    start = jnp.int32(0), jnp.full((12, 3), -1)
    _, seen = for_each_query_block(call, visits, note, start, True)
    runs = [(index, index not in (3, 4)) for index in (6, 5, 4, 3, 2, 1)]
    wanted = [(head, *visit) for head in (2, 3) for visit in runs]
    if not loops_by_head:
        wanted = [(head, *visit) for visit in runs for head in (2, 3)]
    assert seen.tolist() == [list(map(int, visit)) for visit in wanted]


@pytest.mark.parametrize(
    "tile",
    [
        BackwardTile(64, 64, 128, 128, 3),
        BackwardTile(128, 128, 128, 64, 3),
        BackwardTile(192, 128, 128, 64, 2),
        BackwardTile(256, 256, 128, 64, 2),
    ],
)
def test_strips_cover_each_element_of_dq_once(tile):
    seen = np.zeros((tile.block_q, tile.head_dim), int)
    for member, maker, strip in np.ndindex(tile.blocks_per_cluster, 2, tile.strips_per_dq_piece):
        row, column = tile.dq_strip_start(member, maker, strip)
        seen[row : row + 64, column : column + tile.dq_strip_columns] += 1
    assert (seen == 1).all()


def visitors(visits, count):
    """How many tiles of keys visit each tile of queries."""
    index = np.arange(count)
    return ((visits[:, :, :1] <= index) & (index < visits[:, :, 3:])).sum(axis=1)
