"""Products with a packed matrix that add in the matrix's order in tiles of any size, for `batch_invariant` blocks."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.quantized_matmul.ordered import config
from ejkernel_triton.requirements import triton_implementation, triton_requires


def implementations(
    handles: Iterable[str], refusal_reasons: Callable[[Any], Iterable[str]]
) -> tuple[Implementation, ...]:
    """Returns the implementation, which honours and refuses what the other kernels do."""
    return (
        triton_implementation(
            "quantized_matmul",
            name="triton_ordered",
            forward="quantized_matmul.ordered.forward:forward",
            # Below all others outside of a `batch_invariant` block, where it has not been timed.
            priority=-20,
            requires=triton_requires(handles=handles, extra_reasons=refusal_reasons),
            config=ConfigSpace.of(config, forward=config.OrderedTiles),
            invariant_to=frozenset({"batch"}),
            invariant_priority=20,
        ),
    )
