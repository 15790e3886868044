"""Expert routing in XLA: its top-k and its stable sort."""

from ejkernel.families.expert_routing import FAMILY
from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (xla_implementation(FAMILY, backward=False, config=NO_CHOICE, invariant_to=frozenset({"batch"})),)
