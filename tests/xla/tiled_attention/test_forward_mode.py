"""The fused tangents of tiled attention are those of the reference, wherever tiles end and whatever is masked."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiled_attention_cases import QUICK, assert_close, differentiable, make

from ejkernel.families.tiled_attention import reference
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax
from ejkernel_xla.tiled_attention.forward_mode import forward_mode

quick = functools.partial(jax.jit, compiler_options=QUICK)

CASES = {
    "masks of everything": {"mask": "pairs", "bias": "pairs", "band": {"causal": True}, "heads": (4, 2)},
    "packed, dropped, capped": {
        "segments": True,
        "positions": True,
        "band": {"sliding_window": (5, 3)},
        "extra": {"dropout_prob": 0.3, "softmax_aux": True, "logits_soft_cap": 2.0},
    },
    "numerator": {"extra": {"normalize_output": False}, "bias": "rows"},
}


def normal_tangents(record):
    random = np.random.default_rng(5)
    fields = {name: getattr(record, name) for name in sorted(differentiable(record))}
    return fields, {name: jnp.asarray(random.normal(size=x.shape), x.dtype) for name, x in fields.items()}


@pytest.mark.parametrize("name", CASES)
def test_results_and_tangents_are_those_of_the_reference(name):
    record = make(**{"shape": (37, 53, 8, 6), "heads": (2, 2), **CASES[name]})
    fields, tangents = normal_tangents(record)
    got = quick(lambda: forward_mode(record, tangents, ChunkedSoftmax(block_q=16, block_kv=16)))()
    want = quick(lambda: jax.jvp(lambda x: reference(dataclasses.replace(record, **x)), (fields,), (tangents,)))()
    finite = jnp.isfinite(want[0][1].lse)
    for (output, residuals), (wanted_output, wanted_residuals) in zip(got, want, strict=True):
        assert_close(output, wanted_output)
        assert_close(jnp.where(finite, residuals.lse, 0), jnp.where(finite, wanted_residuals.lse, 0))


@pytest.mark.parametrize("field", ["key", "value"])
def test_fields_without_a_tangent_count_as_constant(field):
    record = make(shape=(20, 33, 8, 8), heads=(2, 1), band={"causal": True})
    fields, tangents = normal_tangents(record)
    alone = {field: tangents[field]}
    zeros = {name: jnp.zeros_like(x) for name, x in fields.items()}
    run = quick(lambda tangents: forward_mode(record, tangents, ChunkedSoftmax(block_q=16, block_kv=16))[1])
    assert_close(run(alone), run({**zeros, **alone}))


def test_what_is_masked_reaches_no_tangent():
    record = make(shape=(16, 32, 8, 8), heads=(1, 1), extra={"sliding_window": (None, 0)})
    _, tangents = normal_tangents(record)
    run = quick(lambda x, v: forward_mode(x, v, ChunkedSoftmax(block_q=16, block_kv=8))[1][0])
    spoilt = dataclasses.replace(record, key=record.key.at[:, 12:].set(jnp.inf))
    clean, dirty = run(record, tangents), run(spoilt, tangents)
    np.testing.assert_array_equal(clean[:, :12], dirty[:, :12])
