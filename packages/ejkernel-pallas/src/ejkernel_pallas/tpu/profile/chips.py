"""What the estimate knows of each TPU: public peak figures, and latencies of its units."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latencies:
    """Cycles that units of a core take.

    They were read off the critical paths of libtpu's own static profile, and adjusted until computed cycles agreed with
    it: 10% root mean square over sixteen kernels.

    Attributes:
        branch_delay: Bundles after a branch that are still executed.
        matmul: Until the matrix unit takes the next product; of formats up to 16 bits.
        matmul_f32: The same, of float32.
        matmul_result: From a product to its result.
        push: Until a weight register takes the next push.
        push_transposed: The same, where the push transposes.
        xlu: Until the cross-lane unit takes the next reduction or transposition.
        reduction: From a cross-lane reduction to its result.
        rotation: From a rotation or permutation to its result.
        transposition: From the end of a transposition to its results.
        transcendental: From a transcendental function to its result.
        dma_read: From the last byte of a copy out of HBM to its semaphore.
        dma_write: The same, into HBM.
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
class Chip:
    """One kind of TPU, as JAX shows it: a device of v7x is one of the two cores of a chip.

    Attributes:
        name: What `--target` calls it.
        topology: One that libtpu makes executables for, of eight devices.
        kind: JAX's `device_kind`.
        clock: Cycles a second: peak figure over the products a cycle of the matrix units.
        flops: Dense bfloat16 operations a second of a device.
        bandwidth: HBM bytes a second of a device.
        link_bandwidth: Bytes a second that a link between chips takes in one direction: the vendor's figure for a chip,
            which is of both directions, over two and over its links (four in a plane, six in space).
        cores: Cores that share the bandwidth; a kernel runs on all of them, and one is simulated.
        mxus: Matrix units of a core.
        vmem: VMEM bytes of a core.
        latencies: Of a core.
    """

    name: str
    topology: str
    kind: str
    clock: float
    flops: float
    bandwidth: float
    link_bandwidth: float
    cores: int = 1
    mxus: int
    vmem: int
    latencies: Latencies

    @property
    def core_bandwidth(self) -> float:
        """HBM bytes a second that one core gets while all of them copy."""
        return self.bandwidth / self.cores


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

_MIB = 1 << 20
_ALL = (
    Chip(
        name="v5e", topology="v5e:4x2", kind="TPU v5 lite", clock=1.50e9, flops=197e12, bandwidth=819e9,
        link_bandwidth=400e9 / 2 / 4, mxus=4, vmem=128 * _MIB, latencies=_V5E,
    ),
    Chip(
        name="v5p", topology="v5p:2x2x2", kind="TPU v5", clock=1.75e9, flops=459e12, bandwidth=2765e9,
        link_bandwidth=1200e9 / 2 / 6, cores=2, mxus=4, vmem=64 * _MIB, latencies=_V5P,
    ),
    Chip(
        name="v6e", topology="v6e:4x2", kind="TPU v6 lite", clock=1.75e9, flops=918e12, bandwidth=1640e9,
        link_bandwidth=800e9 / 2 / 4, mxus=2, vmem=128 * _MIB, latencies=_V6E,
    ),
    Chip(
        name="v7x", topology="tpu7x:2x2x1", kind="TPU7x", clock=2.20e9, flops=2307e12 / 2, bandwidth=7380e9 / 2,
        link_bandwidth=1200e9 / 2 / 6, mxus=2, vmem=64 * _MIB, latencies=_V7X,
    ),
)  # fmt: skip
CHIPS = {chip.name: chip for chip in _ALL}


def chip(name: str) -> Chip:
    """Looks a chip up.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in CHIPS:
        raise ValueError(f"target: got {name!r}, wants one of {', '.join(CHIPS)}")
    return CHIPS[name]
