"""Expert routing in XLA: its top-k and its stable sort."""

from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (xla_implementation("expert_routing", backward=None, handles=(), config=NO_CHOICE),)
