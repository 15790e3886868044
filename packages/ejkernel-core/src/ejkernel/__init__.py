"""JAX kernels for attention, state-space and mixture-of-experts models.

One call per operation (`ejkernel.modules`), the fastest correct kernel for the device it runs on, and the same meaning
on every device. `ejkernel.explain` says which kernel a call would use and why.
"""

from ejkernel._version import __version__
from ejkernel.ops.explain import explain

__all__ = ["__version__", "explain"]
