"""The shared conformance suite: every discovered implementation, on every case of its operation, against the reference.

    pytest --pyargs ejkernel_conformance [--ejk-impl NAME] [--ejk-op NAME] [--ejk-tag TAG]

`checks`, `claims` and `shards` hold the checks as plain functions that raise `AssertionError`; the test modules, laid
out by transformation, only call them. A test is skipped where dispatch refuses, and says so in dispatch's words.

This package imports neither ejkernel nor JAX by itself: pytest loads its plugin before plugins that instrument
imports, such as jaxtyping's.
"""
