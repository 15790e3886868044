"""Records of the paged softmax family: cases of operations, and shapes of models for the compiler."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel.ops.plugins import registry
from ejkernel.types.pair_functions import mask_function, score_function

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""What is compiled here runs once."""
HALF, EIGHT = jnp.bfloat16, jnp.float8_e4m3fn
SMALL = PagedSizes(kv_lens=(70, 5, 33), q_lens=(20, 1, 9), h=8, g=2, d=128, v=128, s=32)


def lowered(op, make, sizes, **fields):
    """The record of a call of an operation."""
    declared = registry().op(op)
    given = {**make(jax.random.key(0), sizes), **fields}
    return declared.lower(declared.arguments(**given))


def case(op, name):
    """The record of a named case."""
    declared = registry().op(op)
    (found,) = (x for x in declared.cases if x.name == name)
    return declared.lower(found.make(jax.random.key(0)))


def _sized(dtype=HALF, **fields):
    return PagedSizes(**{"kv_lens": (70, 5, 33), "q_lens": (20, 1, 9), "s": 32, "dtype": dtype, **fields})


def _v3(sizes, lanes=False, **fields):
    def make(key, sizes):
        return paged_inputs.v3_inputs(key, sizes, in_lanes_layout=lanes)

    return lowered("ragged_page_attention_v3", make, sizes, softmax_scale=None, **fields)


def functions():
    """A `score_mod` of head and distance with values by head and key, and a `mask_mod` of documents."""
    slopes, biases, ids = jnp.ones(32), jnp.ones((32, 128)), jnp.zeros((3, 128), jnp.int32)

    def score(s, b, h, q, k):
        return 20 * jnp.tanh(s / 20) - slopes[h] * jnp.abs(q - k) + biases[h, k]

    return {
        "score_mod": score_function("score_mod", score, jnp.float32),
        "mask_mod": mask_function("mask_mod", lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k >= h)),
    }


SINKS = np.zeros(8, np.float32)
WIDE, SMALL_HEADS = {"h": 32, "g": 8, "d": 128, "v": 128}, {"h": 8, "g": 2, "d": 64, "v": 64}
# Made when they are asked for: collecting tests must not compute anything.
LAYOUTS = {
    "v2": functools.partial(lowered, "ragged_page_attention_v2", paged_inputs.v2_inputs, _sized(**WIDE)),
    "v2, decoding": functools.partial(
        lowered,
        "ragged_page_attention_v2",
        paged_inputs.v2_inputs,
        _sized(**WIDE, kv_lens=(70, 5, 33), q_lens=(1, 1, 1)),
    ),
    "v2, float32, 60": functools.partial(
        lowered,
        "ragged_page_attention_v2",
        paged_inputs.v2_inputs,
        _sized(jnp.float32, h=8, g=1, d=60, v=60),
        sliding_window=9,
        logits_soft_cap=1.5,
        softmax_aux=SINKS,
    ),
    "v2, 256, 16 heads": functools.partial(
        lowered, "ragged_page_attention_v2", paged_inputs.v2_inputs, _sized(h=32, g=16, d=256, v=256)
    ),
    "v3": functools.partial(_v3, _sized(**WIDE), sliding_window=9, logits_soft_cap=1.5),
    "v3, float32": functools.partial(_v3, _sized(jnp.float32, **SMALL_HEADS), softmax_aux=SINKS),
    "v3, lanes": functools.partial(_v3, _sized(**SMALL_HEADS), lanes=True),
    "v3, 8 bits": functools.partial(
        lowered, "ragged_page_attention_v3", paged_inputs.v3_float8_inputs, _sized(h=3, g=3, d=64, v=64)
    ),
    "v3, int8": functools.partial(lowered, "ragged_page_attention_v3", paged_inputs.v3_int8_inputs, _sized(**WIDE)),
    "pages": functools.partial(lowered, "page_attention", paged_inputs.page_inputs, _sized(**WIDE, q_lens=None)),
    "pages, float32": functools.partial(
        lowered, "page_attention", paged_inputs.page_inputs, _sized(jnp.float32, h=8, g=4, d=32, v=32, q_lens=None)
    ),
    "rows of tokens": functools.partial(
        lowered, "decode_attention", paged_inputs.decode_inputs, PagedSizes(kv_lens=(19, 0, 5), h=4, g=4, s=1, v=48)
    ),
    "heads first": functools.partial(
        lowered,
        "prefill_page_attention",
        paged_inputs.prefill_inputs,
        _sized(kv_lens=(200,), q_lens=(150,), h=8, g=2, d=128, v=128),
    ),
    "unified": functools.partial(
        lowered, "unified_attention", paged_inputs.packed_inputs, _sized(**WIDE), causal=False, sliding_window=(9, 3)
    ),
    "v2, slopes and chunks": functools.partial(
        lowered,
        "ragged_page_attention_v2",
        paged_inputs.v2_inputs,
        _sized(**SMALL_HEADS),
        alibi_slopes=SINKS,
        chunk_size=48,
        logits_soft_cap=1.5,
    ),
    "v2, decoding with slopes and chunks": functools.partial(
        lowered,
        "ragged_page_attention_v2",
        paged_inputs.v2_inputs,
        _sized(**WIDE, q_lens=(1, 1, 1)),
        alibi_slopes=np.zeros(32, np.float32),
        chunk_size=48,
    ),
    "v2, a tree and a prefix": functools.partial(
        lowered,
        "ragged_page_attention_v2",
        paged_inputs.v2_inputs,
        _sized(**WIDE),
        qq_bias=np.zeros((3, 20, 20), np.float32),
        shared_prefix=4,
    ),
    "v2, functions": lambda: dataclasses.replace(
        lowered("ragged_page_attention_v2", paged_inputs.v2_inputs, _sized(**WIDE)), **functions()
    ),
    "v2, decoding with functions": lambda: dataclasses.replace(
        lowered("ragged_page_attention_v2", paged_inputs.v2_inputs, _sized(**WIDE, q_lens=(1, 1, 1))), **functions()
    ),
    "unified, a prefix by row": functools.partial(
        lowered,
        "unified_attention",
        paged_inputs.packed_inputs,
        _sized(**SMALL_HEADS),
        qq_bias=np.zeros(600, np.float32),
        shared_prefix=4,
        sliding_window=40,
        alibi_slopes=SINKS,
        logits_soft_cap=1.5,
    ),
    "written apart": functools.partial(
        lowered, "chunked_prefill_paged_decode", paged_inputs.chunked_prefill_inputs, _sized(**WIDE)
    ),
}
"""How to make a record of every way in which a cache lies, by name."""


@functools.cache
def layout(name):
    """The record of a way in which a cache lies."""
    return LAYOUTS[name]()
