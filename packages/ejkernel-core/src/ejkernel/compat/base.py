"""Names of `ejkernel.modules.base`: what code that was written around kernel classes imports with them."""

from ejkernel.ops import evidence
from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import hardware_refusals
from ejkernel.ops.execution.executor import create_default_executor
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.plugins import registry

__all__ = ["Kernel", "create_default_executor", "detect_platform"]


def detect_platform(
    algorithm: str,
    platform: str = "auto",
    prefer_pallas: bool = False,
    prefer_cuda: bool = False,
    prefer_triton: bool = False,
    prefer_cute: bool = False,
    prefer_tilelang: bool = False,
) -> str:
    """Returns the toolchain that dispatch would try first for an operation on this machine, whatever the call.

    Args:
        algorithm: Name of the operation.
        platform: A toolchain is returned as it is; `"auto"` asks.
        prefer_pallas: Whether Pallas comes first where it runs here; as above the other four, in this order. There are
            no kernels in CuTe and TileLang.
        prefer_cuda: As `prefer_pallas`.
        prefer_triton: As `prefer_pallas`.
        prefer_cute: As `prefer_pallas`.
        prefer_tilelang: As `prefer_pallas`.

    Raises:
        ValueError: There is no such operation, or no implementation of it runs on this machine.
    """
    if platform != "auto":
        return str(platform)
    op, device = registry().op(algorithm), current_device()
    runs_here = [i for i in registry().implementations[op.name] if not hardware_refusals(i, device)]
    platforms = [i.platform for i in sorted(runs_here, key=lambda i: bool(evidence.unconfirmed(i, op.name, device)))]
    if not platforms:
        raise ValueError(f"algorithm: no implementation of {algorithm!r} runs on {device}")
    preferred = {
        "pallas": prefer_pallas,
        "cuda": prefer_cuda,
        "triton": prefer_triton,
        "cute": prefer_cute,
        "tilelang": prefer_tilelang,
    }
    return next((name for name, is_preferred in preferred.items() if is_preferred and name in platforms), platforms[0])
