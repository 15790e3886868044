"""Lists what each test of the suite covers, for the covering design of `--ejk-cover=first`.

Appear at least once, each where some test has it:

- each operation with each implementation under each transform (a test function is a transform);
- each argument that an implementation handles, with each transform, on whichever operation;
- each pair of such arguments that one case gives, in a value and in a gradient, and each dtype with each transform;
- each array of ids, lengths, tables or slots with each kernel, where requests are poisoned;
- each claim, each gradient that is claimed, and the candidates of each direction.
"""

from collections.abc import Hashable, Iterator, Sequence
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

OF_INVARIANCE = "test_batch_invariance"
"""The transform that the design includes for one claim of each implementation only, as it compiles many programs."""


def features(transform: str, parameter: Any) -> frozenset[Hashable]:
    """Returns what a test function shows on a parameter."""
    if isinstance(parameter, Subject):
        return frozenset(_of_subject(transform, parameter))
    if isinstance(parameter, Tunable):
        implementation = parameter.subject.implementation
        return frozenset({(transform, implementation.family, implementation.name, parameter.direction)})
    if transform == OF_INVARIANCE:
        return frozenset({(transform, parameter.implementation.family, parameter.implementation.name)})
    return frozenset({(transform, str(parameter))})


def _of_subject(transform: str, subject: Subject) -> Iterator[Hashable]:
    op, implementation = subject.op, subject.implementation
    record, kernel = abstract_record(op, subject.case), (implementation.family, implementation.name)
    if transform in OF_REQUESTS:
        yield (transform, *kernel)
        yield from ((transform, *kernel, name) for name, x in array_fields(record).items() if not is_floating(x))
        return
    yield (transform, *kernel, "operation", op.name)
    yield (transform, *kernel, "dtype", str(op.family.dtype(record)))
    given = implementation.requires.handles & set(non_default_fields(record))
    yield from ((transform, *kernel, "handles", name) for name in given)
    if transform in PAIRED_TRANSFORMS:
        yield from ((transform, *kernel, "handles", *pair) for pair in pairs(given))


def first(tests: Sequence[tuple[str, Any]]) -> list[int]:
    """Returns the indices of the (test function, parameter) pairs of a covering design.

    A case that is chosen for one transform costs less for the next, which shares what was compiled for it.
    """
    transforms = list(dict.fromkeys(transform for transform, _ in tests))
    transforms.sort(key=lambda transform: transform not in PAIRED_TRANSFORMS)
    chosen: list[int] = []
    used: set[int] = set()
    for transform in transforms:
        rows = [index for index, (name, _) in enumerate(tests) if name == transform]
        found = cover([_candidate(transform, tests[index][1], used) for index in rows])
        used |= {id(tests[rows[index]][1]) for index in found}
        chosen += [rows[index] for index in found]
    return sorted(chosen)


def _candidate(transform: str, parameter: Any, used: set[int]) -> Candidate:
    return Candidate(features(transform, parameter), 0.5 if id(parameter) in used else 1.0)
