"""Parameters of the TPUs for estimates, in addition to their public figures: the latencies of their units."""

import dataclasses

from ejkernel.ops.chips import TPUS, Tpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latencies:
    """Latencies in cycles of the units of a core.

    They were derived from the critical paths of libtpu's own static profile, and adjusted until the computed cycles
    agreed with it: to 10% root mean square over sixteen kernels.

    Attributes:
        branch_delay: Delay slots: bundles after a branch that are still executed.
        matmul: From one product to the next in the matrix unit, for formats up to 16 bits.
        matmul_f32: The same for float32.
        matmul_result: From a product to its result.
        push: From one push into a weight register to the next.
        push_transposed: The same for a push that transposes.
        xlu: From one reduction or transposition in the cross-lane unit to the next.
        reduction: From a cross-lane reduction to its result.
        rotation: From a rotation or permutation to its result.
        transposition: From the end of a transposition to its results.
        transcendental: From a transcendental function to its result.
        dma_read: From the last byte of a copy out of HBM to its semaphore.
        dma_write: The same for copies into HBM.
    """

    branch_delay: int
    matmul: int
    matmul_f32: int
    matmul_result: int
    push: int = 4
    push_transposed: int = 8
    xlu: int
    reduction: int
    rotation: int
    transposition: int
    transcendental: int
    dma_read: int
    dma_write: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip(Tpu):
    """A TPU with what estimates need in addition to its public figures; one of its cores is simulated.

    Attributes:
        topology: A topology of eight devices that libtpu compiles for.
        latencies: The latencies of a core.
    """

    topology: str
    latencies: Latencies


_V5E = Latencies(
    branch_delay=4, matmul=16, matmul_f32=8, matmul_result=110, xlu=8, reduction=95, rotation=100, transposition=110,
    transcendental=6, dma_read=900, dma_write=390,
)  # fmt: skip
_V6E = Latencies(
    branch_delay=4, matmul=8, matmul_f32=4, matmul_result=190, xlu=4, reduction=125, rotation=120, transposition=130,
    transcendental=12, dma_read=490, dma_write=390,
)  # fmt: skip
_V5P = dataclasses.replace(_V5E, dma_read=550, dma_write=500)
_V7X = dataclasses.replace(
    _V6E, branch_delay=6, matmul_result=205, reduction=128, rotation=122, transposition=135, dma_read=580, dma_write=500
)

_CHIP_ESTIMATES = {
    "v5e": ("v5e:4x2", _V5E),
    "v5p": ("v5p:2x2x2", _V5P),
    "v6e": ("v6e:4x2", _V6E),
    "v7x": ("tpu7x:2x2x1", _V7X),
}
CHIPS = {
    name: Chip(**dataclasses.asdict(TPUS[name]), topology=topology, latencies=latencies)
    for name, (topology, latencies) in _CHIP_ESTIMATES.items()
}


def chip(name: str) -> Chip:
    """Returns the chip of a name.

    Raises:
        ValueError: There is no chip of that name.
    """
    if name not in CHIPS:
        raise ValueError(f"target: got {name!r}, wants one of {', '.join(CHIPS)}")
    return CHIPS[name]
