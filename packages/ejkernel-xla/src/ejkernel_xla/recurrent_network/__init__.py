"""Recurrent networks in XLA: every product that does not wait for a state is taken over all tokens at once."""

from ejkernel.families.recurrent_network import FAMILY
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.arguments import optional_fields
from ejkernel_xla.recurrent_network import tiles

IMPLEMENTATIONS = (
    Implementation(
        family="recurrent_network",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.recurrent_network.forward:forward",
        backward="ejkernel_xla.recurrent_network.backward:backward",
        gradients=frozenset(FAMILY.differentiable),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            # Everyone's fallback honours every field; the conformance suite fails for one that it does not.
            handles=frozenset(optional_fields(FAMILY.record)),
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.TokenBlocks, faces=tiles.FACES
        ),
    ),
)
