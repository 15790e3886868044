"""The divergence of two distributions over a vocabulary in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterator

import jax.numpy as jnp

from ejkernel.families.kl_divergence import KLDivergence
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.kl_divergence import config
from ejkernel_triton.requirements import triton_implementation, triton_requires


def extra_reasons(record: KLDivergence) -> Iterator[str]:
    """Yields the reasons why the kernels cannot compute a record."""
    if jnp.finfo(record.teacher.dtype).bits > 32:
        yield f"teacher of {record.teacher.dtype}, and sums are float32"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "kl_divergence",
            forward="kl_divergence.forward:forward",
            backward="kl_divergence.backward:backward",
            gradients=frozenset({"student"}),
            requires=triton_requires(handles=(), extra_reasons=extra_reasons),
            config=ConfigSpace.of(config, forward=config.DivergenceTiles),
            invariant_to=frozenset({"batch"}),
            # The backward pass reads the log-sum-exps and the divergences of the forward pass.
            paired=True,
        ),
    )
