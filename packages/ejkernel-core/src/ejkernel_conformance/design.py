"""Lists what each test of the suite covers, for the covering designs of `--ejk-cover=first` and `--ejk-cover=stronger`.

In the first, appear at least once, each where some test has it:

- each operation with each implementation, under each transform (a test function is a transform) except `IN_ROTATION`;
- each implementation under each transform of `IN_ROTATION`;
- each argument that an implementation handles, with each transform, on whichever operation;
- each pair of such arguments that one case gives, in a value and in a gradient, and each dtype with each transform;
- each array of ids, lengths, tables or slots with each kernel, where requests are poisoned;
- each argument of a family that some implementation claims to handle;
- each other claim, each gradient that is claimed, and the candidates of each direction.

In the stronger one, in addition:

- each operation with each implementation under each transform, and each claim;
- each implementation on each case, in a value, a gradient, and each other transform that is not `IN_ROTATION`;
- each pair of handled arguments with each transform;
- each implementation on each case under `TRANSFORMS_PER_CASE` of those that are, which the cases get in turn.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence, Set
from typing import Any

from ejkernel.types.arguments import array_fields, non_default_fields
from ejkernel_conformance.covering import Candidate, cover, pairs
from ejkernel_conformance.running import is_floating
from ejkernel_conformance.selection import Tunable
from ejkernel_conformance.subjects import Subject, abstract_record

PAIRED_TRANSFORMS = ("test_value", "test_gradients")
"""The transforms in which arguments appear in pairs: what others do to a call does not depend on two of them."""

OF_REQUESTS = ("test_requests", "test_request_gradients")
"""The transforms that only the arrays matter to which say where requests lie: ids, lengths, tables and slots."""

IN_ROTATION = (
    "test_vmap",
    "test_shard",
    "test_eager_equals_jit",
    "test_requests",
    "test_request_gradients",
    "test_padding",
    "test_padding_gradients",
    "test_determinism",
    "test_gradient_determinism",
)
"""The transforms that compile programs which a case's value and gradients do not need, or run those again."""

TRANSFORMS_PER_CASE = 1
"""In how many of these transforms the stronger design has each implementation on each case."""

OF_ARGUMENTS = "test_handles"
"""The transform that the first design includes for one implementation of each argument of a family: it compares answers
of the reference."""

OF_INVARIANCE = "test_batch_invariance"
"""The transform that the design includes for one claim of each implementation only, as it compiles many programs."""


def features(transform: str, parameter: Any, *, paired: bool = False) -> frozenset[Hashable]:
    """Returns what a test function shows on a parameter; where `paired`, pairs of arguments in any transform."""
    if isinstance(parameter, Subject):
        return frozenset(_of_subject(transform, parameter, paired or transform in PAIRED_TRANSFORMS))
    if isinstance(parameter, Tunable):
        implementation = parameter.subject.implementation
        return frozenset({(transform, implementation.family, implementation.name, parameter.direction)})
    if transform == OF_INVARIANCE:
        return frozenset({(transform, parameter.implementation.family, parameter.implementation.name)})
    if transform == OF_ARGUMENTS:
        return frozenset({(transform, parameter.implementation.family, parameter.name)})
    return frozenset({(transform, str(parameter))})


def _of_subject(transform: str, subject: Subject, paired: bool) -> Iterator[Hashable]:
    op, implementation = subject.op, subject.implementation
    record, kernel = abstract_record(op, subject.case), (implementation.family, implementation.name)
    if transform in OF_REQUESTS:
        yield (transform, *kernel)
        yield from ((transform, *kernel, name) for name, x in array_fields(record).items() if not is_floating(x))
        return
    yield (transform, *kernel, "operation", op.name if paired or transform not in IN_ROTATION else "any")
    yield (transform, *kernel, "dtype", str(op.family.dtype(record)))
    given = implementation.requires.handles & set(non_default_fields(record))
    yield from ((transform, *kernel, "handles", name) for name in given)
    if paired:
        yield from ((transform, *kernel, "handles", *pair) for pair in pairs(given))


def select(which: str, tests: Sequence[tuple[str, Any]], marked: Set[int] = frozenset()) -> set[int]:
    """Returns the indices of the (test function, parameter) pairs that `--ejk-cover` selects.

    Args:
        which: The value of the option.
        tests: The pairs.
        marked: The indices of those marked `ejk_first`, which both designs have in addition.
    """
    few, every = {*first(tests), *marked}, set(range(len(tests)))
    if which in ("first", "rest"):
        return few if which == "first" else every - few
    many = {*stronger(tests), *marked}
    return many if which == "stronger" else many - few


def first(tests: Sequence[tuple[str, Any]]) -> list[int]:
    """Returns the indices of the (test function, parameter) pairs of a covering design.

    A case that is chosen for one transform costs less for the next, which shares what was compiled for it.
    """
    return sorted(_covering(tests, paired=False))


def stronger(tests: Sequence[tuple[str, Any]]) -> list[int]:
    """Returns the indices of the (test function, parameter) pairs of the stronger design, those of `first` included."""
    chosen = {*first(tests), *_covering(tests, paired=True)}
    by_subject: dict[int, list[int]] = defaultdict(list)
    for index, (transform, parameter) in enumerate(tests):
        if transform in IN_ROTATION:
            by_subject[id(parameter)].append(index)
        else:
            chosen.add(index)
    for number, indices in enumerate(by_subject.values()):
        left = [index for index in indices if index not in chosen]
        count = min(len(left), max(0, TRANSFORMS_PER_CASE - (len(indices) - len(left))))
        chosen.update(left[(number + offset) % len(left)] for offset in range(count))
    return sorted(chosen)


def _covering(tests: Sequence[tuple[str, Any]], *, paired: bool) -> list[int]:
    transforms = list(dict.fromkeys(transform for transform, _ in tests))
    transforms.sort(key=lambda transform: transform not in PAIRED_TRANSFORMS)
    chosen: list[int] = []
    used: set[int] = set()
    for transform in transforms:
        rows = [index for index, (name, _) in enumerate(tests) if name == transform]
        shown = [features(transform, tests[index][1], paired=paired) for index in rows]
        costs = [0.5 if id(tests[index][1]) in used else 1.0 for index in rows]
        found = cover([Candidate(*candidate) for candidate in zip(shown, costs, strict=True)])
        used |= {id(tests[rows[index]][1]) for index in found}
        chosen += [rows[index] for index in found]
    return chosen
