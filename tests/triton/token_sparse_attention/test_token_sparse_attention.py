"""Token-sparse attention in Triton: its numbers in the interpreter, its sums by key, and what its kernels take of a
chip.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_chips import CHIPS, assert_conforms, assert_fits, assert_fits_and_spills_nothing, on_chips, run_interpreted

from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.ops import chips
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback
from ejkernel_triton import ahead, launch
from ejkernel_triton.token_sparse_attention import config, plan, shared_memory_refusal_reasons
from ejkernel_triton.token_sparse_attention.backward import backward
from ejkernel_triton.token_sparse_attention.forward import forward
from ejkernel_triton.token_sparse_attention.spec import key_tile_columns

VALUES = "test_value and not shapes and not residuals and not eager"
GRADIENTS = "test_gradients and not determinism"
VMAP = "test_vmap and sinks"
KERNELS = {"sparse_fwd_kernel", "sparse_bwd_dq_kernel", "sparse_bwd_dkdv_kernel", "sum_listed_rows_kernel"}

GROUPED = {"heads": 64, "kv_heads": 4, "head_dim": 128, "value_size": 128}
LATENT = {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_size": 512, "has_value": False}
FEW_LATENT_HEADS = {**LATENT, "heads": 16}
FLOAT32 = {**GROUPED, "dtype": jnp.float32}


def test_conformance():
    # Pages of FP8 are served elsewhere.
    assert_conforms(("token_sparse_attention",), f"(({VALUES}) or ({GRADIENTS}) or ({VMAP})) and not fp8")


def test_awkward_sizes_in_the_interpreter():
    assert run_interpreted("token_sparse_attention/sparse_process.py").count("same") == 3


@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [(576, (512, 64)), (128, (128, 0)), (192, (128, 64)), (48, (32, 16)), (20, (32, 0)), (1, (16, 0))],
)
def test_a_head_dim_is_cut_into_two_powers_of_two_where_one_would_pad_more(head_dim, columns):
    assert key_tile_columns(head_dim) == columns


def test_entries_are_ordered_by_key_then_by_query_and_empty_ones_come_last():
    rng, keys = np.random.default_rng(0), 7
    indices = rng.integers(-1, keys, (2, 5, 3, 4)).astype(np.int32)
    entries, bounds = map(np.asarray, plan.order_entries_by_key(jnp.asarray(indices), keys))
    assert entries.shape == (2, 3, 20)
    for b, head in np.ndindex(2, 3):
        listed, ordered, starts = indices[b, :, head].reshape(-1), entries[b, head], bounds[b, head]
        for key in range(keys):
            assert ordered[starts[key] : starts[key + 1]].tolist() == np.nonzero(listed == key)[0].tolist()
        assert starts.tolist() == [((listed >= 0) & (listed < key)).sum() for key in range(keys + 1)]


def test_gradients_of_entries_of_one_chunk_fit_their_share_of_memory():
    record = make_record(**LATENT, tokens=4096)
    chunk = plan.queries_per_chunk(record, 576)
    assert 1 < chunk < 4096
    assert chunk * record.indices.shape[3] * 576 * 2 <= plan.MAX_CHUNK_BYTES


def make_record(*, heads, kv_heads, head_dim, value_size, has_value=True, dtype=jnp.bfloat16, tokens=1024):
    """A record whose arrays are shapes: `tokens` queries list 2048 of 4096 keys each."""
    shape = jax.ShapeDtypeStruct
    return TokenSparseAttention(
        query=shape((1, tokens, heads, head_dim), dtype),
        key=shape((1, 4096, kv_heads, head_dim), dtype),
        indices=shape((1, tokens, 1, 2048), jnp.int32),
        softmax_scale=0.1,
        value_size=value_size,
        value=shape((1, 4096, kv_heads, value_size), dtype) if has_value else None,
    )


def launches(chip, sizes):
    """What both passes of a record launch on a chip with the default tiles."""
    device, record = CHIPS[chip], make_record(**sizes)
    fields = frozenset({"query", "key"} if record.value is None else {"query", "key", "value"})

    def run(record):
        output, residuals = forward(record, config.heuristic(record, device, "forward"))
        pullback = Pullback(
            record=record,
            residuals=SoftmaxResiduals(lse=residuals.lse),
            output=output,
            cotangent=output,
            grad_fields=fields,
        )
        return backward(pullback, config.heuristic(record, device, "backward"))

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(run, record)
    return calls


@pytest.mark.parametrize(("sizes", "chip"), [pytest.param(GROUPED, chip, id=f"grouped-{chip}") for chip in CHIPS])
def test_default_tiles_of_grouped_heads_fit_the_chip_and_spill_nothing(sizes, chip):
    calls = launches(chip, sizes)
    assert {call.kernel.__name__ for call in calls} == KERNELS
    assert_fits_and_spills_nothing(calls, chip)


WIDE = {"latent": LATENT, "few latent heads": FEW_LATENT_HEADS, "float32": FLOAT32}


@pytest.mark.parametrize(
    ("name", "chip"),
    [*on_chips(list(WIDE), [chip for chip in CHIPS if chip != "gfx942"]), ("float32", "gfx942")],
)
def test_default_tiles_of_wide_rows_fit_the_chip(name, chip):
    """Their accumulators take all registers; docs/lab/token_sparse_attention_gpu.md says how much is spilled."""
    calls = launches(chip, WIDE[name])
    assert {call.kernel.__name__ for call in calls} == KERNELS
    assert_fits(calls, chip)


def test_rows_that_shared_memory_cannot_hold_are_refused_by_their_sizes():
    with target_device(CHIPS["gfx942"]):
        (reason,) = shared_memory_refusal_reasons(make_record(**LATENT))
    assert reason.startswith("keys of 576 and values of 512 entries take")
    assert reason.endswith("gfx942 has 65536")
    with target_device(CHIPS["sm_90"]):
        assert not list(shared_memory_refusal_reasons(make_record(**LATENT)))


@pytest.mark.parametrize("chip", ["sm_80", "sm_120"])
def test_latent_rows_of_float32_are_refused_where_they_do_not_fit(chip):
    with target_device(CHIPS[chip]):
        (reason,) = shared_memory_refusal_reasons(make_record(**LATENT, dtype=jnp.float32))
    assert str(chips.GPUS[chip].shared_memory) in reason


def test_columns_of_many_kv_heads_are_summed_by_several_programs():
    many_heads = {"heads": 128, "kv_heads": 128, "head_dim": 192, "value_size": 128}
    sums = [x for x in launches("sm_90", many_heads) if x.kernel.__name__ == "sum_listed_rows_kernel"]
    assert [x.grid for x in sums] == [4096 * 6, 4096 * 4]
    assert_fits_and_spills_nothing(sums, "sm_90")


def test_xla_is_chosen_before_kernels_that_spill_and_for_a_single_query():
    (triton,) = (x for x in registry().implementations["token_sparse_attention"] if x.name == "triton")
    priorities = [
        triton.priority(make_record(**sizes), CHIPS["sm_90"], "forward")
        for sizes in (GROUPED, LATENT, FLOAT32, {**LATENT, "dtype": jnp.float32}, {**LATENT, "tokens": 1})
    ]
    assert priorities == [10, 10, 10, -1, -1]


def test_sizes_that_tiles_cannot_have_are_refused_by_name():
    with pytest.raises(ValueError, match="block_kv: got 48, wants a power of two"):
        config.SparseForward(heads=16, block_kv=48, num_warps=4, num_stages=2)


def test_hopper_kernels_use_wgmma_for_latent_rows():
    (call,) = (x for x in launches("sm_90", LATENT) if x.kernel.__name__ == "sparse_fwd_kernel")
    assert "wgmma" in ahead.compile_for_chip(call, "sm_90").assembly
