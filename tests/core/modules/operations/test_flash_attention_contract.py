"""The public signature of `flash_attention`, its record and its annotations say the same."""

import dataclasses
import inspect
import typing

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.modules.operations.flash_attention import OP, FlashAttentionArguments
from ejkernel.ops.model import CALL_OPTIONS
from ejkernel.types import MaskInfo

SIGNATURE = inspect.signature(flash_attention)
ARRAYS = ("query", "key", "value", "bias", "cum_seqlens_q", "cum_seqlens_k", "softmax_aux", "block_tables")


def test_record_mirrors_the_function():
    parameters = [p for name, p in SIGNATURE.parameters.items() if name not in CALL_OPTIONS]
    fields = dataclasses.fields(FlashAttentionArguments)
    assert [p.name for p in parameters] == [f.name for f in fields]
    for parameter, field in zip(parameters, fields, strict=True):
        required = field.default is dataclasses.MISSING
        assert (parameter.default is inspect.Parameter.empty) == required
        assert required or field.default is parameter.default


def test_positional_arguments_and_options_are_the_promised_ones():
    kinds = {kind: [n for n, p in SIGNATURE.parameters.items() if p.kind is kind] for kind in inspect._ParameterKind}
    assert kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD] == list(ARRAYS) == list(OP.axes)
    assert kinds[inspect.Parameter.KEYWORD_ONLY] == [
        "mask_info",
        "attention_mask",
        "alibi_slopes",
        "relative_bias",
        "score_mod",
        "mask_mod",
        "softmax_scale",
        "dropout_prob",
        "causal",
        "dropout_seed",
        "sliding_window",
        "logits_soft_cap",
        "normalize_output",
        "precision",
        "logits_dtype",
        "return_lse",
        *CALL_OPTIONS,
    ]


def test_every_argument_is_documented_once_and_annotated():
    documented = inspect.getdoc(flash_attention) or ""
    hints = typing.get_type_hints(flash_attention)
    for name in SIGNATURE.parameters:
        assert documented.count(f"\n    {name}: ") == 1, name
        assert name in hints


CHECKED = jaxtyping.jaxtyped(typechecker=beartype.beartype)(flash_attention)
QUERY = jnp.ones((2, 8, 4, 16))
KEY, VALUE = jnp.ones((2, 6, 2, 16)), jnp.ones((2, 6, 2, 12))
ROW = QUERY[:1]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((QUERY, KEY, VALUE), {}),
        ((QUERY, KEY, VALUE, jnp.ones((1, 4, 1, 6)), None, None, jnp.ones(3)), {"softmax_scale": 0.5, "causal": True}),
        ((ROW, ROW, ROW, None, jnp.array([0, 3, 8]), jnp.array([0, 8, 8]), jnp.ones((4, 2))), {"sliding_window": 3}),
        ((QUERY.astype(jnp.bfloat16),) * 3, {"dropout_prob": 0.1, "dropout_seed": jnp.uint32(3)}),
        ((QUERY,) * 3, {"dropout_prob": 0.1, "dropout_seed": 7, "sliding_window": (None, 2), "platform": "xla"}),
        ((QUERY,) * 3, {"mask_info": MaskInfo(), "logits_soft_cap": 3.0, "logits_dtype": jnp.bfloat16}),
    ],
    ids=["plain", "bias and sinks", "packed", "half", "dropout", "options"],
)
def test_annotations_admit_right_calls_and_describe_the_output(arguments, options):
    output = jax.eval_shape(lambda: CHECKED(*arguments, **options))
    assert output.shape == (*arguments[0].shape[:3], arguments[2].shape[3])
    assert output.dtype == arguments[0].dtype


@pytest.mark.parametrize(
    "arguments",
    [
        (QUERY[0], KEY, VALUE),
        (QUERY, KEY[..., :8], VALUE),
        (QUERY, KEY, VALUE[:, :5]),
        (QUERY.astype(int), KEY, VALUE),
        (QUERY, KEY, VALUE, jnp.ones((2, 4, 8, 5))),
        (ROW, ROW, ROW, None, jnp.array([0.0, 8.0])),
        (ROW, ROW, ROW, None, jnp.array([0, 8]), jnp.array([0, 4, 8])),
        (QUERY, KEY, VALUE, None, None, None, jnp.ones((3, 2))),
    ],
    ids=["rank", "head size", "length", "dtype", "bias", "lengths' dtype", "lengths' number", "sinks"],
)
def test_annotations_refuse_what_validation_refuses(arguments):
    with pytest.raises(jaxtyping.TypeCheckError):
        CHECKED(*arguments)
    with pytest.raises(ValueError, match="got"):
        flash_attention(*arguments)


def test_kernel_class_offers_what_the_seed_promises():
    attention = FlashAttention()
    promised = """run get_impl heuristic_cfg heuristic_cfg_gpu heuristic_cfg_tpu candidate_cfgs candidate_cfgs_gpu
        candidate_cfgs_tpu candidate_cfgs_xla candidate_cfgs_shard_map_gpu candidate_cfgs_shard_map_tpu
        candidate_cfgs_shard_map_xla create_shard_map_wrapper"""
    assert all(callable(getattr(attention, name)) for name in promised.split())
    assert attention.version == "1"
    assert attention.op_id == "flash_attention"
