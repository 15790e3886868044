"""The cross-entropy of token logits in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterator

import jax.numpy as jnp

from ejkernel.families.cross_entropy import CrossEntropy
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.cross_entropy import config, ordered
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLES = frozenset(
    {
        "lm_head",
        "lm_head_bias",
        "soft_targets",
        "logits_soft_cap",
        "label_smoothing",
        "z_loss",
        "sum_over_tokens",
    }
)


def extra_reasons(record: CrossEntropy) -> Iterator[str]:
    """Yields the reasons why the kernels cannot compute a record."""
    for name in ("soft_targets", "lm_head_bias"):
        array = getattr(record, name)
        if array is not None and jnp.finfo(array.dtype).bits > 32:
            yield f"{name} of {array.dtype}, and sums are float32"


def invariance_limits(record: CrossEntropy) -> Iterator[str]:
    """Yields why rows of a record depend on the rest of its call."""
    yield from ordered.invariance_limits(record)
    if record.lm_head is not None:
        yield "lm_head: the sums of XLA's products of a block of tokens depend on their number"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations, which also serve CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "cross_entropy",
            forward="cross_entropy.forward:forward",
            backward="cross_entropy.backward:backward",
            gradients=frozenset({"inputs", "lm_head", "lm_head_bias"}),
            requires=triton_requires(handles=HANDLES, extra_reasons=extra_reasons),
            config=ConfigSpace.of(config, forward=config.LossTiles),
            invariant_to=frozenset({"batch"}),
            invariance_limits=invariance_limits,
        ),
        *ordered.implementations(HANDLES, extra_reasons),
    )
