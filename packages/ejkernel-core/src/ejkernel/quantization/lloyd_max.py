"""Lloyd-Max codebooks for a coordinate of a random unit vector; `ejkernel.quantization.turboquant` exports them."""

import dataclasses
import functools
import math

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class LloydMaxCodebook:
    """The codebook with the least mean square error for a coordinate of a random unit vector.

    Attributes:
        bits: Bits of a code.
        dim: D, the size of the vectors.
        n_levels: 2 ** bits.
        centroids: float32 [n_levels], ascending.
        boundaries: float32 [n_levels - 1], the middles between neighbours.
    """

    bits: int
    dim: int
    n_levels: int
    centroids: np.ndarray
    boundaries: np.ndarray


def solve_lloyd_max(
    bits: int, dim: int = 128, max_iters: int = 1000, tol: float = 1e-10, use_gaussian_approx: bool = True
) -> LloydMaxCodebook:
    """Returns the codebook of Lloyd 1982 and Max 1960: each entry is the mean of the numbers that are nearest to it.

    Args:
        bits: Bits of a code, 1 to 8.
        dim: D >= 2, the size of the vectors.
        max_iters: Most iterations of Lloyd's algorithm.
        tol: It ends where no entry moves by more than `tol / sqrt(D)`.
        use_gaussian_approx: Whether coordinates are N(0, 1 / D), which they are for large D; otherwise those of a
            point on the unit sphere of D dimensions.

    Raises:
        ValueError: An argument is out of range.

    Example:
        ```python
        from ejkernel.quantization.turboquant import solve_lloyd_max

        codebook = solve_lloyd_max(bits=2, dim=64).centroids
        assert abs(codebook[-1] * 8 - 1.5104) < 1e-3  # Max's table for N(0, 1)
        ```
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits: got {bits}, wants 1 to 8")
    if dim < 2:
        raise ValueError(f"dim: got {dim}, wants at least 2")
    mass_and_moment = (
        _normal_mass_and_moment if use_gaussian_approx else functools.partial(_sphere_mass_and_moment, dim)
    )
    # In units of the standard deviation, 1 / sqrt(D). The outer entries start where few numbers are.
    centroids = np.linspace(-1, 1, 2**bits + 1)[:-1] + 0.5**bits
    centroids *= math.sqrt(dim) * 0.9 if not use_gaussian_approx and dim < 12 else 3.0
    for _ in range(max_iters):
        edges = np.concatenate(([-np.inf], (centroids[1:] + centroids[:-1]) / 2, [np.inf]))
        mass, moment = (np.diff(x) for x in mass_and_moment(edges))
        means = np.where(mass > 0, moment / np.where(mass > 0, mass, 1), centroids)
        moved, centroids = np.max(np.abs(means - centroids)), means
        if moved <= tol:
            break
    centroids /= math.sqrt(dim)
    middles = (centroids[1:] + centroids[:-1]) / 2
    return LloydMaxCodebook(bits, dim, 2**bits, centroids.astype(np.float32), middles.astype(np.float32))


def _normal_mass_and_moment(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the integrals of the density of N(0, 1), and of it times x, up to each edge."""
    mass = np.array([(1 + math.erf(x / math.sqrt(2))) / 2 for x in edges])
    return mass, -np.exp(-edges * edges / 2) / math.sqrt(2 * math.pi)


def _sphere_mass_and_moment(dim: int, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the same for a coordinate x of a point on the sphere of radius sqrt(D).

    Its density is proportional to (1 - x^2 / D)^((D - 3) / 2), so that x^2 / D has a beta distribution.
    """
    from scipy import special  # it takes longer to import than the rest of this module

    x = np.clip(edges / math.sqrt(dim), -1, 1)
    mass = (1 + np.sign(x) * special.betainc(0.5, (dim - 1) / 2, x * x)) / 2
    log_factor = special.gammaln(dim / 2) - special.gammaln((dim - 1) / 2) - math.log(math.pi) / 2
    return mass, -math.sqrt(dim) * np.exp(log_factor) * (1 - x * x) ** ((dim - 1) / 2) / (dim - 1)


@functools.cache
def get_codebook(bits: int, dim: int = 128) -> LloydMaxCodebook:
    """Returns the codebook of `solve_lloyd_max(bits, dim)`, computed once."""
    return solve_lloyd_max(bits, dim)
