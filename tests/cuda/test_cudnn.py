"""cuDNN's attention without a GPU: what is refused, and what XLA is asked for."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel import explain
from ejkernel.modules import flash_attention
from ejkernel.ops import NoImplementationError
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.plugins import reload
from ejkernel.types import MaskInfo
from ejkernel_cuda import tiled_attention

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
A100 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100", compute_capability=8.0)
DETERMINISTIC = "--xla_gpu_exclude_nondeterministic_ops=true"


def arrays(t=128, s=128, size=64, value_size=None, dtype=jnp.bfloat16):
    shapes = ((2, t, 8, size), (2, s, 2, size), (2, s, 2, value_size or size))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def pairs(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def positional(query, key, value, bias=None, sinks=None):
    """The arguments of `flash_attention` that have no names."""
    return query, key, value, bias, None, None, sinks


def refusals(*given, device=H200, bias=None, sinks=None, **options):
    """What the implementation has against a call."""
    with target_device(device):
        decision = explain(flash_attention, *positional(*given, bias, sinks), **options)
    [verdict] = [v for v in decision.forward.verdicts if v.implementation.name == "cudnn"]
    return list(verdict.reasons)


def lowered(*given, **options):
    """The custom calls of a call: their names, and what XLA is told of them."""
    with target_device(H200):
        call = jax.jit(lambda *x: flash_attention(*positional(*x), platform="cuda", **options))
        text = call.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'custom_call @(\S+)\(.*?backend_config = "(.*?)", operand', text)
    return [(name, json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]) for name, config in found]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "sliding_window": (9, 4)},
        {"sliding_window": (9, 0)},
        {"bias": pairs(1, 8, 128, 128)},
    ],
    ids=str,
)
def test_supported_calls_are_served(options):
    assert refusals(*arrays(), **options) == []


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ({"dtype": jnp.float32}, {}, "dtype float32 is not among bfloat16, float16"),
        ({"size": 60}, {}, "head size 60 is not in range(8, 257, 8)"),
        ({"value_size": 48}, {}, "value: got head size 48, wants that of query and key, 64"),
        ({"t": 1, "s": 1}, {}, "query: got one query and one key, cuDNN wants more"),
        ({}, {"sliding_window": 9}, "sliding_window: (9, 9) does not end at the query's own position"),
        (
            {"t": 200},
            {"sliding_window": (9, 0)},
            "sliding_window: 200 queries are more than the 128 keys",
        ),
        (
            {},
            {"bias": pairs(2, 1, 1, 128)},
            "bias: shape (2, 1, 1, 128), wants all 128 queries and 128 keys",
        ),
        (
            {},
            {"bias": pairs(1, 8, 128, 128, dtype=jnp.float32)},
            "bias: dtype float32, wants query's bfloat16",
        ),
        ({}, {"logits_soft_cap": 5.0}, "logits_soft_cap is not handled"),
        ({}, {"sinks": pairs(8, dtype=jnp.float32)}, "softmax_aux is not handled"),
        ({}, {"mask_info": MaskInfo(_attention_mask=pairs(2, 1, 128, 128, dtype=jnp.bool_))}, "mask is not handled"),
        ({}, {"normalize_output": False}, "normalize_output is not handled"),
    ],
    ids=str,
)
def test_unsupported_calls_are_refused_with_the_argument_name(given, options, sentence):
    assert refusals(*arrays(**given), **options) == [sentence]


def test_dropout_is_refused():
    reasons = refusals(*arrays(), dropout_prob=0.1, dropout_seed=jax.ShapeDtypeStruct((), jnp.uint32))
    assert reasons == ["dropout_seed is not handled", "dropout_prob is not handled"]


def test_heads_above_128_need_compute_capability_9():
    assert refusals(*arrays(size=192), device=A100) == ["query: head size 192 needs compute capability 9.0"]
    assert refusals(*arrays(size=192)) == []


def test_custom_call_has_the_mask_scale_and_shape_of_the_call():
    [(name, config)] = lowered(*arrays(), causal=True, sliding_window=(9, 4), softmax_scale=0.5)
    assert name == "__cudnn$fmhaSoftmax"
    assert (config["mask_type"], config["sliding_window_length"], config["fmha_scale"]) == ("CAUSAL", 10, 0.5)
    assert config["intermediate_tensor_shape"]["dimensions"] == ["2", "8", "128", "128"]

    [(name, config)] = lowered(*arrays(dtype=jnp.float16), pairs(1, 1, 128, 128, dtype=jnp.float16))
    assert name == "__cudnn$fmhaScaleBiasSoftmax"
    assert (config["mask_type"], config["sliding_window_length"]) == ("NO_MASK", 0)
    assert config["intermediate_tensor_shape"]["element_type"] == "F16"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, False),
        ("--xla_foo", False),
        (f"{DETERMINISTIC} --xla_foo=1", True),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=false", False),
    ],
)
def test_backward_is_registered_only_if_xla_flags_request_deterministic_ops(monkeypatch, flags, expected):
    if flags is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", flags)
    [implementation] = tiled_attention.implementations()
    assert (implementation.backward is not None) == expected
    assert (implementation.gradients == {"query", "key", "value", "bias"}) == expected


@pytest.fixture
def requests_deterministic_ops(monkeypatch):
    """A process that was started with XLA's flag."""
    monkeypatch.setenv("XLA_FLAGS", DETERMINISTIC)
    reload()
    yield
    monkeypatch.undo()
    reload()


@pytest.mark.usefixtures("requests_deterministic_ops")
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_take_one_more_custom_call(biased):
    bias = pairs(1, 8, 128, 128) if biased else None

    def total(arguments):
        return flash_attention(*positional(*arguments), causal=True, platform="cuda").astype(jnp.float32).sum()

    with target_device(H200):
        traced = jax.jit(jax.grad(total)).trace([*arrays(), bias])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kind = "ScaleBiasSoftmax" if biased else "Softmax"
    assert re.findall(r"custom_call @__cudnn\$fmha(\w+)", text) == [kind, f"{kind}Backward"]
    assert [x.shape for x in jax.tree.leaves(traced.out_info)] == [x.shape for x in (*arrays(), bias) if x is not None]


@pytest.mark.needs("cudnn without gradients")
def test_without_the_flag_for_deterministic_ops_gradients_are_refused():
    def total(query, key, value):
        return flash_attention(query, key, value, platform="cuda").astype(jnp.float32).sum()

    with target_device(H200), pytest.raises(NoImplementationError, match="has no backward"):
        jax.jit(jax.grad(total)).trace(*arrays())


def test_calls_can_be_exported():
    call = jax.jit(lambda *given: flash_attention(*given, platform="cuda"))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax")]
    with target_device(H200):
        exported = jax.export.export(call, platforms=["cuda"], disabled_checks=unchecked)(*arrays())
    assert exported.out_avals[0].shape == arrays()[0].shape


def test_a_vmapped_call_is_one_custom_call():
    stacked = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arrays()]
    call = jax.jit(jax.vmap(lambda *given: flash_attention(*given, platform="cuda")))
    with target_device(H200):
        traced = call.trace(*stacked)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.out_info.shape == stacked[0].shape
    assert text.count("stablehlo.custom_call @__cudnn$fmhaSoftmax") == 1
    assert "stablehlo.while" not in text
