"""Rewrites a `mask_mod` that a window and segment ids can express as those: kernels have faster paths for them.

(documents[b, q_idx] == documents[b, k_idx]) & (documents[b, k_idx] >= 0) & (k_idx <= q_idx)
 ─────────────────────────────────────────      ────────────────────────      ──────────────
 segment ids                                    padding: a negative id        a window
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention.mask_bounds import indices_of_sizes, values_of_nodes
from ejkernel.families.tiled_attention.mask_functions import mask_function_as_window, with_window
from ejkernel.families.tiled_attention.record import TiledAttention, Window
from ejkernel.planning.scalar_programs import ScalarProgram, loaded_arrays, scalar_program

MIDDLE_ID, MAX_ID = 2**30, 2**31 - 1
SIDES = ("q_idx", "k_idx")


def mask_function_as_arguments(record: TiledAttention) -> TiledAttention:
    """Returns the record with a `mask_mod` that is a window, equal ids of documents, conditions on the query or on the
    key alone, or all of these, as a window and segment ids; other records as they are.

    Segment ids keep the order of ids from -2**30 to 2**30. Two ids that differ by exactly 2**31 count as equal.
    """
    record = mask_function_as_window(record)
    windows = _windows_of_terms(record)
    if windows is None:
        return record
    q_ids, k_ids = _segment_ids(record)
    for window in windows:
        record = with_window(record, window)
    return dataclasses.replace(record, mask_mod=None, q_segment_ids=q_ids, kv_segment_ids=k_ids)


def needs_mask_function(record: TiledAttention) -> bool:
    """Returns whether `mask_function_as_arguments` leaves the record a `mask_mod`; its arrays may be abstract."""
    record = mask_function_as_window(record)
    return record.mask_mod is not None and _windows_of_terms(record) is None


def _windows_of_terms(record: TiledAttention) -> tuple[Window, ...] | None:
    """Returns the windows that `mask_mod` has in addition to segment ids; None if it has other terms, too."""
    arguments = (record.q_positions, record.kv_positions, record.q_segment_ids, record.kv_segment_ids)
    if record.mask_mod is None or record.dropout_origin is not None or not all(x is None for x in arguments):
        return None
    program, queries, keys = scalar_program(record.mask_mod), record.query.shape[1], record.key.shape[1]
    if program.refusals or "h" in program.inputs_read or not queries or not keys:
        return None
    of_both = [n for n in program.terms() if program.reads_both(n)]
    others = [n for n in of_both if not _is_equality_of_sides(program, n)]
    windows = [window_of_comparison(program, n) for n in others]
    if len(of_both) - len(others) > 1 or any(x is None for x in windows):
        return None
    return tuple(x for x in windows if x is not None)


def window_of_comparison(program: ScalarProgram, n: int) -> Window | None:
    """Returns (left, right) such that a comparison holds for exactly `-left <= k - q <= right`; None for others."""
    node = program.nodes[n]
    if node.operation not in ("ge", "gt", "le", "lt"):
        return None
    smaller, larger = node.operands if node.operation in ("le", "lt") else node.operands[::-1]
    strict = node.operation in ("gt", "lt")
    if program.nodes[smaller].operation == "abs":
        distance, limit = _linear_form(program, program.nodes[smaller].operands[0]), _linear_form(program, larger)
        if distance is None or limit is None or distance[:2] not in ((-1, 1), (1, -1)) or limit[:2] != (0, 0):
            return None
        offset = distance[1] * distance[2]
        return limit[2] - strict + offset, limit[2] - strict - offset
    left, right = _linear_form(program, smaller), _linear_form(program, larger)
    if left is None or right is None:
        return None
    q_factor, k_factor, offset = (x - y for x, y in zip(left, right, strict=True))
    if (q_factor, k_factor) not in ((-1, 1), (1, -1)):
        return None
    return (None, -offset - strict) if k_factor > 0 else (-offset - strict, None)


def _linear_form(program: ScalarProgram, n: int) -> tuple[int, int, int] | None:
    """Returns a node's factors of `q_idx` and `k_idx` and its constant; None if it is no such sum."""
    node = program.nodes[n]
    if node.dtype != "int32":
        return None
    if node.operation == "constant":
        return 0, 0, node.value
    if node.operation in SIDES:
        return int(node.operation == SIDES[0]), int(node.operation == SIDES[1]), 0
    forms = [_linear_form(program, x) for x in node.operands]
    if node.operation not in ("add", "sub", "neg") or any(x is None for x in forms):
        return None
    signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[node.operation]
    columns = zip(*(form for form in forms if form is not None), strict=True)
    q_factor, k_factor, offset = (sum(s * x for s, x in zip(signs, column, strict=True)) for column in columns)
    return q_factor, k_factor, offset


def _is_equality_of_sides(program: ScalarProgram, n: int) -> bool:
    """Returns whether a node compares a number of the query with one of the key."""
    node = program.nodes[n]
    sides = [program.reads[x] & set(SIDES) for x in node.operands]
    integers = all(program.nodes[x].dtype == "int32" for x in node.operands)
    return node.operation == "eq" and integers and sorted(map(tuple, sides)) == sorted((side,) for side in SIDES)


def _segment_ids(record: TiledAttention) -> tuple[jax.Array, jax.Array]:
    """Returns the segment ids of queries and keys, int32 [B, T] and [B, S]."""
    function, (batch, queries, heads, _), keys = record.mask_mod, record.query.shape, record.key.shape[1]
    assert function is not None  # the caller looked
    program = scalar_program(function)
    equal = [n for n in program.terms() if _is_equality_of_sides(program, n)]
    terms = [n for n in program.terms() if not program.reads_both(n)]
    compared = [x for n in equal for x in program.nodes[n].operands]
    live = sorted(set().union(*(program.live_nodes(n) for n in (*terms, *compared))))
    values = values_of_nodes(program, live, indices_of_sizes((batch, heads, queries, keys)), loaded_arrays(function))
    ids = []
    for side, length in zip(SIDES, (queries, keys), strict=True):
        found = jnp.zeros((1, 1, 1, 1), jnp.int32)
        for n in compared:
            found = (values[n] + MIDDLE_ID) & MAX_ID if side in program.reads[n] else found
        for n in terms:
            found = found if program.reads[n] & (set(SIDES) - {side}) else jnp.where(values[n], found, -1)
        ids.append(jnp.broadcast_to(found.reshape(found.shape[0], -1), (batch, length)))
    return ids[0], ids[1]
