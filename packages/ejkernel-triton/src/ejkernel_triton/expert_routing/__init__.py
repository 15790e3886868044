"""Expert routing in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.expert_routing import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

MAX_EXPERTS = 1024
"""The largest number of experts: the logits of a token must fit in the registers of one program."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    experts = record.logits.shape[1]
    if experts > MAX_EXPERTS:
        yield f"logits: got {experts} experts, the kernel has at most {MAX_EXPERTS}"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "expert_routing",
            forward="expert_routing.forward:forward",
            requires=triton_requires(handles=(), extra_reasons=_refusal_reasons),
            config=ConfigSpace.of(config, forward=config.RoutingTiles),
            invariant_to=frozenset({"batch"}),
        ),
    )
