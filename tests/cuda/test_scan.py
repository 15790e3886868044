"""The selective scan in CUDA C++ without a GPU: what is refused, the tiles that are chosen, and the calls."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel import explain
from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.modules import state_space_v1
from ejkernel.modules.operations.state_space_v1 import OP
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.pullback import Pullback
from ejkernel_cuda import library
from ejkernel_cuda.selective_scan import IMPLEMENTATIONS, cases, config
from ejkernel_cuda.selective_scan import backward as backward_pass
from ejkernel_cuda.selective_scan import forward as forward_pass

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
FIELDS = ("x", "step", "decay", "write", "read", "skip")


def record(rows=2, tokens=130, channels=64, size=16, dtype=jnp.bfloat16, step=None, initial=False):
    shape = jax.ShapeDtypeStruct
    return SelectiveScan(
        x=shape((rows, tokens, channels), dtype),
        step=shape((rows, tokens, channels), step or dtype),
        decay=shape((channels, size), jnp.float32),
        write=shape((rows, tokens, size), dtype),
        read=shape((rows, tokens, size), dtype),
        skip=shape((channels,), jnp.float32),
        initial_state=shape((rows, channels, size), jnp.float32) if initial else None,
    )


def decision(device=H200, **changes):
    given = record(**changes)
    with target_device(device):
        arrays = (given.x, given.decay, given.write, given.read, given.skip, given.step)
        return explain(state_space_v1, *arrays)


def reasons(direction, **changes):
    """What the implementation has against a direction of a call, beside that the library is not compiled here."""
    verdicts = getattr(decision(**changes), direction).verdicts
    [verdict] = [v for v in verdicts if v.implementation.name == "cuda"]
    return [reason for reason in verdict.reasons if library.COMPILED_MODULE not in reason]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("changes", [{}, {"dtype": jnp.float32, "size": 9}, {"step": jnp.float32}], ids=str)
def test_supported_calls_are_served(changes, direction):
    assert reasons(direction, rows=128, **changes) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"size": 17}, "head size 17 is not in range(1, 17)"),
        ({"step": jnp.float64}, "dt: got float64, the kernel reads float16, bfloat16, float32"),
        ({"device": DeviceInfo(platform="cpu")}, "needs nvidia, this is cpu"),
        ({"device": dataclasses.replace(H200, compute_capability=7.5)}, "needs compute capability 8.0, this is 7.5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_calls_are_refused_with_the_argument_name(changes, sentence):
    with jax.enable_x64(True):
        assert reasons("forward", **changes) == [sentence]


SHARED = "compute capability 12.0: the kernel needs more shared memory than the chip has"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows": 128, "channels": 20}, "hidden_states: got 20 channels, the kernel wants a multiple of 8"),
        ({"rows": 128, "device": dataclasses.replace(H200, compute_capability=12.0)}, SHARED),
        (
            {"rows": 128, "device": dataclasses.replace(H200, compute_capability=8.0)},
            "needs compute capability 9.0, this is 8.0",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_gradients_are_refused_with_the_argument_name(changes, sentence):
    assert reasons("forward", **changes) == []
    assert reasons("backward", **changes) == [sentence]


@pytest.mark.parametrize(
    ("changes", "first"), [({"rows": 128}, True), ({"channels": 4096}, False), ({"rows": 128, "size": 8}, False)]
)
def test_priority_of_gradients_of_few_rows_or_small_states_is_below_triton(changes, first):
    [implementation] = IMPLEMENTATIONS
    assert reasons("backward", **changes) == []
    assert (implementation.priority_for(record(**changes), H200, "backward") > 10) == first
    assert implementation.priority_for(record(**changes), H200, "forward") > 10


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"rows": 8, "channels": 4096}, (2, 2)),
        ({"rows": 4, "channels": 4096}, (2, 4)),
        ({"rows": 2, "channels": 4096}, (2, 4)),
        ({"rows": 1, "channels": 4096}, (1, 4)),
        ({"rows": 8, "channels": 4100}, (1, 1)),
    ],
    ids=str,
)
def test_tiles_fill_the_chip(shape, expected):
    rule = config.heuristic(record(**shape), H200, "forward")
    assert (rule.channels, rule.lanes) == expected
    assert rule in config.candidates(record(**shape), H200, "forward")
    pairs = config.heuristic(record(**shape), H200, "backward").warpgroups
    assert pairs == (2 if shape["rows"] == 8 else 1)


def test_the_backward_kernel_serves_every_conformance_case():
    for case in cases.cases()["state_space_v1"]:
        given = OP.lower(jax.eval_shape(case.make, jax.random.key(0)))
        [implementation] = IMPLEMENTATIONS
        with target_device(H200):
            assert not list(implementation.requires_for("backward").extra(given)), case.name


@pytest.fixture
def lowered(monkeypatch):
    """The program of a function of arrays for CUDA, although no library is there."""
    monkeypatch.setattr(forward_pass, "register_handler", lambda symbol: symbol)
    monkeypatch.setattr(backward_pass, "register_handler", lambda symbol: symbol)
    return lambda function, *given: jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def both(given):
    """Output and all gradients of a record."""
    (output, final), residuals = forward_pass.forward(given, config.heuristic(given, H200, "forward"))
    wanted = frozenset(FIELDS) | ({"initial_state"} if given.initial_state is not None else frozenset())
    pullback = Pullback(record=given, residuals=residuals, output=None, cotangent=(output, final), grad_fields=wanted)
    return output, backward_pass.backward(pullback, config.heuristic(given, H200, "backward"))


def test_calls_lower(lowered):
    given = record(initial=True, channels=200, size=5)
    text = lowered(both, given)
    assert text.count("@ejkernel_selective_scan(") == text.count("@ejkernel_selective_scan_gradient(") == 1
    # States before 3 intervals, dB and dC of 2 warpgroups, and B and C padded to 16 numbers.
    for shape in ("2x3x5x200xf32", "2x2x130x2x16xf32", "2x130x2x16xf32"):
        assert f"tensor<{shape}>" in text
    output, gradients = jax.eval_shape(both, given)
    assert (output.shape, output.dtype) == (given.x.shape, given.x.dtype)
    for name, gradient in gradients.items():
        field = getattr(given, name)
        assert (gradient.shape, gradient.dtype) == (field.shape, field.dtype), name


def test_a_vmapped_call_is_one_custom_call_per_pass(lowered):
    batched = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), record())
    text = lowered(jax.vmap(both), batched)
    assert text.count("@ejkernel_selective_scan(") == text.count("@ejkernel_selective_scan_gradient(") == 1
    assert "tensor<3x2x3x16x64xf32>" in text


def test_a_tile_that_does_not_fit_is_an_error(lowered):
    with pytest.raises(ValueError, match="got 20 channels, wants a multiple of 8"):
        jax.eval_shape(lambda given: forward_pass.forward(given, config.WIDE_TILE), record(channels=20))


def test_dt_of_another_dtype_is_converted_to_float32(lowered):
    text = lowered(both, record(step=jnp.float16, channels=8))
    assert "tensor<2x130x8xf32>" in text
