"""Finds what a `ScalarProgram` computes from the difference of a query's and a key's index."""

import functools
from typing import NamedTuple

from ejkernel.planning.scalar_programs import ScalarProgram


class ScaledDifference(NamedTuple):
    """A number of the difference of indices, times a number that no index of a query or key changes.

    Attributes:
        difference: The node of the first number.
        factor: The node of the second one.
        is_subtracted: Whether the score has their product subtracted; otherwise it is added.
    """

    difference: int
    factor: int
    is_subtracted: bool


@functools.lru_cache(maxsize=256)
def nodes_of_difference(program: ScalarProgram) -> tuple[dict[int, bool], frozenset[int]]:
    """Returns the differences of the query's and the key's index, with whether the key is the first operand; and the
    nodes that depend on both indices by these differences alone.
    """
    nodes, differences, dependent = program.nodes, dict[int, bool](), set[int]()
    for n, node in enumerate(nodes):
        if node.operation == "sub" and {nodes[x].operation for x in node.operands} == {"q_idx", "k_idx"}:
            differences[n] = nodes[node.operands[0]].operation == "k_idx"
        others = [x for x in node.operands if x not in dependent]
        is_dependent = len(others) < len(node.operands)
        if n in differences or (is_dependent and all(program.reads[x] <= {"b", "h"} for x in others)):
            dependent.add(n)
    return differences, frozenset(dependent)


def scaled_difference(program: ScalarProgram) -> ScaledDifference | None:
    """Returns what a program adds to the score, or subtracts from it, if it does nothing else and this is a scaled
    difference: ALiBi and its kind.
    """
    result, nodes = program.nodes[program.result], program.nodes
    scores = [x for x in result.operands if nodes[x].operation == "score"]
    if result.operation not in ("add", "sub") or result.dtype != "float32" or len(scores) != 1:
        return None
    left, right = result.operands
    if result.operation == "sub" and right == scores[0]:
        return None
    product = right if left == scores[0] else left
    if nodes[product].operation != "mul":
        return None
    _, dependent = nodes_of_difference(program)
    for difference, factor in (nodes[product].operands, nodes[product].operands[::-1]):
        if difference in dependent and program.reads[factor] <= {"b", "h"}:
            return ScaledDifference(difference, factor, result.operation == "sub")
    return None
