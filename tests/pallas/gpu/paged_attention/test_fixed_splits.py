"""Splits of a fixed number of keys in a `batch_invariant` block: schedules, slots, and the claim."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops import dispatch
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.plugins import registry
from ejkernel_pallas.gpu.hopper.split_boundaries import SplitBoundaries
from ejkernel_pallas.gpu.latent_attention.kernels.call import for_each_item
from ejkernel_pallas.gpu.paged_attention import config, forward, spec
from ejkernel_pallas.gpu.paged_attention.kernels import fixed_split_combine, paged_decode, producer
from ejkernel_pallas.gpu.paged_attention.kernels.fixed_split_combine import vectors_per_block

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
PARAMS = config.HopperPaged(num_programs=132, split_keys=256)
LENGTHS, ROWS = (700, 0, 300, 256, 1, 2100), (9, 0, 1, 2, 1, 20)


def make(lengths=LENGTHS, rows=ROWS, size=128, heads=8, kv_heads=2, slots=64):
    columns = -(-max(lengths) // slots)
    pages = len(lengths) * columns
    tokens = len(lengths) if rows is None else sum(rows)
    return PagedAttention(
        query=jnp.zeros((tokens, heads, size), jnp.bfloat16),
        key_pages=jnp.zeros((pages, slots, kv_heads, size), jnp.bfloat16),
        value_pages=jnp.zeros((pages, slots, kv_heads, size), jnp.bfloat16),
        block_tables=jnp.arange(pages, dtype=jnp.int32).reshape(len(lengths), columns),
        kv_lens=jnp.array(lengths, jnp.int32),
        query_start=None if rows is None else jnp.asarray(np.cumsum((0, *rows)), jnp.int32),
        softmax_scale=0.1,
        kv_layout="pshd",
        kv_heads=None,
    )


def constants_and_schedule(record, params):
    constants = spec.make_spec(record, params)
    tiles = paged_cache.query_tiles(record, constants.tokens_per_tile)
    constants = spec.with_items(record, constants, len(tiles.sequence))
    return constants, [np.asarray(x) for x in forward.make_item_schedule(record, constants, tiles)]


def processed(constants, schedule, head):
    """The splits that programs process, as (item, split of the sequence, program has all), and the slots they fill."""
    operands = dict(zip(("items", "shares"), map(jnp.asarray, schedule), strict=True))
    call = types.SimpleNamespace(spec=constants, operands=operands)
    found, slots = [], {}

    def process(item, count):
        first, last = (int(constants.splits.index(item.first_step + n)) for n in (0, item.num_steps - 1))
        for number in range(last - first + 1):
            found.append((int(item.query_row), first + number, bool(item.has_all_steps)))
            if not item.has_all_steps:
                slot = int(paged_decode.stored_slot(constants, item, number))
                assert slot not in slots
                assert slot < constants.num_slots
                slots[slot] = found[-1][:2]
        return count

    with jax.disable_jit():
        for program in range(constants.programs_per_kv_head):
            for_each_item(call, process, jnp.int32(0), (jnp.int32(program), jnp.int32(head)), constants.keys_per_unit)
    return found, slots


@pytest.mark.parametrize("window", [None, (300, 0)])
@pytest.mark.parametrize("doublings", [(), (512,), (512, 2048)])
@pytest.mark.parametrize("programs", [6, 10, 26, 132])
def test_the_combine_kernel_reads_each_split_from_the_slot_that_has_it(programs, doublings, window):
    params = dataclasses.replace(PARAMS, num_programs=programs, split_doublings=doublings)
    constants, schedule = constants_and_schedule(dataclasses.replace(make(), sliding_window=window), params)
    head, (items, shares) = constants.tiles_per_item - 1, schedule
    found, slots = processed(constants, schedule, head)
    index = constants.splits.index
    ranges = [(n, int(index(row[4] // 256)), int(index(row[4] // 256 + row[3] - 1)) + 1) for n, row in enumerate(items)]
    expected = [(n, split) for n, first, end in ranges if items[n, 3] for split in range(first, end)]
    assert sorted(x[:2] for x in found) == sorted(expected)  # every split once
    cut = [x[:2] for x in found if not x[2]]
    assert cut
    for n, split in cut:
        share = -(-shares[-1, 1] // constants.programs_per_kv_head)
        item = fixed_split_combine.CutItem(*map(jnp.int32, (items[n, 2], items[n, 4] // 256, share)))
        number = jnp.int32(split - index(items[n, 4] // 256))
        slot = fixed_split_combine.slot_of_split(constants, item, number, jnp.int32(head))
        assert slots[int(slot)] == (n, split)
    # Each of these items is cut at one share that is the first to begin within it.
    begins = [(shares[p, 0], shares[p, 1], shares[p - 1, 1]) for p in range(1, constants.programs_per_kv_head)]
    inside = [n for n, x, before in begins if items[n, 2] < x < items[n, 2] + items[n, 3] and before <= items[n, 2]]
    assert sorted(inside) == sorted({n for n, _ in cut})


def test_blocks_fold_all_vectors_of_a_tile():
    """56 query heads per KV head have 56 vectors, which three do not divide."""
    assert [vectors_per_block(n) for n in (1, 8, 31, 48, 56, 64)] == [1, 1, 1, 3, 2, 4]
    assert all(n % vectors_per_block(n) == 0 for n in range(1, 257))


def test_programs_have_whole_items_where_slots_would_take_too_much_memory(monkeypatch):
    monkeypatch.setattr(spec, "MAX_SLOT_BYTES", 1)
    constants, schedule = constants_and_schedule(make(), PARAMS)
    assert constants.slots_per_segment == 0
    found, slots = processed(constants, schedule, 0)
    assert not slots
    assert sorted(found) == sorted((n, split, True) for n, row in enumerate(schedule[0]) for split in range(row[3]))


@pytest.mark.parametrize("window", [None, (300, 0)])
def test_the_steps_of_splits_are_those_of_the_keys(window):
    constants, (items, _) = constants_and_schedule(dataclasses.replace(make(), sliding_window=window), PARAMS)
    for _, keys, _, units, low, *_ in items:
        item, steps = types.SimpleNamespace(first_key=jnp.int32(low), key_end=jnp.int32(keys)), []
        for split in range(low // 256, low // 256 + units):
            first, end = map(int, producer.split_steps(constants, item, jnp.int32(split), 1))
            assert first // 2 == (end - 1) // 2 == split  # a split has two steps of 128 keys
            steps += range(first, end)
        assert not units or steps == list(range(low // 128, max(-(-keys // 128), low // 128 + 1)))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("rows", "launches"), [(None, 1), (None, 2), ((40, 1, 130), 2), ((40, 1, 130), 3)])
def test_a_call_in_splits_lowers(size, rows, launches):
    """A second kernel folds the splits of items that are cut, or the decode kernel does."""
    record, folds_in_launch = make((2100, 1, 1400), rows, size), launches == (1 if rows is None else 2)
    params = dataclasses.replace(PARAMS, split_keys=config.INVARIANT_SPLIT_KEYS, folds_in_launch=folds_in_launch)
    text = jax.jit(lambda x: forward.forward(x, params)[0]).trace(record).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == launches


def test_in_the_block_splits_are_fixed_whatever_the_batch_is():
    op, priorities = registry().op("unified_attention"), set()
    for lengths, rows in (((70,), (1,)), ((70, 600), (40, 130))):
        record = make(lengths, rows)
        choice = dispatch.choose(op, record, H200, "auto", "forward", batch_invariant=True)
        verdict = next(x for x in choice.verdicts if x.implementation.name == "mosaic_gpu")
        assert not [x for x in verdict.reasons if "batch_invariant" in x]
        space = verdict.implementation.config
        params = space.batch_invariant(record, H200, "forward")
        assert (params.split_keys, params.split_doublings) == (1024, (8192,))
        assert space.fixed_if_invariant == ("split_keys", "split_doublings")
        priorities.add(verdict.implementation.invariant_priority)
    assert priorities == {20}


def test_boundaries_of_splits_depend_on_positions_alone():
    """Short splits come first; each boundary is a multiple of the size from there on."""
    splits = SplitBoundaries(2, (8, 24))
    begins = [n for n in range(48) if splits.begins(jnp.int32(n))]
    assert begins == [0, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40]
    assert [int(splits.first_unit(jnp.int32(n))) for n in range(len(begins))] == begins
    assert [int(splits.index(jnp.int32(n))) for n in range(48)] == [sum(x <= n for x in begins) - 1 for n in range(48)]
    assert [int(splits.next_begin(jnp.int32(n))) for n in range(-1, 40)] == [
        min(x for x in begins if x > n) for n in range(-1, 40)
    ]
    assert [splits.count(n) for n in (1, 8, 9, 24, 25, 48)] == [1, 4, 5, 8, 9, 11]


@pytest.mark.parametrize("doublings", [(100,), (256,), (1024, 512), (512, 1536)])
def test_doublings_are_multiples_of_the_size_from_there_on(doublings):
    with pytest.raises(ValueError, match="split_doublings"):
        spec.make_spec(make(), dataclasses.replace(PARAMS, split_doublings=doublings))


@pytest.mark.parametrize(("heads", "slot_rows", "in_place"), [(8, 16, True), (16, 16, True), (6, 16, False)])
def test_a_decoded_token_has_its_query_heads_in_place_if_they_are_within_eight_rows(heads, slot_rows, in_place):
    record = make(rows=None, heads=heads)
    constants, _ = constants_and_schedule(record, PARAMS)
    assert (constants.slot_rows, constants.queries_in_place) == (slot_rows, in_place)
    assert constants.stages == 3  # the total of few rows leaves room for a stage more than with 64
    assert constants_and_schedule(make(), PARAMS)[0].stages == 2
    if in_place:
        group, size = heads // 2, heads * len(LENGTHS)
        for token in range(len(LENGTHS)):
            for head in (0, 1):
                first, offset = producer.item_rows(constants, jnp.int32(token), jnp.int32(head))
                assert int(first) % 8 == 0
                assert int(first + offset) == token * heads + head * group
                assert int(first) + constants.rows_per_token <= size
                assert int(offset) + group <= constants.rows_per_token


@pytest.mark.parametrize("keys", [-128, 100])
def test_a_split_is_a_number_of_blocks(keys):
    with pytest.raises(ValueError, match=r"split_keys\s+a multiple of 128"):
        spec.make_spec(make(), dataclasses.replace(PARAMS, split_keys=keys))
