"""What code that was written around kernel classes imports beside them."""

from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import hardware_refusals, in_order
from ejkernel.ops.execution.executor import create_default_executor
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.plugins import registry

__all__ = ["Kernel", "create_default_executor", "detect_platform"]


def detect_platform(algorithm: str, platform: str = "auto") -> str:
    """The toolchain that dispatch would try first for an operation on this machine, whatever the call.

    Args:
        algorithm: Name of the operation.
        platform: A toolchain is returned as it is; `"auto"` asks.

    Raises:
        ValueError: There is no such operation, or no implementation of it runs on this machine.
    """
    if platform != "auto":
        return str(platform)
    op, device = registry().op(algorithm), current_device()
    for implementation, _ in in_order(op, device):
        if not hardware_refusals(implementation, device):
            return implementation.platform
    raise ValueError(f"algorithm: no implementation of {algorithm!r} runs on {device}")
