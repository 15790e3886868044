"""Inputs for `fused_cross_entropy`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import Row, fill_arguments, make_cases_of_rows, normal_like
from ejkernel.ops.model import Case


class CrossEntropySizes(NamedTuple):
    """Axes of the tokens, entries of the vocabulary, channels of hidden states (None for logits) and the dtype."""

    tokens: tuple[int, ...]
    vocab_size: int
    num_channels: int | None = None
    dtype: Any = jnp.float32


def _make_inputs_of_sizes(key: jax.Array, sizes: CrossEntropySizes) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    targets = jax.random.randint(keys[0], sizes.tokens, 0, sizes.vocab_size)
    if sizes.num_channels is None:
        logits = 3 * jax.random.normal(keys[1], (*sizes.tokens, sizes.vocab_size))
        return {"logits": logits.astype(sizes.dtype), "targets": targets}
    head = 2 * jax.random.normal(keys[1], (sizes.num_channels, sizes.vocab_size)) / sizes.num_channels**0.5
    hidden = jax.random.normal(keys[2], (*sizes.tokens, sizes.num_channels))
    return {"hidden": hidden.astype(sizes.dtype), "lm_head_weight": head.astype(sizes.dtype), "targets": targets}


def _soft_targets_maker(tokens: tuple[int, ...], vocab_size: int) -> Any:
    """Returns a maker of distributions in the place of targets."""

    def make(key: jax.Array) -> dict[str, Any]:
        return {"targets": None, "soft_targets": jax.nn.softmax(2 * jax.random.normal(key, (*tokens, vocab_size)))}

    return make


def _padding_mask(key: jax.Array) -> dict[str, Any]:
    """Returns a mask of padding at the rows' ends, as packing leaves it."""
    return {"attention_mask": jnp.arange(12) < jnp.array([[12], [7], [0]])}


def _weight_arguments(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 2)
    return {"weights": jax.random.uniform(keys[0], (3, 12)), "lm_head_bias": jax.random.normal(keys[1], (67,))}


_CASE_TABLE: tuple[Row[CrossEntropySizes], ...] = (
    ("logits, mean", CrossEntropySizes((3, 12), 50), lambda key: {}, ("sum_over_tokens",), ()),
    ("logits, each", CrossEntropySizes((40,), 33), lambda key: {"reduction": "none", "z_loss": 1e-2}, ("z_loss",), ()),
    ("logits, soft", CrossEntropySizes((2, 9), 40), _soft_targets_maker((2, 9), 40), ("soft_targets",), ()),
    ("head", CrossEntropySizes((3, 12), 67, 16), _weight_arguments, ("lm_head", "lm_head_bias", "sum_over_tokens"), ()),
    (
        "head, padding",
        CrossEntropySizes((3, 12), 67, 24),
        lambda key: {"reduction": "none", "label_smoothing": 0.1, **_padding_mask(key)},
        ("lm_head", "label_smoothing"),
        (),
    ),
    (
        "head, capped",
        CrossEntropySizes((36,), 65, 16),
        lambda key: {"logit_softcap": 5.0, "z_loss": 1e-3, "reduction": "sum"},
        ("lm_head", "logits_soft_cap", "z_loss", "sum_over_tokens"),
        (),
    ),
    (
        "head, soft, in blocks",
        CrossEntropySizes((30,), 45, 16),
        lambda key: {
            "label_smoothing": 0.2,
            "chunk_size": 16,
            "chunk_strategy": "block",
            **_soft_targets_maker((30,), 45)(key),
        },
        ("lm_head", "soft_targets", "label_smoothing"),
        ("awkward",),
    ),
    ("head, bfloat16", CrossEntropySizes((2, 64), 256, 64, jnp.bfloat16), lambda key: {}, ("lm_head",), ()),
    (
        "head, float16, each",
        CrossEntropySizes((64,), 130, 64, jnp.float16),
        lambda key: {"reduction": "none"},
        ("lm_head",),
        (),
    ),
    ("logits, bfloat16", CrossEntropySizes((2, 32), 200, None, jnp.bfloat16), lambda key: {}, ("sum_over_tokens",), ()),
    ("Llama 3", CrossEntropySizes((4, 8192), 128256, 4096, jnp.bfloat16), lambda key: {}, ("lm_head",), ("bench",)),
    (
        "logits of Llama 3",
        CrossEntropySizes((8192,), 128256, None, jnp.bfloat16),
        lambda key: {},
        ("sum_over_tokens",),
        ("bench",),
    ),
    ("small model", CrossEntropySizes((2, 1024), 16000, 512), lambda key: {}, ("lm_head",), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, _make_inputs_of_sizes, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call."""
    head, logits = args.lm_head_weight, args.logits
    entries = logits.shape[-1] if head is None else head.shape[-1]

    def make(name: str, x: Any, key: jax.Array) -> jax.Array:
        if name == "targets":
            return jax.random.randint(key, x.shape, 0, entries).astype(x.dtype)
        if name == "soft_targets":
            return jax.nn.softmax(jax.random.normal(key, x.shape)).astype(x.dtype)
        if name == "attention_mask":
            return jnp.ones(x.shape, x.dtype)
        factor = x.shape[0] ** -0.5 if name == "lm_head_weight" else 1.0
        return jnp.abs(normal_like(key, x)) if name == "weights" else normal_like(key, x, factor)

    return fill_arguments(args, key, make)
