"""Conformance cases of latent decoding in Triton: rows wider than one accumulator, and heads of several tiles."""

from typing import Any

import jax

from ejkernel.modules.operations.cases import mla_decode as cases
from ejkernel.modules.operations.cases.tables import tagged
from ejkernel.modules.operations.mla_decode import MLADecodeArguments
from ejkernel.ops.model import Case


def wide_cases() -> dict[str, tuple[Case, ...]]:
    """By operation."""
    sizes = cases.DecodeSizes(b=2, s=21, h=80, g=1, r=512, n=16, rope=64, one_cache=True)

    def make(key: jax.Array) -> MLADecodeArguments:
        given: dict[str, Any] = {**cases.arrays(key, sizes, (21, 5))}
        return MLADecodeArguments(**given)

    return {"mla_decode": (tagged("one cache of 512 + 64, 80 heads", make, (), ("awkward",)),)}
