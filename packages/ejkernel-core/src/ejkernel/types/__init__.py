"""Types that kernels take as arguments."""

from ejkernel.types.debug import get_debug_mode as get_debug_mode
from ejkernel.types.debug import set_debug_mode as set_debug_mode
from ejkernel.types.mask import MaskInfo as MaskInfo
from ejkernel.types.sharding import MaskSharding as MaskSharding

__all__ = ["MaskInfo", "MaskSharding", "get_debug_mode", "set_debug_mode"]
