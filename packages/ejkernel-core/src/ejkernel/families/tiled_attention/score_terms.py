"""Rewrites a `score_mod` that is a soft cap as the argument `logits_soft_cap`, for which kernels have a faster path.

cap * tanh(score / cap)      a product of a constant and the tanh of the score over the same constant
"""

import dataclasses

from ejkernel.families.tiled_attention.mask_terms import mask_function_as_arguments
from ejkernel.families.tiled_attention.record import TiledAttention
from ejkernel.planning.scalar_programs import ScalarProgram, scalar_program

MAX_RELATIVE_DIFFERENCE = 2.0**-22
"""At most this relative difference of the two constants counts as rounding: rounding a number and its reciprocal to
float32 gives less than half of it."""
MIN_CAP = 2.0**-60
"""Caps below it, and above its reciprocal, are kept as functions: kernels multiply by the reciprocal, in float32."""


def functions_as_arguments(record: TiledAttention) -> TiledAttention:
    """Returns the record with the functions of pairs that arguments can express as those arguments."""
    return mask_function_as_arguments(score_function_as_soft_cap(record))


def score_function_as_soft_cap(record: TiledAttention) -> TiledAttention:
    """Returns the record with a `score_mod` that is a soft cap as `logits_soft_cap`; other records as they are.

    The soft cap of a call comes before its `score_mod`, so a call that has both keeps both. A function that captures
    arrays is kept, too: their gradients are those of the function. So is one after a term that may be -inf, which the
    argument masks and the function maps to `-cap`.
    """
    others = (getattr(record, name) for name in ("logits_soft_cap", "bias", "relative_bias", "alibi_slopes"))
    if record.score_mod is None or record.score_mod.captured or any(x is not None for x in others):
        return record
    cap = soft_cap_of_program(scalar_program(record.score_mod))
    return record if cap is None else dataclasses.replace(record, score_mod=None, logits_soft_cap=cap)


def soft_cap_of_program(program: ScalarProgram) -> float | None:
    """Returns the positive number `cap` if a program computes `cap * tanh(score / cap)`, otherwise None."""
    if program.refusals:
        return None
    is_tanh = program.nodes[program.result].operation == "tanh"  # a factor of 1 is no node
    product = (1.0, program.result) if is_tanh else _constant_and_other(program, program.result, "mul")
    if product is None or program.nodes[product[1]].operation != "tanh":
        return None
    cap, (argument,) = product[0], program.nodes[product[1]].operands
    divisor = _divisor_of_score(program, argument)
    if divisor is None or not MIN_CAP < cap < 1 / MIN_CAP or not abs(divisor - cap) <= MAX_RELATIVE_DIFFERENCE * cap:
        return None
    return cap


def _divisor_of_score(program: ScalarProgram, n: int) -> float | None:
    """Returns the number by which a node divides the score: 1 for the score itself, None for other nodes."""
    node = program.nodes[n]
    if node.operation == "score":
        return 1.0
    if node.operation == "div":
        score, divisor = (program.nodes[x] for x in node.operands)
        is_division = score.operation == "score" and divisor.operation == "constant"
        return float(divisor.value) if is_division else None
    factor = _constant_and_other(program, n, "mul")
    if factor is None or program.nodes[factor[1]].operation != "score" or factor[0] == 0:
        return None
    return 1.0 / factor[0]


def _constant_and_other(program: ScalarProgram, n: int, operation: str) -> tuple[float, int] | None:
    """Returns the constant operand of a float32 operation with two operands, and the other one's node; None if there is
    no constant.
    """
    node = program.nodes[n]
    if node.operation != operation or node.dtype != "float32":
        return None
    for x, other in (node.operands, node.operands[::-1]):
        if program.nodes[x].operation == "constant":
            return float(program.nodes[x].value), other
    return None
