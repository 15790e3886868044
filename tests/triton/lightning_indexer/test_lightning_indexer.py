"""The lightning indexer in Triton: what it selects in the interpreter, its chunks, and what its kernels take of a
chip.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, H200, assert_conforms, assert_fits, assert_fits_and_spills_nothing, run_interpreted

from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel.ops import chips
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel_triton import ahead, launch
from ejkernel_triton.lightning_indexer import _refusal_reasons, config, plan
from ejkernel_triton.lightning_indexer.forward import forward

SHAPE = jax.ShapeDtypeStruct
KERNELS = {
    "indexer_scores_kernel",
    "guess_threshold_kernel",
    "gather_candidates_kernel",
    "select_candidates_kernel",
    "sort_selected_kernel",
}
FEW = {"heads": 8, "size": 64, "top_k": 64}
"""A call whose kernels compile quickly."""


def make_record(*, heads=64, size=128, top_k=2048, dtype=jnp.bfloat16, tokens=4096, keys=32768, batch=1):
    """A record whose arrays are shapes; DeepSeek-V3.2's sizes by default."""
    return LightningIndexer(
        query=SHAPE((batch, tokens, heads, size), dtype),
        key=SHAPE((batch, keys, size), dtype),
        weights=SHAPE((batch, tokens, heads), jnp.float32),
        key_starts=SHAPE((1, tokens), jnp.int32),
        key_ends=SHAPE((1, tokens), jnp.int32),
        top_k=top_k,
        softmax_scale=0.1,
    )


def launches(chip, **sizes):
    """What a record launches on a chip with the default tiles, by kernel."""
    record = make_record(**sizes)
    with target_device(CHIPS[chip]), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, config.heuristic(record, CHIPS[chip], "forward")), record)
    return {call.kernel.__name__: call for call in calls}


def test_conformance():
    served = "not pages and not blocks"
    assert_conforms(
        ("lightning_indexer",), f"{served} and (test_value and not shapes and not eager or test_vmap and causal)"
    )


def test_every_way_to_candidates_in_the_interpreter():
    assert run_interpreted("lightning_indexer/indexer_process.py").count("same") == 3


@pytest.mark.parametrize("chip", CHIPS)
def test_default_tiles_fit_the_chip_and_spill_nothing(chip):
    calls = launches(chip, **FEW)
    assert calls.keys() == KERNELS
    assert_fits_and_spills_nothing(calls.values(), chip)


@pytest.mark.parametrize(("dtype", "chip"), [(jnp.bfloat16, "sm_90"), (jnp.float32, "sm_80"), (jnp.bfloat16, "gfx942")])
def test_scores_of_the_model_fit_the_chip(dtype, chip):
    call = launches(chip, dtype=dtype)["indexer_scores_kernel"]
    assert_fits([call], chip)
    record = make_record(dtype=dtype)
    bound = config.shared_memory_bytes(record, config.heuristic(record, CHIPS[chip], "forward"), chips.GPUS[chip])
    assert ahead.shared_memory_bytes(call, chip) <= bound


def test_hopper_scores_use_wgmma():
    assert "wgmma" in ahead.compile_for_chip(launches("sm_90")["indexer_scores_kernel"], "sm_90").assembly


def test_scores_of_a_chunk_fit_their_share_of_memory():
    with target_device(H200):
        assert plan.queries_per_chunk(make_record()) == 2048
        assert plan.queries_per_chunk(make_record(tokens=100)) == 100
        assert plan.queries_per_chunk(make_record(tokens=1, batch=64, keys=2**23)) == 1
        chunk = plan.queries_per_chunk(make_record(keys=131072 + 5))
        assert chunk * (131072 + 5) * 4 <= plan.MAX_SCORE_BYTES
    calls = launches("sm_90", keys=131072)
    assert calls["indexer_scores_kernel"].outputs[0].shape == (1, 512, 131072)


def test_few_queries_are_split_by_keys_to_fill_the_chip():
    few, many = (config.heuristic(make_record(tokens=t), H200, "forward") for t in (1, 4096))
    assert few.keys_per_program == config.MIN_KEYS_PER_PROGRAM
    assert many.keys_per_program == config.KEYS_PER_PROGRAM
    assert (few.block_q, many.block_q) == (1, 4)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"heads": 300}, "query: got 300 heads, the kernels have at most 256"),
        ({"top_k": 5000}, "top_k: got 5000, the kernels select at most 4096"),
    ],
)
def test_what_no_program_holds_is_refused_by_its_size(sizes, reason):
    with target_device(H200):
        assert list(_refusal_reasons(make_record(**sizes))) == [reason]
        assert not list(_refusal_reasons(make_record()))


def test_rows_that_shared_memory_cannot_hold_are_refused():
    with target_device(CHIPS["gfx942"]):
        (reason,) = _refusal_reasons(make_record(heads=256, size=256))
    assert reason.startswith("256 heads of 256 channels take up to")
    assert reason.endswith("gfx942 has 65536")


def test_candidates_fit_shared_memory():
    for chip, device in CHIPS.items():
        for heads, size, dtype in (
            (64, 128, jnp.bfloat16),
            (64, 128, jnp.float32),
            (32, 256, jnp.float16),
            (3, 20, jnp.float32),
        ):
            record = make_record(heads=heads, size=size, dtype=dtype)
            for choice in config.candidates(record, device, "forward"):
                assert config.shared_memory_bytes(record, choice, chips.GPUS[chip]) <= chips.GPUS[chip].shared_memory


def test_xla_is_chosen_first_for_a_single_query():
    (triton,) = (x for x in registry().implementations["lightning_indexer"] if x.name == "triton")
    sizes = ({"tokens": 1}, {"tokens": 1, "batch": 2}, {})
    assert [triton.priority(make_record(**x), H200, "forward") for x in sizes] == [-1, 10, 10]


def test_keys_of_eight_bits_are_multiplied_in_the_dtype_of_queries():
    record = dataclasses.replace(
        make_record(**FEW), key=SHAPE((1, 32768, 64), jnp.int8), key_scales=SHAPE((1, 32768), jnp.float32)
    )
    with target_device(H200), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, config.heuristic(record, H200, "forward")), record)
    assert calls[0].inputs[1].dtype == jnp.bfloat16
    assert_fits_and_spills_nothing(calls[:1], "sm_90")


def test_sizes_that_tiles_cannot_have_are_refused_by_name():
    chosen = config.heuristic(make_record(), H200, "forward")
    with pytest.raises(ValueError, match="block_kv: got 48, wants a power of two"):
        dataclasses.replace(chosen, block_kv=48)
