"""Intervals of packed sequences, against a loop over sequences."""

import jax
import numpy as np
import pytest

from ejkernel.families.selective_scan.packed_scan import (
    TOKENS_PER_INTERVAL,
    first_interval_of_sequences,
    make_interval_table,
)


@pytest.mark.parametrize("lengths", [(0, 130, 64, 0, 65), (1, 1, 200), (64, 128), (0, 0, 3, 0)])
def test_scan_intervals_cut_each_sequence_in_order(lengths):
    bounds = np.append(0, np.cumsum(lengths)).astype(np.int32)
    expected = [
        (n, begin, bounds[n + 1], begin == bounds[n], begin + TOKENS_PER_INTERVAL >= bounds[n + 1])
        for n in range(len(lengths))
        for begin in range(bounds[n], bounds[n + 1], TOKENS_PER_INTERVAL)
    ]
    intervals = jax.jit(make_interval_table, static_argnums=1)(bounds, int(bounds[-1]))
    found = list(zip(*(x.tolist() for x in intervals), strict=True))
    assert found[: len(expected)] == expected
    assert all(row[0] == len(lengths) for row in found[len(expected) :])
    assert first_interval_of_sequences(bounds).tolist() == [
        sum(row[0] < n for row in expected) for n in range(len(lengths) + 1)
    ]
