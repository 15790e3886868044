"""The selective scan in XLA: chunks of tokens, of which only the states between them are kept."""

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.selective_scan import tiles

IMPLEMENTATIONS = (
    Implementation(
        family="selective_scan",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.selective_scan.forward:forward",
        backward="ejkernel_xla.selective_scan.backward:backward",
        gradients=frozenset({"x", "step", "decay", "write", "read", "skip", "initial_state"}),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=frozenset({"initial_state"}),
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic,
            candidates=tiles.candidates,
            forward=tiles.ScanSteps,
            faces={"associative": "associative"},
        ),
    ),
)
