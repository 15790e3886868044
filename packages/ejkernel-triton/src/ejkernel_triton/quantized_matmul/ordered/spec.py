"""The compile-time constants of the kernels that add in the matrix's order."""

import dataclasses
from typing import Any

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel_triton.quantized_matmul.config import QuantizedTiles
from ejkernel_triton.quantized_matmul.ordered.config import OrderedTiles
from ejkernel_triton.quantized_matmul.spec import QuantizedSpec
from ejkernel_triton.quantized_matmul.spec import make_spec as make_quantized_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderedSpec(QuantizedSpec):
    """Constants of the kernels. `OPERAND_DTYPE` is float32: codes are rounded once they have the matrix's order.

    Attributes:
        TRANSPOSED: Whether columns of the packed matrix are contracted.
        WEIGHT_DTYPE: Dtype of weights that a product reads.
    """

    TRANSPOSED: bool
    WEIGHT_DTYPE: str


def make_spec(record: QuantizedMatmul, config: OrderedTiles) -> OrderedSpec:
    """Returns the constants of a record's kernels on the device in use."""
    sizes = {name: getattr(config, name) for name in ("block_m", "block_r", "block_w", "num_warps", "num_stages")}
    shared: dict[str, Any] = dataclasses.asdict(make_quantized_spec(record, QuantizedTiles(**sizes, splits=1)))
    shared["OPERAND_DTYPE"] = "float32"
    return OrderedSpec(**shared, TRANSPOSED=record.transpose, WEIGHT_DTYPE=record.x.dtype.name)
