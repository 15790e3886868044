"""The selective scan's decode step: what its kernel takes of a chip, and whose memory it writes.

Its numbers are compared with those of `state_space_v1` in `linear_recurrence/test_decode.py`, as those of other steps.
"""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, H200, assert_fits_and_spills_nothing

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops import dispatch
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel_triton import launch
from ejkernel_triton.selective_scan.decode import config as decode_config
from ejkernel_triton.selective_scan.decode import forward as decode_forward


def record_of(tokens=1, packed=True, slots=100, state=jnp.float32, size=16):
    """A step of 64 sequences of 4096 channels."""
    sequences, channels, array = 64, 4096, jax.ShapeDtypeStruct
    rows = (1, sequences * tokens) if packed else (sequences, tokens)
    held = slots if packed and slots else sequences
    return SelectiveScan(
        x=array((*rows, channels), jnp.bfloat16),
        step=array((*rows, channels), jnp.bfloat16),
        decay=array((channels, size), jnp.float32),
        write=array((*rows, size), jnp.bfloat16),
        read=array((*rows, size), jnp.bfloat16),
        skip=array((channels,), jnp.float32),
        initial_state=array((held, channels, size), state),
        cu_seqlens=array((sequences + 1,), jnp.int32) if packed else None,
        state_slots=array((sequences,), jnp.int32) if packed and slots else None,
    )


def launched(record, device):
    """The launches of a step."""
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(
            lambda record: decode_forward.forward(record, decode_config.heuristic(record, device, "forward")), record
        )
    return calls


@pytest.mark.parametrize(
    ("chip", "options"),
    [*((chip, {}) for chip in CHIPS), ("sm_90", {"packed": False, "tokens": 8}), ("sm_90", {"size": 200})],
)
def test_the_kernel_fits_the_chip_and_spills_nothing(chip, options):
    (call,) = calls = launched(record_of(**options), CHIPS[chip])
    assert_fits_and_spills_nothing(calls, chip)
    assert len(call.aliases) == 1


@pytest.mark.parametrize("state", [jnp.float32, jnp.bfloat16])
def test_slots_are_updated_in_their_own_memory(state):
    (call,) = launched(record_of(state=state), H200)
    (source,) = call.aliases
    assert call.outputs[call.aliases[source]] == call.inputs[source]
    assert call.inputs[source].shape == (1, 100, 4096, 16)


def reasons(record):
    found = dispatch.choose(registry().ops["state_space_v1"], record, H200, "auto", "forward").verdicts
    return {v.implementation.name: v.reasons for v in found}["triton_decode"]


def test_calls_with_too_many_tokens_are_refused_by_argument_name():
    assert not any(r.startswith("hidden_states:") for r in reasons(record_of(tokens=5)))
    assert any(
        r.startswith("hidden_states: one of 64 packed sequences may have 449") for r in reasons(record_of(tokens=8))
    )
    assert any("at most 8 tokens per sequence" in r for r in reasons(record_of(tokens=9, packed=False)))


def test_decode_steps_have_priority_over_the_scan():
    found = registry().implementations["state_space_v1"]
    assert (
        max(found, key=lambda implementation: implementation.priority_for(record_of(tokens=5), H200)).name
        == "triton_decode"
    )
