"""Losses of hidden states whose logits add in one order in calls of any size, for `batch_invariant` blocks."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from ejkernel.families.cross_entropy import CrossEntropy
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.cross_entropy import config
from ejkernel_triton.requirements import triton_implementation, triton_requires


def invariance_limits(record: CrossEntropy) -> Iterator[str]:
    """Yields why rows of a record depend on the rest of its call."""
    if record.sum_over_tokens:
        yield "the loss is a sum over all tokens"


def implementations(
    handles: Iterable[str], extra_reasons: Callable[[CrossEntropy], Iterable[str]]
) -> tuple[Implementation, ...]:
    """Returns the implementation, which honours what the other kernels do."""

    def refusal_reasons(record: CrossEntropy) -> Iterator[str]:
        yield from extra_reasons(record)
        if record.lm_head is None:
            yield "lm_head: got none, the kernels compute logits from hidden states"

    space = ConfigSpace.of(config, forward=config.LossTiles)
    return (
        triton_implementation(
            "cross_entropy",
            name="triton_ordered",
            forward="cross_entropy.ordered.forward:forward",
            # Below all others outside of a `batch_invariant` block, where it has not been timed.
            priority=-20,
            requires=triton_requires(handles=handles, extra_reasons=refusal_reasons),
            # No sum depends on the tokens of a block of logits, the only size that follows the call.
            config=dataclasses.replace(space, batch_invariant=config.heuristic),
            invariant_to=frozenset({"batch"}),
            invariance_limits=invariance_limits,
            invariant_priority=20,
        ),
    )
