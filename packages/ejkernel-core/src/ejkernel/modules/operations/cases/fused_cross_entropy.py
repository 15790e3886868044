"""Inputs for `fused_cross_entropy`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import Row, fill, normal_like, table
from ejkernel.ops.model import Case


class Sizes(NamedTuple):
    """Axes of the tokens, entries of the vocabulary, channels of hidden states (None for logits) and the dtype."""

    tokens: tuple[int, ...]
    entries: int
    channels: int | None = None
    dtype: Any = jnp.float32


def _make_inputs_of_sizes(key: jax.Array, sizes: Sizes) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    targets = jax.random.randint(keys[0], sizes.tokens, 0, sizes.entries)
    if sizes.channels is None:
        logits = 3 * jax.random.normal(keys[1], (*sizes.tokens, sizes.entries))
        return {"logits": logits.astype(sizes.dtype), "targets": targets}
    head = 2 * jax.random.normal(keys[1], (sizes.channels, sizes.entries)) / sizes.channels**0.5
    hidden = jax.random.normal(keys[2], (*sizes.tokens, sizes.channels))
    return {"hidden": hidden.astype(sizes.dtype), "lm_head_weight": head.astype(sizes.dtype), "targets": targets}


def _soft_targets_maker(tokens: tuple[int, ...], entries: int) -> Any:
    """Returns a maker of distributions in the place of targets."""

    def make(key: jax.Array) -> dict[str, Any]:
        return {"targets": None, "soft_targets": jax.nn.softmax(2 * jax.random.normal(key, (*tokens, entries)))}

    return make


def _padding_mask(key: jax.Array) -> dict[str, Any]:
    """Returns a mask of padding at the rows' ends, as packing leaves it."""
    return {"attention_mask": jnp.arange(12) < jnp.array([[12], [7], [0]])}


def _weight_arguments(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 2)
    return {"weights": jax.random.uniform(keys[0], (3, 12)), "lm_head_bias": jax.random.normal(keys[1], (67,))}


_ROWS: tuple[Row[Sizes], ...] = (
    ("logits, mean", Sizes((3, 12), 50), lambda key: {}, ("sum_over_tokens",), ()),
    ("logits, each", Sizes((40,), 33), lambda key: {"reduction": "none", "z_loss": 1e-2}, ("z_loss",), ()),
    ("logits, soft", Sizes((2, 9), 40), _soft_targets_maker((2, 9), 40), ("soft_targets",), ()),
    ("head", Sizes((3, 12), 67, 16), _weight_arguments, ("lm_head", "lm_head_bias", "sum_over_tokens"), ()),
    (
        "head, padding",
        Sizes((3, 12), 67, 24),
        lambda key: {"reduction": "none", "label_smoothing": 0.1, **_padding_mask(key)},
        ("lm_head", "label_smoothing"),
        (),
    ),
    (
        "head, capped",
        Sizes((36,), 65, 16),
        lambda key: {"logit_softcap": 5.0, "z_loss": 1e-3, "reduction": "sum"},
        ("lm_head", "logits_soft_cap", "z_loss"),
        (),
    ),
    (
        "head, soft, in blocks",
        Sizes((30,), 45, 16),
        lambda key: {
            "label_smoothing": 0.2,
            "chunk_size": 16,
            "chunk_strategy": "block",
            **_soft_targets_maker((30,), 45)(key),
        },
        ("lm_head", "soft_targets", "label_smoothing"),
        ("awkward",),
    ),
    ("head, bfloat16", Sizes((2, 64), 256, 64, jnp.bfloat16), lambda key: {}, ("lm_head",), ()),
    ("head, float16, each", Sizes((64,), 130, 64, jnp.float16), lambda key: {"reduction": "none"}, ("lm_head",), ()),
    ("logits, bfloat16", Sizes((2, 32), 200, None, jnp.bfloat16), lambda key: {}, ("sum_over_tokens",), ()),
    ("Llama 3", Sizes((4, 8192), 128256, 4096, jnp.bfloat16), lambda key: {}, ("lm_head",), ("bench",)),
    ("logits of Llama 3", Sizes((8192,), 128256, None, jnp.bfloat16), lambda key: {}, ("sum_over_tokens",), ("bench",)),
    ("small model", Sizes((2, 1024), 16000, 512), lambda key: {}, ("lm_head",), ("bench_cpu",)),
)


def cases(arguments: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return table(arguments, _make_inputs_of_sizes, _ROWS)


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

    return fill(args, key, make)
