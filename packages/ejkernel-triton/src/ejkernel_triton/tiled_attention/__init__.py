"""Tiled softmax attention in Triton, for GPUs from Ampere on and AMD's through HIP."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import (
    DROPOUT_FIELDS,
    FAMILY,
    MASK_FIELDS,
    NUMERICS_FIELDS,
    SOFTMAX_FIELDS,
    TiledAttention,
    causal_window_bounds,
)
from ejkernel.families.tiled_attention.block_maps import pattern_refusals
from ejkernel.families.tiled_attention.function_refusals import function_refusals
from ejkernel.families.tiled_attention.kinds import tuning_key_of_large_calls
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel.planning.scalar_programs import derivatives_by_loads, loaded_arrays, scalar_program
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.scalar_functions import MAX_WORDS
from ejkernel_triton.tiled_attention import config, forward_mode

HANDLED_FIELDS = MASK_FIELDS | SOFTMAX_FIELDS | DROPOUT_FIELDS | NUMERICS_FIELDS | {"bias", "pattern", "lse_cotangent"}
"""Optional fields that the kernels honour."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if str(record.logits_dtype) not in ("float32", "bfloat16", "float16"):
        yield f"logits_dtype {record.logits_dtype} is not among bfloat16, float16, float32"
    yield from pattern_refusals(record)


def _function_refusals(record: TiledAttention) -> Iterable[str]:
    """Yields the reasons to refuse a record with functions of pairs, which has evidence of its own."""
    yield from _refusal_reasons(record)
    yield from function_refusals(record)
    arrays = [x for name in ("score_mod", "mask_mod") if (x := getattr(record, name)) is not None]
    words = sum(math.prod(x.shape) for function in arrays for x in jax.eval_shape(loaded_arrays, function))
    if words >= MAX_WORDS:
        yield f"score_mod: got {words} elements of arrays, with those of mask_mod; the kernels reach {MAX_WORDS}"


def _function_backward_refusals(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse the backward pass of a record, such as arrays read by query and key together."""
    yield from _function_refusals(record)
    if record.score_mod is None or scalar_program(record.score_mod).refusals:
        return
    program = scalar_program(record.score_mod)
    loads = [node for n in program.live_nodes(program.result) if (node := program.nodes[n]).operation == "load"]
    if narrow := sorted({node.dtype for node in loads} & {"bfloat16", "float16"}):
        yield f"score_mod: reads an array of {narrow[0]} as it is; the kernels sum gradients of float32"
    program, derivatives = derivatives_by_loads(program)
    yield from (f"score_mod: {reason}" for reason in program.refusals)
    if any(program.reads_both(n) for n in derivatives):
        yield "score_mod: reads an array by query and key together; the kernels sum its gradients by one of them"
    if any("score" in program.reads[n] for n in derivatives):
        yield "score_mod: reads an array by the score; the kernels sum its gradients by query or key"


FIXED_LENGTH = 4096
"""Queries and keys of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(
    record: TiledAttention, device: DeviceInfo, direction: Direction
) -> config.TritonForward | config.TritonBackward:
    """Returns the configuration for all calls in a `batch_invariant` block: that of a long call with positions.

    A chunk of a prompt has positions, which take registers, and must use the same tiles as the whole prompt.
    """
    positions = jax.ShapeDtypeStruct((1, FIXED_LENGTH), jnp.int32)
    record = with_fixed_sizes(record, FAMILY.axes_of(record), {"b": 1, "t": FIXED_LENGTH, "s": FIXED_LENGTH})
    record = dataclasses.replace(record, q_positions=positions, kv_positions=positions)
    return config.heuristic(record, device, direction)


def invariance_limits(record: TiledAttention) -> Iterable[str]:
    """Yields why rows of a record depend on the rest of its call."""
    if record.dropout_prob > 0:
        yield "dropout_prob: which weights are dropped follows from a row's place in the batch"
    if record.pattern is not None:
        yield "pattern: which key tiles are full, and so come first, follows from the other queries of a tile"
    if record.mask is not None:
        yield "mask: which key tiles are full, and so come first, follows from the other queries of a tile"
    if causal_window_bounds(record)[0] is not None:
        yield "a window: which key tiles are full, and so come first, follows from the other queries of a tile"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled, and that of calls with
    `score_mod` or `mask_mod`.
    """
    space = ConfigSpace(
        heuristic=config.heuristic,
        candidates=config.candidates,
        kind=tuning_key_of_large_calls,
        forward=config.TritonForward,
        backward=config.TritonBackward,
        batch_invariant=batch_invariant,
        public_fields=config.PUBLIC_FIELDS,
    )
    plain = triton_implementation(
        "tiled_attention",
        forward="tiled_attention.forward:forward",
        backward="tiled_attention.backward:backward",
        forward_mode="ejkernel_triton.tiled_attention.forward_mode:forward_mode",
        forward_mode_limits=forward_mode.limits,
        gradients=frozenset({"query", "key", "value", "bias", "softmax_aux"}),
        requires=triton_requires(head_dims=range(1, 257), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
        config=space,
        invariant_to=frozenset({"batch", "padding", "chunking"}),
        invariance_limits=invariance_limits,
    )
    handles = HANDLED_FIELDS - {"bias", "mask", "normalize_output", "logits_dtype"} | {"score_mod", "mask_mod"}
    functions = triton_implementation(
        "tiled_attention",
        name="triton_functions",
        forward="tiled_attention.forward:forward",
        backward="tiled_attention.backward:backward",
        gradients=plain.gradients - {"bias"} | {"score_mod"},
        cases="ejkernel_triton.tiled_attention.cases:function_cases",
        requires=triton_requires(head_dims=range(1, 257), handles=handles, extra_reasons=_function_refusals),
        backward_requires=triton_requires(
            head_dims=range(1, 257), handles=handles, extra_reasons=_function_backward_refusals
        ),
        config=dataclasses.replace(space, batch_invariant=None),
    )
    return plain, functions
