"""The selective scan's TPU kernels, interpreted, against the family's meaning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import interpreted, simulated

from ejkernel.families.selective_scan import SelectiveScan, reference
from ejkernel.ops.device import DeviceInfo
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.selective_scan.backward import backward
from ejkernel_pallas.tpu.selective_scan.config import TpuScan, heuristic
from ejkernel_pallas.tpu.selective_scan.forward import forward

FIELDS = ("x", "step", "decay", "write", "read", "skip", "initial_state")


def record(shape=(1, 70, 24, 3), dtype="float32", bounds=None, states=0, slots=None, of_slots="float32"):
    """A record of (B, T, I, E), with step sizes log-uniform in 1e-3 to 0.1 and rates 1 to 16, as Mamba begins."""
    rows, tokens, channels, size = shape
    random = np.random.default_rng(5)

    def normal(*size):
        return jnp.asarray(random.normal(size=size), dtype)

    return SelectiveScan(
        x=normal(rows, tokens, channels),
        step=jnp.asarray(np.exp(random.uniform(np.log(1e-3), np.log(0.1), (rows, tokens, channels))), dtype),
        decay=-jnp.asarray(random.uniform(1, 16, (channels, size)), jnp.float32),
        write=normal(rows, tokens, size),
        read=normal(rows, tokens, size),
        skip=normal(channels),
        initial_state=normal(states, channels, size).astype(of_slots) if states else None,
        cu_seqlens=None if bounds is None else jnp.asarray(bounds, jnp.int32),
        state_slots=None if slots is None else jnp.asarray(slots, jnp.int32),
    )


CASES = {
    "more channels than a register": record((1, 66, 1100, 2), states=1),
    "more numbers than registers hold": record((1, 20, 24, 18)),
    "packed with states": record((1, 100, 24, 3), bounds=[0, 70, 70, 71, 90], states=4),
    "bfloat16": record((2, 64, 24, 3), "bfloat16"),
    "steps in slots, none of the first": record((1, 4, 24, 3), bounds=[0, 1, 2, 3, 4], states=6, slots=[-1, 4, 9, 2]),
}
UPDATES = {
    "a token each": record((1, 3, 1280, 16), bounds=[0, 1, 2, 3], states=5, slots=[4, 0, 2]),
    "no slot, an empty sequence, padding": record(
        (1, 14, 24, 3), bounds=[0, 3, 3, 4, 12], states=5, slots=[-1, 1, 4, 0]
    ),
    "a prompt among steps": record((1, 67, 600, 9), bounds=[0, 1, 65, 66, 67], states=5, slots=[3, 0, 7, 1]),
    "bfloat16": record((1, 16, 24, 16), "bfloat16", bounds=[0, 8, 16], states=3, slots=[2, 1], of_slots="bfloat16"),
    "no tokens": record((1, 2, 24, 3), bounds=[0, 0, 0], states=3, slots=[0, 2]),
}


def passes(made):
    """Output, final states, residuals and all gradients, of cotangents that are all different."""
    config = TpuScan(block_channels=2048 if made.x.shape[2] > 1024 else 1024, unroll=1)
    output, residuals = forward(made, config)
    cotangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), output)
    wanted = frozenset(name for name in FIELDS if getattr(made, name) is not None)
    pullback = Pullback(record=made, residuals=residuals, output=None, cotangent=cotangent, grad_fields=wanted)
    return (*output, residuals.states), cotangent, backward(pullback, config)


def compare(made, got):
    outputs, cotangent, gradients = got

    def of(fields):
        output, residuals = reference(dataclasses.replace(made, **fields))
        return output, residuals.states

    output, pull, states = jax.vjp(of, {name: getattr(made, name) for name in gradients}, has_aux=True)
    (of_fields,) = pull(cotangent)
    pairs = dict(zip(("output", "states", "chunk states"), zip(outputs, (*output, states), strict=True), strict=True))
    for name, (mine, theirs) in (pairs | {name: (gradients[name], of_fields[name]) for name in gradients}).items():
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        error = np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1e-3)
        assert error < (2e-6 if made.x.dtype == jnp.float32 else 1e-2), (name, error)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    with interpreted():
        compare(CASES[name], jax.jit(passes)(CASES[name]))


def check_update(made):
    """Compares outputs and slots; slots of no sequence hold NaN, and stay as they are."""
    used = [slot for slot in np.asarray(made.state_slots) if 0 <= slot < made.initial_state.shape[0]]
    others = np.setdiff1d(np.arange(made.initial_state.shape[0]), used)
    made = dataclasses.replace(made, initial_state=made.initial_state.at[others].set(jnp.nan))
    (output, slots), _ = jax.jit(lambda made: forward(made, TpuScan(block_channels=1024, unroll=1)))(made)
    expected, _ = reference(made)
    assert (slots.dtype, slots.shape) == (made.initial_state.dtype, made.initial_state.shape)
    assert np.isnan(np.asarray(slots[others], np.float32)).all()
    bound, chosen = 2e-6 if made.x.dtype == jnp.float32 else 1e-2, jnp.array(used, int)
    for mine, theirs in ((output, expected[0]), (slots[chosen], expected[1][chosen])):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(mine - theirs) <= bound * max(np.linalg.norm(theirs), 1e-3)


@pytest.mark.parametrize("name", UPDATES)
def test_values_of_updated_slots(name):
    with interpreted():
        check_update(UPDATES[name])


def test_slot_updates_have_no_races():
    with simulated():
        check_update(UPDATES["no slot, an empty sequence, padding"])
    assert not found()


def test_no_races():
    made = record((1, 66, 24, 1), states=1)
    with simulated():
        compare(made, jax.jit(passes)(made))
    assert not found()


@pytest.mark.parametrize(("field", "value"), [("block_channels", 512), ("block_channels", 8192), ("unroll", 3)])
def test_invalid_configurations_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        TpuScan(**{"block_channels": 1024, "unroll": 8, field: value})


@pytest.mark.parametrize(
    ("rows", "kind", "slots", "channels_per_step"),
    [(1, "TPU v5", None, 1024), (2, "TPU v5", None, 2048), (1, "TPU v5 lite", None, 2048), (1, "TPU v5", [0], 1024)],
)
def test_one_row_fills_both_cores(rows, kind, slots, channels_per_step):
    made = record((rows, 8, 2048, 1), slots=slots)
    device = DeviceInfo(platform="tpu", vendor="google", kind=kind)
    assert heuristic(made, device, "forward").block_channels == channels_per_step
