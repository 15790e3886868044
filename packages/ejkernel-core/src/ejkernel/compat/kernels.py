"""Names of `ejkernel.kernels`. Kernels themselves are in the distributions of the backends."""

from ejkernel.compat import kernel_registry
from ejkernel.platforms import Backend, Platform

__all__ = ["Backend", "Platform", "kernel_registry"]

# Modules are imported below this module's old name, which therefore has to be a package.
__path__: list[str] = []
