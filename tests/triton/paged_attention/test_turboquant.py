"""Attention over TurboQuant's codes in Triton: its numbers in the interpreter, and what its kernel takes of a chip."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from triton_chips import H200, assert_conforms, assert_fits

from ejkernel.modules.operations.cases import paged_turboquant
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel_triton import launch
from ejkernel_triton.paged_attention import turboquant
from ejkernel_triton.paged_attention.turboquant import config
from ejkernel_triton.paged_attention.turboquant.forward import forward

OPERATION = "ragged_page_attention_v2_turboquant"


def record(**changes):
    """The shapes of a record of sequences that decode."""
    op, sizes = registry().ops[OPERATION], dataclasses.replace(paged_turboquant.MODEL_DECODE_SIZES, **changes)
    return jax.eval_shape(
        lambda key: op.lower(op.arguments(**paged_turboquant.v2_inputs(key, sizes))), jax.random.key(0)
    )


def test_conformance():
    tests = "test_value and not shapes and not residuals and not eager"
    operations = (OPERATION, "ragged_page_attention_v3_turboquant")
    assert_conforms(operations, tests, "triton_turboquant", serves_all=False)


def test_the_default_configuration_fits_an_h200():
    described = record()
    default = config.heuristic(described, H200, "forward")
    with target_device(H200), launch.collect_launches() as launches:
        jax.eval_shape(lambda record: forward(record, default), described)
    assert_fits(launches, "sm_90")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d": 48, "v": 48, "key_bits": 4}, "queries: got a head size of 48"),
        ({"projections": 40}, "qjl_projection: got 40 rows"),
    ],
)
def test_sizes_that_are_no_powers_of_two_are_refused_by_name(changes, reason):
    assert any(found.startswith(reason) for found in turboquant._refusal_reasons(record(**changes)))
    assert not list(turboquant._refusal_reasons(record()))


def test_every_warp_has_keys_of_its_own():
    with pytest.raises(ValueError, match="block_kv: got 16 with num_warps 4"):
        config.CodeSplits(block_kv=16, num_splits=1, num_warps=4, num_stages=2)
    assert len(config.candidates(record(dtype=jnp.float32), H200, "forward")) > 4


def test_many_rows_per_sequence_go_to_xla_unless_asked():
    assert turboquant._priority(record(), H200, "forward") == 10
    prefill = record(kv_lens=(4000,) * 4, q_lens=(512,) * 4, dtype=jnp.bfloat16)
    assert turboquant._priority(prefill, H200, "forward") < 0
