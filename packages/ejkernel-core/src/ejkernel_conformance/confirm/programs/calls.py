"""The calls that implementations serve, and how each is lowered."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOWERED_FOR = {"tpu": "tpu", "gpu": "cuda"}
GRADIENTS = ", with gradients"
"""The suffix of the label of a differentiated call."""


class Listed:
    """One implementation of one family, with the operations that it is registered for."""

    def __init__(self, implementation: Any, ops: Sequence[Any], chip: str, is_whole: bool) -> None:
        from ejkernel.ops.source_digest import source_digest

        self.implementation, self.ops, self.chip, self.is_whole = implementation, ops, chip, is_whole
        self.key = f"{implementation.family}/{implementation.name}"
        self.digest = source_digest(implementation)

    @property
    def cases(self) -> list[str]:
        """Returns the label of each case, served or refused."""
        return sorted(f"{op.name}, {case.name}" for op in self.ops for case in self._cases_of(op))

    def _cases_of(self, op: Any) -> tuple[Any, ...]:
        return (*op.cases, *self.implementation.cases_of(op))

    def calls(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the label of each call that it serves, and what lowers it."""
        from ejkernel.ops.device import target_device
        from ejkernel_conformance import subjects

        for op in self.ops:
            for case in self._cases_of(op):
                subject = subjects.Subject(op=op, implementation=self.implementation, case=case)
                with target_device(self.chip):
                    if subjects.refusal(subject, "forward"):
                        continue
                    both = self.implementation.backward and not subjects.refusal(subject, "backward")
                label = f"{op.name}, {case.name}"
                yield label, functools.partial(_lowered, subject, False, self.chip)
                if both:
                    yield f"{label}{GRADIENTS}", functools.partial(_lowered, subject, True, self.chip)


def listed(names: Sequence[str], ops: Sequence[str], chip: str) -> list[Listed]:
    """Returns the implementations that have evidence on a chip, by family and name."""
    from ejkernel.ops.device import find_device
    from ejkernel.ops.plugins import registry

    found, device = registry(), find_device(chip)
    served: dict[str, tuple[Any, list[Any], list[Any]]] = {}
    for op in sorted(found.ops.values(), key=lambda op: op.name):
        for each in found.implementations.get(op.name, ()):
            if each.evidence is None or not each.requires.devices & device.names or (names and each.name not in names):
                continue
            _, every, chosen = served.setdefault(f"{each.family}/{each.name}", (each, [], []))
            every.append(op)
            if not ops or op.name in ops:
                chosen.append(op)
    ordered = (served[key] for key in sorted(served))
    return [Listed(each, chosen, chip, chosen == every) for each, every, chosen in ordered if chosen]


def _lowered(subject: Any, gradients: bool, chip: str) -> Any:
    """Returns the program of a call, for a chip that need not be there."""
    from ejkernel.ops.device import find_device, target_device
    from ejkernel_conformance import running, subjects

    def call(args: Any) -> Any:
        return running.call(plan, args)

    def with_gradients(args: Any) -> Any:
        output, pull = jax.vjp(call, args)
        return output, pull(jax.tree.map(_tangent, output))

    with target_device(chip):
        plan = subjects.pinned_plan(subject.op, subject.implementation)
        traced = jax.jit(with_gradients if gradients else call).trace(subjects.abstract_args(subject.case))
        return traced.lower(lowering_platforms=(LOWERED_FOR[find_device(chip).platform],))


def _tangent(x: Any) -> Any:
    """Returns a cotangent of an output that no compiler can see through: the output itself."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
