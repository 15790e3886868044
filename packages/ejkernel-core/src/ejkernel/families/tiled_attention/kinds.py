"""The kind of a call of tiled attention. Calls of one kind share an entry in a table of measured configurations."""

from collections.abc import Callable

import jax.numpy as jnp

from ejkernel.families.tiled_attention.record import TiledAttention, causal_window_bounds

KIBI = 1024


def padded_head_dim(size: int) -> int:
    """Returns head size as most kernels pad it: a power of two from 16 on."""
    return max(16, 1 << (size - 1).bit_length())


def call_kind(record: TiledAttention, pad_head_dim: Callable[[int], int] = padded_head_dim) -> str:
    """Returns sizes in coarse steps, the kind of mask, and what else there is to compute of a score.

    Args:
        record: The arguments of a call.
        pad_head_dim: What a backend's kernels make of a head size: calls that they see alike share an entry.
    """
    (_, t, _, d), s, dv = record.query.shape, record.key.shape[1], record.value.shape[3]
    extras = {
        "segments": record.q_segment_ids is not None,
        "positions": record.q_positions is not None or record.kv_positions is not None,
        "mask": record.mask is not None,
        "pattern": record.pattern is not None,
        "score_mod": record.score_mod is not None,
        "mask_mod": record.mask_mod is not None,
        "bias": record.bias is not None,
        "cap": record.logits_soft_cap is not None,
        "dropout": record.dropout_prob > 0.0,
        "rounded": record.logits_dtype != jnp.float32,
        "numerator": not record.normalize_output,
        str(record.precision): record.precision is not None,
    }
    bits = 8 * jnp.dtype(record.query.dtype).itemsize  # bfloat16 and float16 move and multiply alike
    words = (
        f"{bits} bits",
        f"{pad_head_dim(d)}x{pad_head_dim(dv)}",
        f"{_length_class(t)}x{_length_class(s)}",
        _mask_class(record),
    )
    return " ".join((*words, *(name for name, present in extras.items() if present)))


def tuning_key_of_large_calls(record: TiledAttention) -> str | None:
    """Returns the kind of a call with enough work to fill a large GPU; None for smaller calls, whose best tiles depend
    on their shapes.
    """
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    return None if b * h * t < 2**18 or min(t, s) < KIBI else call_kind(record)


def _length_class(length: int) -> str:
    return "short" if length <= 4 * KIBI else "medium" if length <= 16 * KIBI else "long"


def _mask_class(record: TiledAttention) -> str:
    left, right = causal_window_bounds(record)
    if left is None and right is None:
        return "full"
    if left is None or right is None:
        return "causal" if left is None and right == 0 else "half-open"
    return f"window<={1 << (left + right).bit_length()}"
