"""Latent attention in Mosaic GPU, lowered for CUDA without a GPU; its plan; and what it refuses."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families import tiled_attention
from ejkernel.families.paged_attention import PagedAttention, latent_pages
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.mla_decode import MLADecodeArguments, finish, lower
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.plugins import registry
from ejkernel_pallas.gpu.hopper import wgmma
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY_BYTES
from ejkernel_pallas.gpu.latent_attention import config, forward, implementations, plan, spec
from ejkernel_pallas.gpu.latent_attention.kernels import latent_attention, schedule, split_combine

SHAPE = jax.ShapeDtypeStruct
PARAMS = config.HopperLatent(num_programs=132)
KERNELS = 3
"""The plan, the kernel, and the merging of parts."""


def make(rows=4, heads=128, page=64, dense=False, dtype=jnp.bfloat16, lanes=640, latent=(512, 512), lens=None):
    sequences = rows if lens is None else len(lens)
    return PagedAttention(
        query=SHAPE((rows, heads, latent[0] + 64), dtype),
        key_pages=SHAPE((sequences if dense else 32, page, lanes), dtype),
        value_pages=None,
        block_tables=None if dense else SHAPE((sequences, 8), jnp.int32),
        kv_lens=SHAPE((sequences,), jnp.int32) if lens is None else jnp.array(lens, jnp.int32),
        query_start=None,
        softmax_scale=0.07,
        kv_layout="psd",
        kv_heads=None,
        latent=latent,
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"page": 16}, {"heads": 80, "page": 8}, {"dense": True, "page": 304}, {"dtype": jnp.float16, "page": 256}],
    ids=str,
)
def test_a_call_lowers(fields):
    record = make(**fields)
    traced = jax.jit(lambda record: forward.forward(record, PARAMS)[0]).trace(record)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == KERNELS
    assert text.count("stablehlo.optimization_barrier") == 2, "XLA fuses what is not kept apart with slices"
    output, lse = traced.out_info
    assert (output.shape, output.dtype) == ((4, record.query.shape[1], 512), record.query.dtype)
    assert lse.shape == record.query.shape[:2]


@pytest.mark.parametrize("heads", [8, 16, 40])
def test_padding_rows_are_not_stored_if_store_padding_is_false(heads):
    params = dataclasses.replace(PARAMS, store_padding=False)
    traced = jax.jit(lambda record: forward.forward(record, params)[0]).trace(make(heads=heads))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == KERNELS
    device = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
    assert spec.make_spec(make(heads=heads), params, 512).stored_rows_per_tile == heads
    assert params in config.candidates(make(heads=heads), device, "forward")
    assert params not in config.candidates(make(heads=64), device, "forward")


def test_no_piece_of_a_product_starts_with_a_chunk_in_registers():
    assert spec.CHUNKS_PER_HALF % spec.PIECES_PER_HALF == 0
    assert all(
        chunk % (spec.CHUNKS_PER_HALF // spec.PIECES_PER_HALF) or chunk == 2 * spec.CHUNKS_PER_HALF
        for chunk in latent_attention.REGISTER_CHUNK_INDICES
    )


@pytest.mark.parametrize("in_registers", [False, True])
def test_products_with_values_have_one_instruction_per_16_keys(in_registers):
    chunk = 64 * 128 // 16 << 16
    offsets = [chunk + step * 16 * 128 // 16 for step in range(4)]
    code = wgmma._accumulation_ptx(256, "bf16", offsets, b_is_transposed=True, a_is_in_registers=in_registers)
    # The place of B is the last operand, behind sums, the sums before, and four registers of A for each instruction.
    place = 256 + (16 if in_registers else 1)
    places = re.findall(r"add.u32 place, \$(\d+), (\d+); mov.b64 right", code)
    assert places == [(str(place), str(offset)) for offset in offsets]
    assert code.count("m64n256k16.f32.bf16.bf16") == 4


def test_shared_memory_has_room_for_queries_and_two_blocks():
    tiles = 3 * spec.BLOCK_KV * (spec.LATENT_DIM + spec.ROTARY_DIM) * 2
    assert tiles + 2 * 2 * 64 * 4 + 1024 <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize("programs", [1, 3, 7, 40])
@pytest.mark.parametrize("lens", [[300, 0, 64, 129, 1, 700, 128, 127], [1000] * 13], ids=str)
def test_every_step_is_assigned_to_exactly_one_program(programs, lens):
    record = make(rows=len(lens), lens=lens, page=128)
    constants = spec.make_spec(record, config.HopperLatent(num_programs=programs * 2), 512)
    assert constants.num_programs == programs
    made = plan.make_schedule(record, constants)
    items, shares = np.asarray(made.items), np.asarray(made.program_starts)
    np.testing.assert_array_equal(items[:, 1], lens)
    np.testing.assert_array_equal(items[:, 3], np.maximum(-(-np.array(lens) // spec.KEYS_PER_STEP), 1))
    line = np.concatenate([np.full(steps, n) for n, steps in enumerate(items[:, 3])])
    assert shares[0, 1] == 0
    assert shares[-1, 1] == len(line)
    for (item, begin), end in zip(shares[:-1], shares[1:, 1], strict=True):
        assert begin == end or line[begin] == item
    # `split_combine` finds the programs of an item by this division.
    share = shares[1, 1]
    for _, _, start, steps, _ in items:
        first, last = start // share, (start + steps - 1) // share
        assert shares[first, 1] <= start < shares[first + 1, 1]
        assert shares[last, 1] < start + steps <= shares[last + 1, 1]


@pytest.mark.needs("gpu interpreter")
@pytest.mark.parametrize("fields", [{}, {"sliding_window": (60, 0)}, {"kv_starts": 5}], ids=str)
def test_the_planning_kernel_equals_the_plan_of_xla(fields, monkeypatch):
    plgpu = schedule.plgpu
    interpreted = functools.partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(plgpu, "kernel", interpreted)

    def load(ref, padded_size, layout):
        """As the kernel's, which is not interpreted: the last element again for all behind it."""
        return jnp.pad(ref[...], (0, padded_size - ref.shape[0]), mode="edge")

    monkeypatch.setattr(schedule, "_load_vector", load)
    lens = [300, 0, 64, 129, 1, 700, 128, 127, 520]
    starts = {"kv_starts": jnp.full(len(lens), fields["kv_starts"])} if "kv_starts" in fields else {}
    record = dataclasses.replace(make(rows=len(lens), lens=lens, page=128), **{**fields, **starts})
    constants = spec.make_spec(record, config.HopperLatent(num_programs=8), 512)
    for got, want in zip(
        schedule.make_schedule_in_kernel(record, constants), plan.make_schedule(record, constants), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("rows", "length", "cut"), [(128, 4096, False), (128, 100, False), (100, 4096, True), (1, 384, True)]
)
def test_program_shares_grow_within_the_limit_to_avoid_split_items(rows, length, cut):
    record = make(rows=rows, lens=[length] * rows, heads=128, page=512)
    shares = {}
    for max_growth_percent in (0, 6):
        constants = spec.make_spec(record, dataclasses.replace(PARAMS, max_growth_percent=max_growth_percent), 512)
        shares[max_growth_percent] = np.asarray(plan.make_schedule(record, constants).program_starts)
    steps = -(-length // spec.KEYS_PER_STEP)
    assert shares[6][-1, 1] == shares[0][-1, 1] == rows * steps
    assert (shares[6][:, 1] % steps).any() == cut
    assert 0 <= shares[6][1, 1] - shares[0][1, 1] <= 0.06 * shares[0][1, 1]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (make(), []),
        (make(page=16), []),
        (make(heads=68), ["68 heads"]),
        (make(page=4), ["page has 4"]),
        (make(page=96), ["page has 96"]),
        (make(dense=True, page=301), ["301 slots"]),
        (make(latent=(256, 256)), ["latent vectors have 256"]),
        (dataclasses.replace(make(), key_pages=SHAPE((32, 64, 640), jnp.float8_e4m3fn)), ["float8_e4m3fn"]),
    ],
)
def test_unsupported_records_are_refused_with_a_reason(record, words):
    found = list(spec.refusal_reasons(record))
    assert len(found) == len(words), found
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("op", "handles"),
    [("mla_decode", {"q_segment_ids"}), ("multi_latent_ragged_page_attention", {"latent"})],
)
def test_dispatch_chooses_the_kernel_for_latent_calls(op, handles):
    (own,) = {one.priority for one in implementations()}
    others = [
        one.invariant_priority if callable(one.priority) else one.priority  # the former is its greatest
        for one in registry().implementations[op]
        if one.name != "mosaic_gpu_latent" and handles <= one.requires.handles
    ]
    assert others
    assert own > max(others)


def decode_arguments(sizes, batch=2, length=4096, heads=64):
    """Arguments of `mla_decode` with one cache of 576 columns, or two of 512 and 64."""
    shapes = {
        "query": (batch, heads, 16 + 64),
        "latent_cache": (batch, length, sizes[0]),
        "rope_cache": (batch, length, *sizes[1:]),
        "w_kc": (512, 1, 16),
        "w_vc": (512, 1, 16),
    }
    given = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items() if len(shape) == 3}
    lengths = jnp.full((batch,), length - 3, jnp.int32)
    return MLADecodeArguments(**{"rope_cache": None, **given}, lengths=lengths, sliding_window=100)


INSTRUCTION = re.compile(r" = \w+\[([\d,]+)\]\S* ([a-z-]+)\(")
"""Of a compiled module: the shape of an array that it makes, and the operation."""


@pytest.mark.parametrize("sizes", [(576,), (512, 64)], ids=str)
def test_dense_caches_are_read_without_a_copy(sizes, monkeypatch):
    """XLA's own passes run on the program around the kernel; a callback that takes the same arrays stands for it."""

    def launch(body, operands, outputs, *rest):
        return tuple(jax.pure_callback(lambda *arrays: None, outputs, *operands.values()))

    def step(given):
        output, _ = forward.forward_dense_cache(lower(given), PARAMS)
        return finish(given, output)

    def update_in_place(body, operands, updated, blocks):
        shapes = {name: SHAPE(x.shape, x.dtype) for name, x in updated.items()}
        return jax.pure_callback(lambda *arrays: None, shapes, *operands.values(), *updated.values())

    monkeypatch.setattr(forward, "launch", launch)
    monkeypatch.setattr(split_combine, "update_in_place", update_in_place)
    monkeypatch.setattr(forward, "make_schedule_in_kernel", plan.make_schedule)
    given = decode_arguments(sizes)
    made, smallest = jax.jit(step).lower(given).compile().as_text(), given.latent_cache.size * sizes[-1] // sizes[0]
    found = {what for size, what in INSTRUCTION.findall(made) if math.prod(map(int, size.split(","))) >= smallest}
    assert "callback" in made
    assert found <= {"parameter", "get-tuple-element"}  # the latter of the kernel's own outputs


def test_output_columns_after_the_latent_vector_match_the_reference():
    keys = jax.random.split(jax.random.key(0), 2)
    record = TiledAttention(
        query=jax.random.normal(keys[0], (2, 1, 8, 576)),
        key=jax.random.normal(keys[1], (2, 24, 1, 576)),
        value=jax.random.normal(keys[1], (2, 24, 1, 576)),
        softmax_scale=0.05,
        q_segment_ids=jnp.zeros((2, 1), jnp.int32),
        kv_segment_ids=jnp.where(jnp.arange(24) < jnp.array([[20], [0]]), 0, -1),
        q_positions=jnp.array([[19], [-1]]),
        sliding_window=(9, 9),
    )
    want, residuals = tiled_attention.reference(record)
    padding = record.kv_segment_ids[..., None, None] < 0
    poisoned = dataclasses.replace(record, key=jnp.where(padding, jnp.nan, record.key))
    pages, _ = latent_pages.as_paged_record(poisoned)
    got = forward._rotary_output(pages, residuals.lse[:, :, 0])
    np.testing.assert_allclose(got, want[:, 0, :, 512:], atol=1e-5)


@pytest.mark.parametrize(("name", "value"), [("num_programs", 0), ("max_growth_percent", -1)])
def test_invalid_configuration_fields_are_errors(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        spec.make_spec(make(), dataclasses.replace(PARAMS, **{name: value}), 512)
