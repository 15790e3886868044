"""The gated grouped matmul in Mosaic GPU, lowered for CUDA without a GPU; and what it refuses."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.families.grouped_matmul import columns
from ejkernel_pallas.gpu.grouped_matmul import config, gated_refusal_reasons, spec
from ejkernel_pallas.gpu.grouped_matmul.forward import gated_forward
from ejkernel_pallas.gpu.grouped_matmul.kernels import panels
from ejkernel_pallas.gpu.hopper import gating
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY_BYTES

SHAPE = jax.ShapeDtypeStruct
TILES, ALONE = config.GATED_TILES, config.SINGLE_WARPGROUP_TILES
WHOLE = tuple(dataclasses.replace(tile, block_n=2 * tile.block_n) for tile in (*TILES, *ALONE))


GPT_OSS = {"interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0, "biased": True}


def make(tokens=96, rows=520, depth=128, width=256, dtype=jnp.bfloat16, biased=False, **options):
    columns = 2 * width if options.get("gated", True) else width
    return GatedGroupedMatmul(
        lhs=SHAPE((tokens, depth), dtype),
        rhs=SHAPE((5, columns, depth) if options.get("transpose_rhs") else (5, depth, columns), dtype),
        group_sizes=SHAPE((5,), jnp.int32),
        indices=None if rows is None else SHAPE((rows,), jnp.int32),
        rhs_bias=SHAPE((5, 1, columns), dtype) if biased else None,
        left_over="zero",
        **options,
    )


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({}, TILES[0]),  # gathered rows, tiles that may be split
        ({"tokens": 520, "rows": None, "width": 192, "activation": "gelu"}, TILES[0]),  # a last tile of 64 columns
        ({"dtype": jnp.float16}, ALONE[0]),
        ({"tokens": 3, "rows": 1}, ALONE[0]),  # padded rows
        ({"tokens": 3, "rows": None}, ALONE[0]),
        ({"width": 64}, next(params for params in TILES if params.block_n == 64)),
        ({"biased": True, "width": 192}, TILES[0]),
        (GPT_OSS, TILES[0]),  # halves of tiles, of interleaved columns
        ({**GPT_OSS, "tokens": 520, "rows": None, "width": 192, "dtype": jnp.float16}, ALONE[0]),
        ({**GPT_OSS, "transpose_rhs": True}, TILES[0]),
        ({"transpose_rhs": True, "width": 192}, TILES[0]),
        ({"gated": False, "activation": "relu2", "width": 320}, WHOLE[0]),
        ({"gated": False, "activation": "silu", "biased": True, "transpose_rhs": True}, WHOLE[-1]),
    ],
    ids=str,
)
def test_a_call_lowers_to_one_kernel(fields, params):
    record = make(**fields)
    assert not gated_refusal_reasons(record)
    traced = jax.jit(lambda record: gated_forward(record, params)[0]).trace(record)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1
    output = traced.out_info
    width = columns(record) // 2 if record.gated else columns(record)
    rows = (record.lhs if record.indices is None else record.indices).shape[0]
    assert (output.shape, output.dtype) == ((rows, width), record.lhs.dtype)


@pytest.mark.parametrize("params", [*TILES, *ALONE], ids=str)
def test_candidates_fit_into_shared_memory_and_registers(params):
    made = spec.make_gated_spec(make(), params)
    assert (
        spec.shared_memory_bytes(dataclasses.replace(made.tile, block_n=2 * params.block_n))
        <= SHARED_MEMORY_BYTES - spec.RESERVED_SMEM_BYTES
    )
    multiplying, fetching = made.registers_per_thread
    assert 128 * (spec.CONSUMER_WARPGROUPS * multiplying + fetching) <= 65536


@pytest.mark.parametrize(
    ("name", "value"), [("block_n", 256), ("stages", 1), ("stages", 9), ("group_m", 0), ("output_buffers", 0)]
)
def test_invalid_tile_fields_are_errors(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        spec.make_gated_spec(make(), dataclasses.replace(TILES[0], **{name: value}))


@pytest.mark.parametrize(("gated", "block_n"), [(True, 256), (False, 64)])
def test_block_n_other_than_the_supported_ones_is_an_error(gated, block_n):
    record = make(gated=gated)
    with pytest.raises(ValueError, match=f"block_n={block_n}"):
        spec.make_gated_spec(record, dataclasses.replace(TILES[0], block_n=block_n))
    assert {params.block_n for params in config.gated_candidates(record, None, "forward")} == (
        {64, 128} if gated else {128, 256}
    )


def test_two_shuffles_give_each_thread_its_pair_of_output_columns():
    """A thread of four has columns 2 q and 2 q + 1 of every eight; of interleaved sums, that is one output each."""
    sums = np.arange(16)  # the number of a column of pairs; the gate of output n is column 2 n
    blocks = sums.reshape(2, 4, 2)  # blocks of eight columns, lanes, and their two columns
    words = blocks[:, :, 0].T // 2  # lane q: output of the lower block, and of the upper block
    outputs = []
    for lane in range(4):
        sources, selector = gating.quad_source_lanes(lane)
        half = {gating.SELECT_LOW_HALVES: 0, gating.SELECT_HIGH_HALVES: 1}[selector]
        outputs += [words[source][half] for source in sources]
    np.testing.assert_array_equal(outputs, np.arange(8))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (make(), []),
        (make(rows=513), []),
        (make(rows=120), []),
        (make(depth=100), ["contracted axis of lhs has 100"]),
        (make(width=96), ["96 output columns"]),
        (make(tokens=2**26, depth=512), ["rows can be gathered"]),
    ],
)
def test_unsupported_records_are_refused_with_a_reason(record, words):
    found = gated_refusal_reasons(record)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


def test_a_refusal_counts_output_columns_with_and_without_transpose_and_gate():
    assert gated_refusal_reasons(make(width=96, depth=64, transpose_rhs=True)) == [
        "rhs gives 96 output columns; the kernel wants a multiple of 64"
    ]
    assert not gated_refusal_reasons(make(width=192, gated=False, activation="relu2"))


@pytest.mark.parametrize(("rows", "single_warpgroup"), [(520, False), (320, True)])
def test_small_groups_prefer_a_tile_with_a_single_warpgroup(rows, single_warpgroup):
    found = config.gated_candidates(make(rows=rows), None, "forward")
    assert found[0].single_warpgroup is single_warpgroup
    assert config.gated_heuristic(make(rows=rows), None, "forward") == found[0]


@pytest.mark.parametrize("half", [-1, 0, 1])
def test_panels_of_gate_and_factor_alternate_in_a_stage(half, monkeypatch):
    """Every block of 64 columns has both; half a tile has its own, and arrives for the others."""
    copied, arrived = [], []
    monkeypatch.setattr(panels.plgpu, "copy_gmem_to_smem", lambda source, target, full: copied.append((source, target)))
    monkeypatch.setattr(panels.plgpu, "barrier_arrive", lambda full: arrived.append(full))
    monkeypatch.setattr(panels.pl, "when", lambda there: lambda run: run() if bool(there) else None)
    made = spec.make_gated_spec(make(), TILES[0])
    assert made.may_split_last_tiles

    class Recorded:
        def __getitem__(self, place):
            return place

    ref = types.SimpleNamespace(at=Recorded())
    shared = types.SimpleNamespace(operands_full=ref, b=ref)
    call = types.SimpleNamespace(spec=made, shared_memory=shared, operands={"rhs": ref})
    tile = types.SimpleNamespace(first_column=128, column_half=jnp.int32(half), matrix_index=3)
    panels.copy_gate_panels(call, tile, "inner", 1)
    begins = [int(source[2].start) for source, _ in copied]
    first = 128 + 64 * max(half, 0)
    assert begins == [first, first + 256, first + 64, first + 256 + 64][: 4 if half < 0 else 2]
    assert [target for _, target in copied] == [(1, n) for n in range(len(begins))]
    assert len(copied) + len(arrived) == made.panels_per_stage


@pytest.mark.parametrize(
    ("fields", "slices"),
    [
        ({"interleaved": True}, [(slice(32, 96), slice(2 * 128 + 64 * n, 2 * 128 + 64 * n + 64)) for n in range(4)]),
        (
            {"transpose_rhs": True},
            [(slice(c, c + 64), slice(32, 96)) for c in (128, 128 + 256, 192, 192 + 256)],
        ),
        (
            {"transpose_rhs": True, "interleaved": True},
            [(slice(c, c + 64), slice(k, k + 64)) for c in (128, 192) for k in (32, 128 + 32)],
        ),
        (
            {"gated": False},
            [(slice(32, 96), slice(128 + 64 * n, 128 + 64 * n + 64)) for n in range(4)],
        ),
    ],
    ids=["interleaved", "columns first", "interleaved, columns first", "no gate"],
)
def test_each_matrix_layout_copies_the_right_panels(fields, slices, monkeypatch):
    copied = []
    monkeypatch.setattr(panels.plgpu, "copy_gmem_to_smem", lambda source, target, full: copied.append(source))
    monkeypatch.setattr(panels.pl, "when", lambda there: lambda run: run() if bool(there) else None)
    params = TILES[0] if fields.get("gated", True) else WHOLE[0]
    made = spec.make_gated_spec(make(**fields), params)

    class Recorded:
        def __getitem__(self, place):
            return place

    ref = types.SimpleNamespace(at=Recorded())
    call = types.SimpleNamespace(
        spec=made, shared_memory=types.SimpleNamespace(operands_full=ref, b=ref), operands={"rhs": ref}
    )
    panels.copy_gate_panels(
        call, types.SimpleNamespace(first_column=128, column_half=jnp.int32(-1), matrix_index=3), 32, 1
    )
    found = [tuple(slice(int(axis.start), int(axis.start) + axis.size) for axis in source[1:]) for source in copied]
    assert found == slices
