"""The interpreter's operators, of which NumPy alone computes those that it has computed like the interpreter."""

from triton_chips import run_interpreted


def test_later_operations_give_the_bits_of_the_first():
    """Arithmetic, comparisons and bits of tiles, rows, scalars, pointers and numbers."""
    run_interpreted("interpreted_operators_process.py")
