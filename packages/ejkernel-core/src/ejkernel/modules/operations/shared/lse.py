"""`return_lse`, an argument of every operation of softmax attention.

    lse_i = log(exp(sink) + sum_j exp(s_ij))      natural logarithm; s_ij as the softmax sees it

It is what attention to other keys can be merged with, and what a penalty on large scores wants. -inf where a row has
nothing to attend and no sink. Dropout leaves it alone.
"""

from typing import Any

WithLse = Any
"""The result of calls with `return_lse=True`: `(output, lse)` and further results. Type checkers see `Any`, because
calls without `return_lse` return an array.
"""


def with_lse(args: Any, output: Any, lse: Any, *others: Any) -> Any:
    """Returns the result of a public function: the output, lse if `return_lse` is True, and the other results."""
    results = (output, *((lse,) if args.return_lse else ()), *others)
    return results if len(results) > 1 else output


def split_output_and_lse(args: Any, value: Any) -> tuple[Any, Any]:
    """Returns the output of tiled attention and its lse, out of what the family's call returned; no lse is None."""
    return value if args.return_lse else (value, None)
