"""Passes of one operation inside of another's kernels: whichever implementation serves them best."""

import dataclasses
from typing import Any

from ejkernel.errors import NoImplementationError
from ejkernel.ops.call import default_chain
from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import exclude_paired
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback


@dataclasses.dataclass(frozen=True)
class Nested:
    """An operation as a part of another's passes, which are differentiated by hand.

    What connects the passes are the residuals of its family alone, so no paired implementation serves.

    Attributes:
        op: Its name.
    """

    op: str

    def forward(self, record: Any) -> tuple[Any, Any]:
        """Returns the output and the residuals of a family record.

        Raises:
            NoImplementationError: No implementation serves it.
        """
        plan = self._plan()
        choice = exclude_paired(plan.pick(record, "forward"))
        results = plan.forward(record, plan.configured(choice, record))
        return results.output, results.residuals

    def backward(self, pullback: Pullback) -> dict[str, Any]:
        """Returns the wanted gradients of a family record, by field.

        Raises:
            NoImplementationError: No implementation serves it.
        """
        plan = self._plan()
        choice = exclude_paired(plan.pick(pullback.record, "backward", pullback.wanted))
        if choice.implementation is None:
            raise NoImplementationError(choice)
        return plan.backward(pullback, plan.configured(choice, pullback.record))

    def _plan(self) -> CallPlan:
        op = registry().ops[self.op]
        return CallPlan(op=op, device=current_device(), platform="auto", cfg=None, chain=default_chain())


DISPATCHED = Nested("flash_attention")
"""Tiled attention, by whichever implementation serves it best."""
