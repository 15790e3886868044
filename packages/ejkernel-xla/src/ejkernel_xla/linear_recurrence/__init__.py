"""Linear recurrences in XLA: chunks of tokens as matrix products, and only states between them."""

from ejkernel.families.linear_recurrence import FAMILY
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.arguments import optional_fields
from ejkernel_xla.linear_recurrence import tiles

IMPLEMENTATIONS = (
    Implementation(
        family="linear_recurrence",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.linear_recurrence.forward:forward",
        backward="ejkernel_xla.linear_recurrence.backward:backward",
        gradients=frozenset(FAMILY.differentiable),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            # Everyone's fallback honours every field; the conformance suite fails for one that it does not.
            handles=frozenset(optional_fields(FAMILY.record)),
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.Chunk, faces=tiles.FACES
        ),
    ),
)
