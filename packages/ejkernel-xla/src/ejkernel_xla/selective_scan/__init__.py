"""The selective scan in XLA: chunks of tokens, of which only the states between them are kept."""

from ejkernel.families.selective_scan import scan_sequences
from ejkernel.ops import ConfigSpace
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.selective_scan import config

IMPLEMENTATIONS = (
    xla_implementation(
        "selective_scan",
        gradients={"x", "step", "decay", "write", "read", "skip", "initial_state"},
        handles=scan_sequences.HANDLES | {"initial_state"},
        config=ConfigSpace.of(config, forward=config.ScanSteps),
    ),
)
