"""Linear recurrences in Triton: their numbers in the interpreter, and what the kernels take of a chip."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from gradients_of import gradients_of
from triton_chips import (
    CHIPS,
    H200,
    assert_conforms,
    assert_fits,
    assert_fits_and_spills_nothing,
    on_chips,
    run_interpreted,
)

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops import dispatch
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import tracing_differentiated_call
from ejkernel_triton import ahead, launch
from ejkernel_triton.linear_recurrence import config as recurrence_config
from ejkernel_triton.linear_recurrence.chunked import config as chunked_config
from ejkernel_triton.linear_recurrence.chunked.backward import backward
from ejkernel_triton.linear_recurrence.chunked.forward import forward
from ejkernel_triton.linear_recurrence.delta import backward as delta_backward
from ejkernel_triton.linear_recurrence.delta import config as delta_config
from ejkernel_triton.linear_recurrence.delta import forward as delta_forward

VALUES = "(test_value and not shapes and not residuals and not eager)"
GRADIENTS = "test_gradients"
GATED = ("gated_linear_attention",)
# Gradients show the numbers of both passes.
PARTS = {
    "one operation": (
        GATED,
        f"{GRADIENTS} or test_gives_gradient or test_padding or (packed and ({VALUES} or test_vmap or test_request))",
    ),
    "gradients of others": (("recurrent_attention", "lightning_attention", "state_space_v2"), GRADIENTS),
}


@pytest.mark.parametrize("part", PARTS)
def test_conformance(part):
    ops, tests = PARTS[part]
    assert_conforms(ops, tests, serves_all=False)


def test_conformance_of_the_delta_rule():
    ops = ("ragged_gated_delta_rule", "gated_delta_rule", "kernel_delta_attention")
    tests = f"(ragged and ({VALUES} or test_request)) or (not ragged and {GRADIENTS})"
    assert_conforms(ops, f"test_gives_gradient or (({tests}) and not bfloat16)", "triton_delta", serves_all=False)


def record_of(gates, dtype):
    """A call with gates of a kind."""
    batch, tokens, heads, size = 4, 4096, 16, 128

    def array(*sizes, of=jnp.float32):
        return jax.ShapeDtypeStruct((batch, tokens, *sizes), of)

    shared = gates == "state space"
    query = array(1 if shared else heads, size, of=dtype)
    fields = {"heads": {"decay": array(heads, 1)}, "channels": {"decay": array(heads, size)}, "none": {}}
    fields["state space"] = {
        "decay": array(heads, 1),
        "dt": array(heads),
        "skip": jax.ShapeDtypeStruct((1, 1, heads), jnp.float32),
    }
    value = array(heads, 64 if shared else size, of=dtype)
    return LinearRecurrence(query=query, key=query, value=value, softmax_scale=0.1, **fields[gates])


def launches(device, gates, dtype=jnp.bfloat16):
    """What both passes launch for such a call."""
    return launches_of(record_of(gates, dtype), device)


def launches_of(record, device):
    """What both passes of a record launch."""
    names = ("query", "key", "value", "decay", "dt", "skip")
    wanted = [name for name in names if getattr(record, name) is not None]
    chosen = chunked_config.heuristic(record, device, "forward")

    def run(record):
        with tracing_differentiated_call():
            results = forward(record, chosen)
        return gradients_of(record, results, backward, chosen, wanted)

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: run(record), record)
    return calls


@pytest.mark.parametrize(
    ("chip", "gates"), [*((chip, "channels") for chip in CHIPS), ("sm_90", "heads"), ("sm_90", "state space")]
)
def test_default_tiles_fit_the_chip_and_spill_nothing(chip, gates):
    calls = launches(CHIPS[chip], gates)
    made = {call.kernel.__name__ for call in calls}
    assert made >= {"chunk_local_cumsum_kernel", "chunk_fwd_h_kernel", "chunk_bwd_dv_kernel", "chunk_bwd_dqkg_kernel"}
    assert ("chunk_fwd_intra_kernel" in made) == (gates == "channels")
    assert ("fused_chunk_scan_kernel" in made, "chunk_fwd_o_kernel" in made) == (gates == "heads", gates != "heads")
    spills = (chip, gates) == ("sm_90", "channels")  # faster than what does not
    assert_fits_and_spills_nothing(
        [c for c in calls if not spills or c.kernel.__name__ != "chunk_bwd_dqkg_kernel"], chip
    )


def one_row(record, tokens=4096):
    """A call with the fields of a record, and a single row."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, tokens, *x.shape[2:]), x.dtype), record)


def test_the_fused_scan_is_the_default_where_it_fills_the_chip():
    record = record_of("heads", jnp.bfloat16)
    state = jax.ShapeDtypeStruct((4, 16, 128, 128), jnp.float32)
    assert chunked_config.heuristic(record, H200, "forward").fused
    assert chunked_config.heuristic(dataclasses.replace(record, initial_state=state), H200, "forward").fused
    packed = dataclasses.replace(one_row(record), cu_seqlens=jax.ShapeDtypeStruct((9,), jnp.int32))
    assert chunked_config.heuristic(packed, H200, "forward").fused
    few = dataclasses.replace(packed, cu_seqlens=jax.ShapeDtypeStruct((2,), jnp.int32))
    assert not chunked_config.heuristic(few, H200, "forward").fused
    assert not chunked_config.heuristic(record, CHIPS["sm_80"], "forward").fused


def delta_record(gates):
    """A call of a delta rule with gates of a kind."""
    query, beta = (jax.ShapeDtypeStruct((4, 4096, 16, *rest), jnp.bfloat16) for rest in ((128,), ()))
    widths = {"none": 0, "heads": 1, "channels": 128}
    decay = jax.ShapeDtypeStruct((4, 4096, 16, widths[gates]), jnp.float32) if widths[gates] else None
    return LinearRecurrence(query=query, key=query, value=query, softmax_scale=0.1, decay=decay, beta=beta)


DELTA_TILES = (*on_chips(("heads", "channels")), ("none", "sm_90"))
SPILLS = {
    ("sm_80", "channels"): {"chunk_bwd_dqkwg_kernel"},
    ("sm_90", "channels"): {"chunk_bwd_dqkwg_kernel", "wy_channel_gates_kernel"},
    ("sm_120", "channels"): {"chunk_bwd_dqkwg_kernel"},
}
"""Kernels that spill whatever their tiles, or on sm_90 are faster with those that do."""


@pytest.mark.parametrize(("gates", "chip"), DELTA_TILES)
def test_the_delta_rule_fits_the_chip_and_spills_nothing(gates, chip):
    record = delta_record(gates)
    calls = delta_launches(record, chip, delta_config.heuristic(record, CHIPS[chip], "both"))
    made = {call.kernel.__name__ for call in calls}
    inside = {"wy_channel_gates_kernel"} if gates == "channels" else {"wy_fast_kernel"}
    assert inside | {"chunk_fwd_h_kernel", "chunk_bwd_dhu_kernel", "chunk_bwd_dqkwg_kernel"} <= made
    scans = (chip, gates) == ("sm_90", "channels")
    assert ("fused_chunk_scan_kernel" in made, "chunk_fwd_o_kernel" in made) == (scans, not scans)
    assert_fits_and_spills_nothing([c for c in calls if c.kernel.__name__ not in SPILLS.get((chip, gates), ())], chip)


@pytest.mark.parametrize("gates", ["heads", "channels"])
def test_packed_scans_fit_the_chip_and_spill_nothing(gates):
    record = dataclasses.replace(one_row(delta_record(gates)), cu_seqlens=jax.ShapeDtypeStruct((17,), jnp.int32))
    chosen = delta_config.heuristic(record, H200, "both")
    assert chosen.fused
    assert chosen.fused_block_v == 64
    made = {call.kernel.__name__: call for call in delta_launches(record, "sm_90", chosen)}
    assert_fits_and_spills_nothing(
        [made[name] for name in ("chunk_tables_kernel", "fused_chunk_scan_kernel", "zero_padding_kernel")], "sm_90"
    )


def delta_launches(record, chip, chosen):
    """What both passes of a delta rule launch."""
    names = ("query", "key", "value", "decay", "beta")
    wanted = [name for name in names if getattr(record, name) is not None]

    def run(record):
        results = delta_forward.forward(record, chosen)
        return gradients_of(record, results, delta_backward.backward, chosen, wanted)

    with target_device(CHIPS[chip]), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: run(record), record)
    return calls


def test_a_program_of_the_delta_rule_adds_up_gradients_of_shared_keys():
    """One float32 gradient per value head, and half of the channels per program, took 1.14 of unshared heads' time."""
    full = delta_record("heads")
    narrow = jax.ShapeDtypeStruct((4, 4096, 8, 128), jnp.bfloat16)
    shared, kernels = dataclasses.replace(full, query=narrow, key=narrow), {}
    for name, record in (("full", full), ("shared", shared)):
        calls = delta_launches(record, "sm_90", delta_config.heuristic(record, H200, "both"))
        kernels[name] = next(call for call in calls if call.kernel.__name__ == "chunk_bwd_dqkwg_kernel")
    assert kernels["shared"].constants["BLOCK_K"] == kernels["full"].constants["BLOCK_K"]
    assert kernels["full"].outputs[:2] == (full.query, full.query)
    assert kernels["shared"].outputs[:2] == (narrow, narrow)
    assert kernels["shared"].grid == kernels["full"].grid // 2


def test_gradients_of_queries_and_keys_that_groups_of_heads_share():
    """8 heads share 4 queries and 2 keys, so that a group of 2 has one of each; then 2 queries and 1 key, in groups of
    4.
    """
    run_interpreted("linear_recurrence/delta_shared_heads_process.py")


def test_few_programs_of_the_delta_rule_have_one_head_each():
    query, value = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (1, 4))
    beta, decay = (jax.ShapeDtypeStruct((1, 256, 4, *rest), jnp.float32) for rest in ((), (1,)))
    record = LinearRecurrence(query=query, key=query, value=value, softmax_scale=0.1, decay=decay, beta=beta)
    calls = delta_launches(record, "sm_90", delta_config.heuristic(record, H200, "both"))
    kernel = next(call for call in calls if call.kernel.__name__ == "chunk_bwd_dqkwg_kernel")
    assert kernel.constants["HEADS_PER_PROGRAM"] == 1
    assert kernel.outputs[0] == jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.float32)


@pytest.mark.parametrize("gates", ["heads", "channels", "none"])
def test_dispatch_chooses_the_delta_kernels_for_both_passes(gates):
    found = dispatch.choose(registry().ops["kernel_delta_attention"], delta_record(gates), H200, "auto", "backward")
    names = [verdict.implementation.name for verdict in found.verdicts]
    assert names.index("triton_delta") < names.index("xla")
    # A toolchain that is not installed refuses too; the call itself must not.
    reasons = found.verdicts[names.index("triton_delta")].reasons
    assert all(reason.startswith("module") for reason in reasons)


def test_a_short_delta_rule_with_gates_of_channels_is_not_miscompiled():
    """With Triton 3.6 chunks of 16 tokens have them, and an H200 gives wrong numbers."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    query, beta, decay = shape((1, 11, 4, 8)), shape((1, 11, 4)), shape((1, 11, 4, 8))
    record = LinearRecurrence(query=query, key=query, value=query, softmax_scale=0.3, decay=decay, beta=beta)
    chosen = delta_config.heuristic(record, H200, "forward")
    with target_device(H200), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: delta_forward.forward(record, chosen), record)
    for call in calls:
        assert call.constants["spec"].CHUNK_SIZE == 2 * recurrence_config.MIN_TILE
        assert not ahead.miscompiled_shifts(ahead.compile_for_chip(call, "sm_90").assembly)


def test_a_product_that_reaches_into_the_other_lane_is_found_as_miscompiled():
    right = "mul.wide.u32 \t%rd1, %r1, 4;\n\tadd.s64 \t%rd2, %rd9, %rd1;\n\tor.b64 \t%rd3, %rd2, %rd1;\n"
    wrong = """
	mul.wide.u32 	%rd17, %r1, 268435456;
	shl.b64 	%rd19, %rd18, 33;
	or.b64 	%rd20, %rd17, %rd19;
	mov.b64 	{_, %r11}, %rd20;
"""
    assert ahead.miscompiled_shifts(right) == []
    assert ahead.miscompiled_shifts(wrong) == ["or.b64 %rd20, %rd17, %rd19"]


def test_repeated_keys_keep_the_precision_of_the_inverse():
    """Powers of the triangular matrix would grow beyond all digits: all keys are the same, and nothing decays."""
    run_interpreted("linear_recurrence/delta_process.py")


def test_gates_of_any_strength_are_exact():
    """Gates down to -inf give the numbers of a loop in float64, by the same instructions as mild ones."""
    run_interpreted("linear_recurrence/delta_gates_process.py")


@pytest.mark.parametrize("name", ["wy_channel_gates_kernel", "chunk_bwd_dqkwg_kernel"])
def test_no_branch_depends_on_the_gates(name):
    """One branch on a chunk's largest gate made KDA three times slower with the gates that it begins with."""
    record = delta_record("channels")
    calls = delta_launches(record, "sm_90", delta_config.heuristic(record, H200, "both"))
    assembly = ahead.compile_for_chip(next(c for c in calls if c.kernel.__name__ == name), "sm_90").assembly
    lines = assembly.splitlines()
    labels = {line.split(":")[0]: n for n, line in enumerate(lines) if re.match(r"\$L__BB\d+_\d+:", line)}
    branches = {n: re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\d+_\d+)", line) for n, line in enumerate(lines)}
    assert any(branches.values())
    # Loops alone: their trip counts are constants, and their branches go back.
    assert all(labels[found.group(1)] < n for n, found in branches.items() if found)


def test_segments_skip_chunks_whose_state_has_decayed():
    run_interpreted("linear_recurrence/chunks_until_decayed_process.py")


def test_tables_of_packed_sequences_are_those_of_xla():
    run_interpreted("linear_recurrence/chunk_tables_process.py")


def test_tokens_split_over_two_devices_match_xla_on_one_device():
    run_interpreted("linear_recurrence/split_tokens_process.py")


def test_float32_fits_the_chip():
    assert_fits(launches(H200, "channels", jnp.float32), "sm_90")


def test_hopper_kernels_use_wgmma():
    for call in launches(H200, "channels"):
        if call.kernel.__name__ != "chunk_local_cumsum_kernel":
            assert "wgmma" in ahead.compile_for_chip(call, "sm_90").assembly, call.kernel.__name__


def test_heuristics_choose_segments_for_few_rows_and_heads():
    record, delta_rule = record_of("heads", jnp.bfloat16), delta_record("channels")
    assert chunked_config.heuristic(record, H200, "forward").segments == 1
    assert delta_config.heuristic(delta_rule, H200, "forward").segments == 1
    found = chunked_config.heuristic(one_row(record, 65536), H200, "forward")
    assert found.segments > 1
    assert found.fused
    found = delta_config.heuristic(one_row(delta_rule, 65536), H200, "forward")
    assert found.segments > 1
    assert found.fused


def test_segments_of_the_delta_rule_fit_the_chip_and_spill_nothing():
    record = one_row(delta_record("channels"), 65536)
    with tracing_differentiated_call():
        calls = delta_launches(record, "sm_90", delta_config.heuristic(record, H200, "both"))
    states = [call for call in calls if call.kernel.__name__ == "chunk_fwd_h_kernel"]
    # Ends and transitions of segments, then the states, which the backward pass reads too.
    assert [call.constants["COMPUTE_TRANSITIONS"] for call in states] == [True, False]
    starts = [call for call in calls if call.kernel.__name__ == "delta_initial_states_kernel"]
    assert [call.constants["REVERSE"] for call in starts] == [False, True]
    decay_launches = [call for call in calls if call.kernel.__name__ == "chunks_until_decayed_kernel"]
    assert [call.constants["REVERSE"] for call in decay_launches] == [False, True]
    assert_fits_and_spills_nothing([*states, *starts, *decay_launches], "sm_90")


def test_initial_states_of_segments_take_one_launch():
    record = one_row(record_of("heads", jnp.bfloat16), 65536)
    made = {call.kernel.__name__: call for call in launches_of(record, H200)}
    assert_fits_and_spills_nothing([made["decayed_initial_states_kernel"]], "sm_90")


def test_a_delta_rule_that_is_differentiated_stores_what_its_gradients_read():
    record = delta_record("channels")
    chosen = delta_config.heuristic(record, H200, "both")
    assert chosen.fused
    with tracing_differentiated_call():
        made = [call.kernel.__name__ for call in delta_launches(record, "sm_90", chosen)]
    assert "fused_chunk_scan_kernel" not in made
    assert made.count("chunk_fwd_h_kernel") == 1
