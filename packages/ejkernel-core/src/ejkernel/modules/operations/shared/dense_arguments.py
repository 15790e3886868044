"""Checks of the optional arguments of attention over dense keys."""

from typing import Any

import jax.numpy as jnp

from ejkernel.modules.operations.shared.shapes import check_dtype, check_not_empty, check_shape, got
from ejkernel.types import MaskInfo


def check_relative_bias(args: Any, sizes: dict[str, int]) -> None:
    """Checks the table of biases by distance.

    Raises:
        ValueError: It is wrong on every backend.
    """
    if args.relative_bias is None:
        return
    check_shape("relative_bias", args.relative_bias, "H R", sizes)
    check_dtype("relative_bias", args.relative_bias, jnp.floating, "a floating dtype")
    if not args.relative_bias.shape[1] % 2:
        raise ValueError(f"relative_bias: got shape {args.relative_bias.shape}, wants [H, 2 R + 1]")
    placed = [name for name in ("q_positions", "kv_positions") if getattr(args.mask_info, name, None) is not None]
    if placed or args.cum_seqlens_k is not None:
        other = f"mask_info.{placed[0]}" if placed else "cum_seqlens_k"
        raise ValueError(
            f"relative_bias: got a value with {other}, wants only one of them: it is indexed by distances of indices, "
            "not of positions"
        )


def check_cum_seqlens(args: Any, sizes: dict[str, int]) -> None:
    """Checks the cumulative lengths of packed sequences.

    Raises:
        ValueError: It is wrong on every backend.
    """
    if args.cum_seqlens_q is None and args.cum_seqlens_k is None:
        return
    if args.cum_seqlens_q is None:
        raise ValueError("cum_seqlens_q: got None with cum_seqlens_k given, wants both or cum_seqlens_q alone")
    if args.cum_seqlens_k is None and sizes["T"] != sizes["S"]:
        raise ValueError(f"cum_seqlens_k: got None with {sizes['T']} queries and {sizes['S']} keys, wants [N + 1] ints")
    known = {"B+1": sizes["B"] + 1}
    for name in ("cum_seqlens_q", "cum_seqlens_k"):
        array = getattr(args, name)
        if array is not None:
            check_shape(name, array, "N+1" if sizes["B"] == 1 else "B+1", known)
            check_not_empty(name, array, "N+1", "N+1")
            check_dtype(name, array, jnp.integer, "an integer dtype")


def check_mask_info(mask_info: Any, sizes: dict[str, int]) -> None:
    """Checks the arrays of a `MaskInfo`.

    Raises:
        ValueError: It is wrong on every backend.
    """
    if not isinstance(mask_info, MaskInfo | None):
        raise ValueError(f"mask_info: got {got(mask_info)}, wants a MaskInfo")
    wants = {
        "explicit_mask": "B H T S",
        "explicit_q_segment_ids": "B T",
        "explicit_kv_segment_ids": "B S",
        "q_positions": "B T",
        "kv_positions": "B S",
    }
    for name, axes in wants.items():
        array = getattr(mask_info, name, None)
        if array is not None:
            label = "attention_mask" if name == "explicit_mask" else name.removeprefix("explicit_")
            check_shape(f"mask_info.{label}", array, axes, dict(sizes), broadcast=axes if "H" in axes else "B")


def check_dropout_seed(args: Any) -> None:
    """Checks the seed of dropout.

    Raises:
        ValueError: It is wrong on every backend.
    """
    if args.dropout_seed is None:
        return
    wants = "an int, or an integer array of shape ()"
    if jnp.ndim(args.dropout_seed) or not hasattr(args.dropout_seed, "dtype"):
        raise ValueError(f"dropout_seed: got {got(args.dropout_seed)}, wants {wants}")
    check_dtype("dropout_seed", args.dropout_seed, jnp.integer, wants)
