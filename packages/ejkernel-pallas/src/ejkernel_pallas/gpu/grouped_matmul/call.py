"""What the kernel of rows and the kernel of matrices are given."""

import dataclasses
from typing import Any

from ejkernel_pallas.gpu.grouped_matmul.spec import Spec


@dataclasses.dataclass(frozen=True)
class Call:
    """What a kernel is given.

    Attributes:
        spec: Constants.
        blocks: Thread blocks.
        operands: Arrays in device memory.
        output: Likewise.
        shared: Shared memory and barriers: the `Shared` of the kernel's module.
    """

    spec: Spec
    blocks: int
    operands: dict[str, Any]
    output: Any
    shared: Any
