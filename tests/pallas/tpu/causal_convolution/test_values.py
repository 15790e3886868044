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
