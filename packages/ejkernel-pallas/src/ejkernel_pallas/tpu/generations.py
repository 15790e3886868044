"""What generations of chips differ in where kernels and tiles do, by words in the kinds of devices."""


def is_wide(kind: str) -> bool:
    """Returns whether matrix units multiply 256 by 256 numbers at a time: on v6e and v7x."""
    return "v6" in kind or is_v7x(kind)


def is_v7x(kind: str) -> bool:
    """Returns whether it is v7x.

    Its matrix units keep sums; it copies keys about as fast as it decodes with them; and the compiler takes twice as
    long for large products.
    """
    return "7x" in kind
