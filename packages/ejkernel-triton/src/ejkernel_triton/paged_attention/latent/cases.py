"""Conformance cases of latent decoding in Triton: rows wider than one accumulator, and several tiles of heads."""

from ejkernel.modules.operations.cases.mla_decode import DecodeSizes, make_arrays
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.mla_decode import MLADecodeArguments
from ejkernel.ops.model import Case


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    sizes = DecodeSizes(b=2, s=80, h=80, g=1, r=512, n=16, rope=64, has_joint_cache=True, lengths=(80, 30))
    wide: Row[DecodeSizes] = ("one cache of 512 + 64, 80 heads", sizes, lambda key: {}, (), ("awkward",))
    return {"mla_decode": make_cases_of_rows(MLADecodeArguments, make_arrays, (wide,))}
