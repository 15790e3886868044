"""Reads windows off `mask_mod`: keys outside of them need not be copied.

(k_idx >= starts[b]) & (k_idx <= q_idx) & (q_idx - k_idx < 1024)
 ──────────────────     ────────────────────────────────────────
 stays a function       windows
"""

import dataclasses

from ejkernel.families.paged_attention.record import PagedAttention
from ejkernel.families.tiled_attention.mask_terms import window_of_comparison
from ejkernel.planning.scalar_programs import scalar_program

MAX_WINDOW_SIDE = 2**30
"""Positions plus a side up to here do not overflow int32."""


def with_windows_of_function(record: PagedAttention) -> PagedAttention:
    """Returns the record with the windows among the terms of `mask_mod` in its sliding window, and without a `mask_mod`
    that has no other terms.
    """
    if record.mask_mod is None:
        return record
    program = scalar_program(record.mask_mod)
    if program.refusals:
        return record
    (left, right), are_windows = record.sliding_window or (None, None), True
    for n in program.terms():
        window = window_of_comparison(program, n)
        if window is None or not all(side is None or 0 <= side < MAX_WINDOW_SIDE for side in window):
            are_windows = False
            continue
        left, right = (_narrower(x, y) for x, y in zip((left, right), window, strict=True))
    window = None if (left, right) == (None, None) else (left, right)
    return dataclasses.replace(record, mask_mod=None if are_windows else record.mask_mod, sliding_window=window)


def _narrower(x: int | None, y: int | None) -> int | None:
    return y if x is None else x if y is None else min(x, y)
