"""The selective scan in CUDA C++ on packed sequences, without a GPU: the shapes of its calls, and which are chosen."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.device import DeviceInfo
from ejkernel.types.pullback import Pullback
from ejkernel_cuda.selective_scan import backward as backward_pass
from ejkernel_cuda.selective_scan import config
from ejkernel_cuda.selective_scan import forward as forward_pass

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
SEQUENCES, TOKENS, CHANNELS, SIZE = 5, 130, 200, 13
GRADIENTS = frozenset({"x", "step", "decay", "write", "read", "skip", "initial_state"})


def record(slots=None):
    """A packed record; with slots, the states are in them."""
    shape = jax.ShapeDtypeStruct
    token, column = shape((1, TOKENS, CHANNELS), jnp.bfloat16), shape((1, TOKENS, SIZE), jnp.bfloat16)
    return SelectiveScan(
        x=token,
        step=token,
        decay=shape((CHANNELS, SIZE), jnp.float32),
        write=column,
        read=column,
        skip=shape((CHANNELS,), jnp.float32),
        initial_state=shape((slots or SEQUENCES, CHANNELS, SIZE), jnp.bfloat16 if slots else jnp.float32),
        cu_seqlens=shape((SEQUENCES + 1,), jnp.int32),
        state_slots=shape((SEQUENCES,), jnp.int32) if slots else None,
    )


def both(given):
    """Output, final states and all gradients of a record."""
    output, residuals = forward_pass.forward(given, config.heuristic(given, H200, "forward"))
    pullback = Pullback(record=given, residuals=residuals, output=None, cotangent=output, grad_fields=GRADIENTS)
    return output, backward_pass.backward(pullback, config.heuristic(given, H200, "backward"))


@pytest.mark.parametrize("slots", [None, 9])
def test_packed_calls_lower(slots, monkeypatch):
    monkeypatch.setattr(forward_pass, "register_handler", lambda symbol: symbol)
    monkeypatch.setattr(backward_pass, "register_handler", lambda symbol: symbol)
    given = record(slots)
    text = jax.jit(both).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ejkernel_selective_scan(") == text.count("@ejkernel_selective_scan_gradient(") == 1
    # States before as many intervals as there can be, dB and dC of 2 warpgroups of the row, and those of sequences.
    for shape in ("1x7x13x200xf32", "1x2x130x2x16xf32", "5x200x13xf32", "5x200xf32", "6xi32"):
        assert f"tensor<{shape}>" in text
    (output, final), gradients = jax.eval_shape(both, given)
    assert (output.shape, output.dtype) == (given.x.shape, given.x.dtype)
    assert (final.shape, final.dtype) == (given.initial_state.shape, given.initial_state.dtype)
    for name, gradient in gradients.items():
        field = getattr(given, name)
        assert (gradient.shape, gradient.dtype) == (field.shape, field.dtype), name


def test_each_packed_sequence_counts_as_a_row_for_the_number_of_warpgroups():
    assert config.num_warpgroups(record()) == SEQUENCES * 2
