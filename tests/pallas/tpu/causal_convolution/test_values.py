"""The causal convolution's TPU kernels, simulated with races detected, against the family's meaning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import interpreted, simulated

from ejkernel.families.causal_convolution import CausalConvolution, reference
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.causal_convolution import plan
from ejkernel_pallas.tpu.causal_convolution.backward import backward
from ejkernel_pallas.tpu.causal_convolution.config import TpuConvolution
from ejkernel_pallas.tpu.causal_convolution.forward import forward

CONFIG = TpuConvolution(block_t=32, block_c=128)
FIELDS = ("x", "weight", "bias", "initial_state", "sequence_state")
BOUNDS = [0, 1, 1, 31, 33, 60]
"""One token, none, sequences around the end of a block, and padding."""


def record(shape=(2, 63, 200, 4), dtype="float32", bounds=None, **fields):
    """A record of (B, T, C, W) with normal numbers; fields that are True are there."""
    rows, tokens, channels, width = shape
    random = np.random.default_rng(1)

    def normal(*size, of=dtype):
        return jnp.asarray(random.normal(size=size), of)

    sequences = rows if bounds is None else len(bounds) - 1
    state = "initial_state" if bounds is None else "sequence_state"
    made = {
        "bias": lambda: normal(channels, of="float32"),
        "state": lambda: normal(sequences, channels, width - 1),
        "activation": lambda: "silu",
    }
    given = {state if name == "state" else name: make() for name, make in made.items() if fields.get(name)}
    given |= {} if bounds is None else {"cu_seqlens": jnp.asarray(bounds, jnp.int32)}
    return CausalConvolution(x=normal(rows, tokens, channels), weight=normal(channels, width, of="float32"), **given)


CASES = {
    "layer": record(bias=True, activation=True),
    "states": record((2, 63, 20, 4), state=True),
    "fewer tokens than a state has": record((2, 2, 20, 4), state=True, activation=True),
    "eight weights": record((1, 70, 20, 8), state=True, bias=True, activation=True),
    "packed": record((1, 63, 20, 5), bounds=BOUNDS, activation=True, bias=True),
    "packed with states": record((1, 63, 20, 4), bounds=BOUNDS, state=True, activation=True),
    "padding at both ends": record((1, 63, 20, 4), bounds=[3, 3, 40, 60], state=True),
    "bfloat16": record((1, 63, 20, 4), "bfloat16", bounds=BOUNDS, bias=True, activation=True),
}


def passes(made):
    """Output, final states and all gradients, of cotangents that are all different."""
    output, _ = forward(made, CONFIG)
    cotangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), output)
    wanted = frozenset(name for name in FIELDS if getattr(made, name) is not None)
    pullback = Pullback(record=made, residuals=(), output=None, cotangent=cotangent, grad_fields=wanted)
    return output, cotangent, backward(pullback, CONFIG)


def compare(made, got):
    output, cotangent, gradients = got
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, (made, cotangent)
    )
    exact, pull = jax.vjp(
        lambda fields: reference(dataclasses.replace(wide[0], **fields))[0],
        {name: getattr(wide[0], name) for name in gradients},
    )
    (of_fields,) = pull(wide[1])
    tolerance = 1e-6 if made.x.dtype == jnp.float32 else 1e-2
    pairs = {"output": (output[0], exact[0]), "states": (output[1], exact[1])}
    for name, (mine, theirs) in (pairs | {name: (gradients[name], of_fields[name]) for name in gradients}).items():
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        assert mine.shape == theirs.shape, name
        error = np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1e-3)
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_without_races(name):
    with simulated():
        compare(CASES[name], jax.jit(passes)(CASES[name]))
    assert not found()


def slots_record(shape, bounds, slots, dtype="float32", of_slots=None, num_slots=5):
    """A record whose states are in slots; slots of no sequence hold NaN, and so do padding tokens."""
    made = record(shape, dtype, bounds=bounds, bias=True, activation=True)
    held = np.random.default_rng(2).normal(size=(num_slots, shape[2], shape[3] - 1))
    held[np.setdiff1d(np.arange(num_slots), [n for n in slots if 0 <= n < num_slots])] = np.nan
    states = {"sequence_state": jnp.asarray(held, of_slots or dtype), "state_slots": jnp.asarray(slots, jnp.int32)}
    return dataclasses.replace(made, x=made.x.at[:, bounds[-1] :].set(jnp.nan), **states)


UPDATES = {
    "a token each, more channels than a block": slots_record((1, 3, 256, 4), [0, 1, 2, 3], [4, 0, 2]),
    "no slot, an empty sequence, padding": slots_record((1, 20, 24, 4), [0, 3, 3, 4, 12], [-1, 1, 4, 0]),
    "slots wider than tokens": slots_record((1, 16, 24, 3), [0, 8, 16], [2, 9], "bfloat16", "float32"),
    "bfloat16": slots_record((1, 9, 100, 5), [0, 2, 9], [2, 1], "bfloat16"),
}


def check_update(made):
    """Compares outputs and slots with the reference, and that the kernel for steps computes them."""
    assert plan.update_block_channels(made, CONFIG) == min(128, made.x.shape[2])
    output, slots = jax.jit(lambda made: forward(made, CONFIG)[0])(made)
    expected = reference(made)[0]
    for mine, theirs in zip((output, slots), expected, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        assert np.linalg.norm(np.nan_to_num(mine - theirs)) <= (1e-6 if made.x.dtype == jnp.float32 else 1e-2) * (
            np.linalg.norm(np.nan_to_num(theirs))
        )


@pytest.mark.parametrize("name", UPDATES)
def test_values_of_updated_slots_without_races(name):
    with simulated():
        check_update(UPDATES[name])
    assert not found()


@pytest.mark.parametrize(
    ("tokens", "num_slots", "channels"), [(64, 64, 1024), (513, 64, 0), (64, 513, 0), (512, 512, 512)]
)
def test_long_prompts_and_unused_slots_are_left_to_xla(tokens, num_slots, channels):
    made = jax.eval_shape(lambda: slots_record((1, tokens, 4096, 4), list(range(65)), list(range(64)), num_slots=600))
    held = jax.ShapeDtypeStruct((num_slots, 4096, 3), jnp.float32)
    made = dataclasses.replace(made, sequence_state=held)
    assert plan.update_block_channels(made, TpuConvolution(block_t=512, block_c=1024)) == channels


def test_padding_is_not_read():
    made = CASES["padding at both ends"]
    x = made.x.at[:, :3].set(jnp.nan).at[:, 60:].set(jnp.nan)
    with interpreted():
        output, _, gradients = jax.jit(passes)(dataclasses.replace(made, x=x))
    for array in jax.tree.leaves((output[0], gradients)):
        assert np.isfinite(np.asarray(array)).all()


@pytest.mark.parametrize(
    ("block_t", "block_c", "message"), [(24, 128, "block_t"), (32, 100, "block_c"), (2048, 1024, "VMEM")]
)
def test_invalid_configurations_are_refused(block_t, block_c, message):
    with pytest.raises(ValueError, match=message):
        TpuConvolution(block_t=block_t, block_c=block_c)
