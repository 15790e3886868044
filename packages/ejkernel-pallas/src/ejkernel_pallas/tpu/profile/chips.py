"""Parameters of the TPUs for estimates, in addition to their public figures: the latencies of their units."""

import dataclasses

from ejkernel.ops.chips import TPUS, Tpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latencies:
    """Latencies in cycles of the units of a core.

    They were derived from the critical paths of libtpu's own static profile, and adjusted until the computed cycles
    agreed with it: to 10% root mean square over sixteen kernels.

    Attributes:
        branch_delay_slots: Delay slots: bundles after a branch that are still executed.
        matmul_interval: From one product to the next in the matrix unit, for formats up to 16 bits.
        matmul_f32_interval: The same for float32.
        matmul_result_latency: From a product to its result.
        weight_push_interval: From one push into a weight register to the next.
        transposed_weight_push_interval: The same for a push that transposes.
        cross_lane_interval: From one reduction or transposition in the cross-lane unit to the next.
        reduction_latency: From a cross-lane reduction to its result.
        rotation_latency: From a rotation or permutation to its result.
        transposition_latency: From the end of a transposition to its results.
        transcendental_latency: From a transcendental function to its result.
        dma_read_latency: From the last byte of a copy out of HBM to its semaphore.
        dma_write_latency: The same for copies into HBM.
    """

    branch_delay_slots: int
    matmul_interval: int
    matmul_f32_interval: int
    matmul_result_latency: int
    weight_push_interval: int = 4
    transposed_weight_push_interval: int = 8
    cross_lane_interval: int
    reduction_latency: int
    rotation_latency: int
    transposition_latency: int
    transcendental_latency: int
    dma_read_latency: int
    dma_write_latency: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip(Tpu):
    """A TPU with what estimates need in addition to its public figures; one of its cores is simulated.

    Attributes:
        topology: A topology of eight devices that libtpu compiles for.
        latencies: The latencies of a core.
        words_per_hbm_address: 32-bit words per unit of an address in HBM, as the compiled code computes them.
    """

    topology: str
    latencies: Latencies
    words_per_hbm_address: int


_V5E = Latencies(
    branch_delay_slots=4, matmul_interval=16, matmul_f32_interval=8, matmul_result_latency=110, cross_lane_interval=8,
    reduction_latency=95, rotation_latency=100, transposition_latency=110, transcendental_latency=6,
    dma_read_latency=900, dma_write_latency=390,
)  # fmt: skip
_V6E = Latencies(
    branch_delay_slots=4, matmul_interval=8, matmul_f32_interval=4, matmul_result_latency=190, cross_lane_interval=4,
    reduction_latency=125, rotation_latency=120, transposition_latency=130, transcendental_latency=12,
    dma_read_latency=490, dma_write_latency=390,
)  # fmt: skip
_V5P = dataclasses.replace(_V5E, dma_read_latency=550, dma_write_latency=500)
_V7X = dataclasses.replace(
    _V6E,
    branch_delay_slots=6,
    matmul_result_latency=205,
    reduction_latency=128,
    rotation_latency=122,
    transposition_latency=135,
    dma_read_latency=580,
    dma_write_latency=500,
)

_TOPOLOGIES_AND_LATENCIES = {
    "v5e": ("v5e:4x2", _V5E),
    "v5p": ("v5p:2x2x2", _V5P),
    "v6e": ("v6e:4x2", _V6E),
    "v7x": ("tpu7x:2x2x1", _V7X),
}
CHIPS = {
    name: Chip(
        **dataclasses.asdict(TPUS[name]),
        topology=topology,
        latencies=latencies,
        words_per_hbm_address=128 if name == "v5e" else 8,
    )
    for name, (topology, latencies) in _TOPOLOGIES_AND_LATENCIES.items()
}


def chip(name: str) -> Chip:
    """Returns the chip of a name.

    Raises:
        ValueError: There is no chip of that name.
    """
    if name not in CHIPS:
        raise ValueError(f"target: got {name!r}, wants one of {', '.join(CHIPS)}")
    return CHIPS[name]
