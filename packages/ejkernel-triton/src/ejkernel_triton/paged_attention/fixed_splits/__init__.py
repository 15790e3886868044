"""Splits of a fixed number of keys, in a `batch_invariant` block."""
