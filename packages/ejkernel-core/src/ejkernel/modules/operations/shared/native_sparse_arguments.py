"""Checks of the blocks, lengths and pages of a call of native sparse attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.modules.operations.shared.listed_keys import check_request_pages
from ejkernel.modules.operations.shared.shapes import (
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
    got,
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticBlockCount:
    """A number of blocks that is static, since array shapes depend on it."""

    count: int


def check_listed_blocks(args: Any, sizes: dict[str, int]) -> None:
    """Checks which blocks are listed, or how many are selected.

    Raises:
        ValueError: They are wrong on every backend.
    """
    if args.block_indices is None:
        if args.g_cmp is None:
            raise ValueError(
                "block_indices: got None with g_cmp None, wants one of the two, which select the blocks to read"
            )
        if not isinstance(args.block_counts, StaticBlockCount):
            raise ValueError(
                f"block_counts: got {got(args.block_counts)} with block_indices None, wants an int: how many blocks "
                f"are selected is the size of an array"
            )
        return
    check_shape("block_indices", args.block_indices, "B T Hk K", sizes)
    check_dtype("block_indices", args.block_indices, jnp.integer, "an integer dtype")
    if not isinstance(args.block_counts, StaticBlockCount):
        check_shape("block_counts", args.block_counts, "B T Hk", sizes)
        check_dtype("block_counts", args.block_counts, jnp.integer, "an integer dtype")


def check_sequence_lengths(args: Any, sizes: dict[str, int]) -> None:
    """Checks the lengths of sequences, and the pages of requests.

    Raises:
        ValueError: They are wrong on every backend.
    """
    rows_are_requests = args.kv_lens is not None or args.block_tables is not None
    if args.cu_seqlens_k is not None and (rows_are_requests or args.cu_seqlens is None):
        other = "cu_seqlens None" if args.cu_seqlens is None else "kv_lens or block_tables"
        wants = "both or cu_seqlens alone" if args.cu_seqlens is None else "None, and the lengths in kv_lens"
        raise ValueError(f"cu_seqlens_k: got an array with {other}, wants {wants}")
    has_key_lengths = rows_are_requests or args.cu_seqlens_k is not None
    if args.cu_seqlens is not None and not has_key_lengths and sizes["T"] != sizes["S"]:
        raise ValueError(f"cu_seqlens_k: got None with {sizes['T']} queries and {sizes['S']} keys, wants lengths")
    is_packed = sizes["B"] == 1 and not rows_are_requests
    known = {"B+1": sizes["B"] + 1}
    for name in ("cu_seqlens", "cu_seqlens_k"):
        lengths = getattr(args, name)
        if lengths is not None:
            check_shape(name, lengths, "N+1" if is_packed else "B+1", known)
            check_dtype(name, lengths, jnp.integer, "an integer dtype")
            if lengths.shape[0] < 2 and is_packed:
                raise ValueError(f"{name}: got shape {lengths.shape}, wants [N + 1] with at least 1 sequence")
    if args.block_tables is not None:
        check_request_pages(args.block_tables, args.kv_lens, args.key, sizes)
        check_not_empty("block_tables", args.block_tables, "B N", "N")
    elif args.kv_lens is not None:
        check_shape("kv_lens", args.kv_lens, "B", sizes)
        check_dtype("kv_lens", args.kv_lens, jnp.integer, "an integer dtype")


def check_compressed_blocks(args: Any, sizes: dict[str, int]) -> None:
    """Checks `compressed_key` and `compressed_value`, after `check_sequence_lengths`.

    Raises:
        ValueError: They are wrong on every backend.
    """
    names = ("compressed_key", "compressed_value")
    given = [name for name in names if getattr(args, name) is not None]
    if not given:
        return
    if len(given) == 1 or args.g_cmp is None:
        missing = "g_cmp" if args.g_cmp is None else next(name for name in names if name not in given)
        raise ValueError(f"{given[0]}: got an array with {missing} None, wants compressed_key, compressed_value, g_cmp")
    rows = "B"
    if args.block_tables is not None:
        rows = "P"
        if sizes["S"] % args.block_size:
            raise ValueError(
                f"block_size: got {args.block_size} with compressed_key and pages of {sizes['S']} tokens, wants a "
                "divisor"
            )
    known = sizes | {"M": _num_blocks(args, sizes)}
    for name, size in zip(names, "DV", strict=True):
        check_shape(name, getattr(args, name), f"{rows} M Hk {size}", known)
    check_same_dtype({"query": args.query, **{name: getattr(args, name) for name in names}})


def _num_blocks(args: Any, sizes: dict[str, int]) -> int:
    """Returns the number of blocks of a row or a page; for packed sequences, the largest number possible."""
    keys, size = sizes["S"], args.block_size
    if sizes["B"] > 1 or args.cu_seqlens is None or args.kv_lens is not None or args.block_tables is not None:
        return cdiv(keys, size)
    lengths = args.cu_seqlens if args.cu_seqlens_k is None else args.cu_seqlens_k
    return min(keys, (keys + (lengths.shape[0] - 1) * (size - 1)) // size)
