"""Determines the request that each entry of a call's arrays belongs to.

A family whose calls serve several requests describes their *owners* by axis letters, those of `Family.axes`:

    {"b t": [B, T] ints, "n": [N] ints}       every token's request, and that of every packed sequence's state

An array has the owners of the key with the most letters that are all among its axes and whose sizes are the array's.
A field's name, or `"output.1"` for one of the outputs, is a key for that array alone, whose owners broadcast to it.
Arrays that no key fits are shared. Requests are numbered from 0 on; negative owners say that an entry is none's:
"""

from typing import Any

import numpy as np

PADDING = -1
"""The owner of padding. The output and the gradient of padding are 0, even if padding holds NaN."""

SHARED = -2
"""The owner of arrays that several requests read, such as weights. Their gradient is the sum over all requests."""

UNUSED = -3
"""Memory that no request reads, such as the free slots of a cache: it may hold anything, and keeps it."""


def packed_owners(cu_seqlens: Any, tokens: int) -> np.ndarray:
    """Returns the packed sequence of every token of a row, [1, T]; `PADDING` for padding tokens."""
    bounds, token = np.asarray(cu_seqlens), np.arange(tokens)
    owners = np.searchsorted(bounds[1:], token, side="right")
    return np.where((token >= bounds[0]) & (token < bounds[-1]), owners, PADDING)[None]


def segment_owners(segment_ids: Any) -> np.ndarray:
    """Returns a request for every row and segment id of [B, T]; `PADDING` for padding."""
    ids = np.asarray(segment_ids).astype(np.int64)
    known = np.unique(ids)
    row = np.arange(ids.shape[0])[:, None]
    return np.where(ids >= 0, row * known.size + np.searchsorted(known, ids), PADDING)


def slot_owners(indices: Any, cu_seqlens: Any, slots: int) -> np.ndarray:
    """Returns the packed sequence whose state every slot holds, [S]; every other slot is a separate request."""
    indices, bounds = np.asarray(indices), np.asarray(cu_seqlens)
    lengths = bounds[1:] - bounds[:-1]
    owners = lengths.size + np.arange(slots)
    for sequence in np.flatnonzero((indices >= 0) & (indices < slots) & (lengths > 0)):
        owners[indices[sequence]] = sequence
    return owners


def common_owner_or_shared(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the owner of pairs where both have the same one, `SHARED` elsewhere; the arrays broadcast."""
    return np.where(one == other, one, SHARED)


def claim_entries(owners: np.ndarray, at: Any, request: Any) -> None:
    """Gives entries of an array of owners, `UNUSED` at first, to requests: those of two requests are `SHARED`."""
    free = owners[at] == UNUSED
    owners[at] = np.where(free | (owners[at] == request), request, SHARED)


def packed_requests(cu_seqlens: Any, tokens: int, states: Any = None, state_slots: Any = None) -> dict[str, np.ndarray]:
    """Returns the owners of a row of packed sequences whose states are separate arrays or in slots."""
    owners = {"b t": packed_owners(cu_seqlens, tokens)}
    if states is None or state_slots is None:
        sequences = np.arange(np.asarray(cu_seqlens).size - 1)
    else:
        sequences = slot_owners(state_slots, cu_seqlens, states.shape[0])
    # The families name the axis of final states `b`.
    return {**owners, "n": sequences, "r": sequences, "b": sequences}
