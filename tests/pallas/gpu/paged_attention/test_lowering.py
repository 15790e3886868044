"""Paged attention in Mosaic GPU, lowered for CUDA without a GPU; what surrounds the kernel; and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.paged_attention import PagedAttention, reference
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops import dispatch
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.plugins import registry
from ejkernel_pallas.gpu.paged_attention import config, forward, implementations, spec
from ejkernel_pallas.gpu.paged_attention.kernels import paged_prefill, producer
from ejkernel_pallas.gpu.paged_attention.plan import decode, prefill

SHAPE = jax.ShapeDtypeStruct
PARAMS = config.HopperPaged(num_programs=132)
PAGES = 24
H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)


def make(
    layout="pshd",
    page=16,
    size=128,
    heads=8,
    kv_heads=2,
    lens=(70, 1, 0, 33),
    q_lens=None,
    dtype=jnp.bfloat16,
    holes=False,
    starts=None,
    first=0,
    num_seqs=None,
):
    """A record of random numbers, whose pages lie in any order; with holes, one of each sequence is absent.

    The rows before `first` and behind those of `num_seqs` sequences are of none.
    """
    rng = np.random.default_rng(0)
    pages = max(PAGES, len(lens) * -(-max(lens) // page))
    axes = {"p": pages, "s": page, "h": kv_heads, "d": size, "c": 2}
    cache = [jnp.asarray(rng.normal(size=[axes[x] for x in layout]), dtype) for _ in range(2)]
    columns = pages // len(lens)
    tables = rng.permutation(pages)[: len(lens) * columns].reshape(len(lens), columns)
    if holes:
        tables[:, 3] = -1
    tokens = len(lens) if q_lens is None else first + sum(q_lens) + 1
    return PagedAttention(
        query=jnp.asarray(rng.normal(size=(tokens, heads, size)), dtype),
        key_pages=cache[0],
        value_pages=None if layout == paged_cache.COMBINED_LAYOUT else cache[1],
        block_tables=jnp.asarray(tables, jnp.int32),
        kv_lens=jnp.array(lens, jnp.int32),
        query_start=None if q_lens is None else jnp.asarray(np.cumsum((first, *q_lens)), jnp.int32),
        softmax_scale=0.1,
        kv_layout=layout,
        kv_heads=None,
        kv_starts=None if starts is None else jnp.asarray(starts, jnp.int32),
        num_seqs=None if num_seqs is None else jnp.int32(num_seqs),
    )


MIXED = {"lens": (70, 1, 40), "q_lens": (20, 1, 17)}
CALLS = (
    {},
    {"layout": "phsd", "page": 8, **MIXED},
    {"layout": "hpsd", "size": 64, "heads": 12, "kv_heads": 4, **MIXED},
    {"layout": "pshcd", "page": 32, "dtype": jnp.float16, **MIXED},
)
LONG = {"lens": (150, 1, 140, 0, 300), "q_lens": (40, 1, 130, 0, 33)}
"""Three sequences with so many query tokens that they are prefill, one of two tiles."""


@pytest.mark.parametrize("fields", CALLS, ids=lambda fields: fields.get("layout", "pshd"))
def test_a_call_lowers(fields):
    record = make(**fields)
    traced = jax.jit(lambda record: forward.forward(record, PARAMS)[0]).trace(record)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # One kernel merges parts; sequences of so many tokens as are prefill have one more.
    assert text.count("custom_call @mosaic_gpu") == (3 if "q_lens" in fields else 2)
    output, lse = traced.out_info
    assert (output.shape, output.dtype) == (record.query.shape, record.query.dtype)
    assert lse.shape == record.query.shape[:2]


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        *zip(CALLS, (None, None, (25, 0), None), strict=True),
        (LONG, None),
        ({"layout": "hpsd", "size": 64, **LONG}, (60, 0)),
        ({"layout": "phsd", "page": 8, **LONG}, (None, 3)),
        ({"layout": "pshcd", **LONG, "holes": True}, None),
        ({"page": 32, **LONG, "starts": (0, 0, 130, 0, 7)}, (140, 0)),
        ({**LONG, "first": 131, "num_seqs": 3}, None),
        ({**LONG, "num_seqs": 0}, None),
        ({"page": 256, "size": 64, **LONG}, None),
    ],
    ids=[
        *("pshd", "phsd", "hpsd, window", "pshcd", "long", "long, window", "long, right", "long, holes"),
        *("long, starts", "rows of no sequence", "no sequence", "long, large pages"),
    ],
)
def test_the_kernels_steps_in_jnp_match_the_reference(fields, window, monkeypatch):
    """The kernel in jnp: the same rows of queries, pages of the cache, masks and places of outputs, item by item."""
    record = dataclasses.replace(make(**fields), sliding_window=window)

    def simulated(constants, operands):
        return _simulated(constants, {name: np.asarray(x) for name, x in operands.items()})

    monkeypatch.setattr(forward, "_launch", simulated)
    monkeypatch.setattr(paged_prefill, "_launch", _simulated_prefill)
    monkeypatch.setattr(paged_prefill, "sequential_vmap", lambda function: function)
    monkeypatch.setattr(forward, "combine_partial_results", lambda constants, schedule, made: (made.output, made.lse))
    monkeypatch.setattr(forward, "sequential_vmap", lambda function: function)
    output, lse = forward.attend(record, PARAMS)
    want, want_lse = jax.jit(lambda record: reference(record)[0])(record)
    np.testing.assert_allclose(np.asarray(output, np.float32), np.asarray(want, np.float32), atol=2e-2)
    np.testing.assert_allclose(lse, want_lse, atol=2e-2)


def _simulated(constants, operands):
    """Output and lse of every item and KV head."""
    cache = {name: np.asarray(operands[name], np.float32) for name in ("keys", "values")}
    shape = constants.num_items, constants.tiles_per_item, 64
    output, lse = np.zeros((*shape, constants.value_dim), np.float32), np.full(shape, -7e29, np.float32)
    for item, head in np.ndindex(shape[:2]):
        sequence, keys, _, _, low, position, row = map(int, operands["items"][item])
        if keys == 0:
            continue
        first_row = head * constants.query_rows_per_kv_head + row * constants.rows_per_token
        assert first_row % 8 == 0  # a copy in the order of products begins at whole groups of eight rows
        rows = np.asarray(operands["query"][first_row:][:64], np.float32)
        places = np.arange(low, keys)
        columns, slots = places // constants.page_size, places % constants.page_size
        found = []
        for component, name in enumerate(("keys", "values")):
            rows_of = []
            for page in operands["tables"][sequence, : columns[-1] + 1]:
                index, first = producer.cache_index_and_column(constants, int(page), head, component)
                rows_of.append(cache[name][int(index), :, int(first) : int(first) + constants.key_dim])
            found.append(np.stack(rows_of)[columns, slots])
        apart = places - position - np.arange(64)[:, None] // constants.rows_per_token
        attends = apart <= constants.right_window if constants.right_window is not None else apart == apart
        attends = attends if constants.left_window is None else attends & (apart >= -constants.left_window)
        scores = np.where(attends, rows @ found[0].T * constants.softmax_scale_log2 * np.log(2), -7e29)
        top = scores.max(1, keepdims=True)
        weights = np.exp(scores - top)
        output[item, head] = weights @ found[1] / weights.sum(1, keepdims=True)
        lse[item, head] = top[:, 0] + np.log(weights.sum(1))
    return jnp.asarray(output), jnp.asarray(lse), None, None


def _simulated_prefill(flash, layout, *arrays):
    """Outputs and lse of the rows that live tiles write, out of the blocks that their ranges have; NaN in others."""
    operands = dict(zip(paged_prefill.OPERAND_NAMES, map(np.asarray, arrays), strict=True))
    keys_of = paged_prefill.PagedKeys(layout)
    rows, heads = operands["q"].shape[1:3]
    output, lse = np.full((1, rows, heads, flash.value_dim), np.nan), np.full((1, heads, rows), np.nan)
    for number in range(int(keys_of.load_num_live_tiles(operands))):
        tile, head = divmod(number, heads)
        start, full_start, full_end, stop = map(int, operands["table"][0, tile, :4])
        limits = keys_of.load_tile(operands, tile)
        assert limits.first_row % 8 == 0  # where copies begin
        mine = slice(int(limits.first_row + limits.sequence_row_start), int(limits.first_row + limits.sequence_row_end))
        row = np.arange(limits.sequence_row_start, limits.sequence_row_end)[:, None] + int(limits.first_position)
        query = operands["q"][0, mine, head].astype(np.float32)
        places, scores, values = [], [], []
        for block in range(start, stop):
            found = keys_of.find_pages(operands, limits, block)
            word = keys_of.valid_key_word(found)
            key = block * 128 + np.arange(128)
            attends = (key >= int(limits.first_key)) & (key < int(limits.key_end)) & np.ones_like(row, bool)
            if flash.right_window is not None:
                attends &= key <= row + flash.right_window
            if flash.left_window is not None:
                attends &= key >= row - flash.left_window
            attends &= (int(word) >> (np.arange(128) // 8 * 2) & 1 == 1)[None]
            if full_start <= block < full_end:
                assert attends.all()
            if start < block < full_start and flash.masks_before_full_tiles:  # masked at its lower end alone
                assert (key < int(limits.key_end)).all()
                assert flash.right_window is None or (key <= row[0] + flash.right_window).all()
            blocks = [_copied(layout, operands, name, (found, block), head // flash.group_size) for name in ("k", "v")]
            places.append(attends), values.append(blocks[1])
            scores.append(query @ blocks[0].T * flash.scale)
        attends, scores = np.concatenate(places, 1), np.concatenate(scores, 1)
        weights = np.where(attends, np.exp(scores), 0)
        total = weights.sum(1)
        assert np.isnan(output[0, mine, head]).all()  # every row is written once
        output[0, mine, head] = weights @ np.concatenate(values) / np.where(total > 0, total, 1)[:, None]
        lse[0, head, mine] = np.log(np.where(total > 0, total, 1)) + np.where(total > 0, 0, -np.inf)
    return jnp.asarray(output), jnp.asarray(lse)


def _copied(layout, operands, what, place, head):
    """128 keys or values, zeros where the page is behind the cache's last one."""
    source, size = operands[what].astype(np.float32), layout.key_dim
    made, (pages, block) = [], place
    for number, page in enumerate(pages):
        slot = block * 128 + number * layout.slots_per_copy
        slot = slot % layout.page_size if layout.pages_per_table_row else slot
        index, column = paged_prefill.cache_index_and_column(layout, page, head, ("k", "v").index(what))
        there = int(index) < source.shape[0]
        rows = source[int(index) if there else 0, int(slot) :, int(column) : int(column) + size][
            : layout.slots_per_copy
        ]
        made.append(rows if there else np.zeros_like(rows))
    return np.concatenate(made)


def test_tiles_are_ordered_by_sequence_with_the_longest_first():
    record = make(lens=(300, 0, 364, 1, 700), q_lens=(140, 0, 300, 1, 170), first=5, page=64)
    table = np.asarray(prefill.make_prefill_tiles(record, paged_cache.QueryRowLimits(32, 999)))[0]
    live = table[0, prefill.NUM_LIVE_TILES_COLUMN] // 8
    tiles = [paged_prefill.PagedTile(*row) for row in table[:live, prefill.PAGED_TILE_COLUMNS]]
    # The last two are of rows that belong to no sequence, and have no keys.
    assert [tile.sequence for tile in tiles[:-2]] == [4, 4, 2, 2, 2, 0, 0]
    assert [tile.key_end for tile in tiles] == [700, 652, 364, 319, 191, 300, 283, 0, 0]
    rows = np.concatenate(
        [np.arange(tile.first_row + tile.sequence_row_start, tile.first_row + tile.sequence_row_end) for tile in tiles]
    )
    few = 5 + 140 + 300  # the sequence with one row
    assert sorted([*rows, few]) == list(range(record.query.shape[0]))


@pytest.mark.parametrize("programs", [1, 3, 7, 40])
def test_every_step_is_assigned_to_exactly_one_program(programs):
    record = make(lens=(300, 0, 64, 129, 1, 260), q_lens=(40, 0, 1, 17, 1, 2), page=128)
    tiles = paged_cache.query_tiles(record, spec.tokens_per_tile(record))
    items, shares = map(np.asarray, decode.make_schedule(record, tiles, programs))
    # Tiles without tokens have no step.
    assert np.array_equal(items[:, 3] > 0, np.asarray(tiles.rows) > 0)
    line = np.concatenate([np.full(steps, n) for n, steps in enumerate(items[:, 3])])
    assert (shares[0, 1], shares[-1, 1]) == (0, len(line))
    for (item, begin), end in zip(shares[:-1], shares[1:, 1], strict=True):
        assert begin == end or line[begin] == item
    # The rows of all tiles together are those of the queries, each once, and none sees a key behind its own.
    rows = [
        int(row) + n for *_, row, count in np.column_stack((items, np.asarray(tiles.rows))) for n in range(int(count))
    ]
    assert sorted(rows) == list(range(61))
    seen, position, count = items[:, 1], items[:, 5], np.asarray(tiles.rows)
    assert np.all(seen[count > 0] == (position + count)[count > 0])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (make(), []),
        (make(page=256), []),
        (make(size=96), ["96 of keys"]),
        (make(page=4), ["page has 4"]),
        (make(page=96), ["page has 96"]),
        (make(heads=130, kv_heads=2), ["65 query heads"]),
        (dataclasses.replace(make(), key_pages=SHAPE((4, 16, 2, 128), jnp.int8)), ["int8"]),
    ],
)
def test_unsupported_records_are_refused_with_a_reason(record, words):
    found = list(spec.refusal_reasons(record))
    assert len(found) == len(words), found
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@pytest.mark.parametrize(("q_lens", "served"), [((40, 1, 130, 0, 33), "mosaic_gpu"), ((1, 1, 8, 0, 1), "triton")])
def test_dispatch_chooses_mosaic_for_prefill_and_triton_for_decoding(q_lens, served):
    record = make(lens=(150, 1, 140, 0, 300), q_lens=q_lens)
    found = dispatch.choose(registry().ops["unified_attention"], record, H200, "auto", "forward").verdicts
    assert next(v.implementation.name for v in found if not set(v.reasons) - set(absent(v))) == served
    assert {made.name for made in implementations()} <= {v.implementation.name for v in found}


def absent(verdict):
    """The reasons that speak of what this machine has not installed."""
    return [reason for reason in verdict.reasons if "is not installed" in reason]


@pytest.mark.parametrize("fields", [{"num_programs": 0}, {"num_programs": 4, "stages": 0}])
def test_zero_programs_or_stages_are_an_error(fields):
    with pytest.raises(ValueError, match="at least 1"):
        spec.make_spec(make(), config.HopperPaged(**fields))


@pytest.mark.parametrize("size", spec.HEAD_DIMS)
def test_shared_memory_has_room_for_stages(size):
    record = make(size=size)
    constants = spec.make_spec(record, PARAMS)
    assert constants.stages >= 3
    assert 2 * size * (64 + 2 * 128 * constants.stages) + spec.RESERVED_SMEM_BYTES <= 227 * 1024
