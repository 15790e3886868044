"""TurboQuant's format written out in NumPy float64, number by number, from the paper's formulas (arXiv:2504.19874)."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """Rotation R [D, D], projection P [Q, D], and codebooks of keys and values with the bits of their codes."""

    rotation: np.ndarray
    projection: np.ndarray
    key_codebook: np.ndarray
    value_codebook: np.ndarray
    key_bits: int
    value_bits: int


def make(size: int, projections: int, key_bits: int, value_bits: int, seed: int = 0) -> Format:
    """A format with random matrices, and codebooks that are ascending normal numbers."""
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.normal(size=(size, size)))
    books = (np.sort(rng.normal(size=2**bits)) / math.sqrt(size) for bits in (key_bits, value_bits))
    return Format(rotation, rng.normal(size=(projections, size)), *books, key_bits, value_bits)


def packed(numbers: list[int], bits: int) -> list[int]:
    """Bytes of a stream of numbers, whose first bit is the lowest of the first byte."""
    stream = [number >> bit & 1 for number in numbers for bit in range(bits)]
    return [sum(bit << n for n, bit in enumerate(stream[first : first + 8])) for first in range(0, len(stream), 8)]


def codes(vector: np.ndarray, rotation: np.ndarray, codebook: np.ndarray) -> tuple[list[int], float]:
    """The index of the nearest entry for each rotated coordinate of the unit vector, and the norm."""
    norm = math.sqrt(sum(x * x for x in vector))
    unit = [sum(r * x for r, x in zip(row, vector, strict=True)) / norm for row in rotation]
    return [min(range(len(codebook)), key=lambda c: abs(x - codebook[c])) for x in unit], norm


def encode_key(key: np.ndarray, made: Format) -> tuple[list[int], list[int], list[float], np.ndarray]:
    """Bytes of codes, bytes of signs, the two norms, and the key that they stand for in products with a query."""
    indices, norm = codes(key, made.rotation, made.key_codebook)
    stored = norm * made.key_codebook[indices]
    residual = made.rotation @ key - stored
    length, count = math.sqrt(residual @ residual), len(made.projection)
    signs = [1.0 if row @ residual >= 0 else -1.0 for row in made.projection]
    for row, sign in zip(made.projection, signs, strict=True):
        stored = stored + math.sqrt(math.pi / 2) / count * length * sign * row
    bits = [int(sign > 0) for sign in signs]
    return packed(indices, made.key_bits), packed(bits, 1), [norm, length], made.rotation.T @ stored


def encode_value(value: np.ndarray, made: Format) -> tuple[list[int], float, np.ndarray]:
    """Bytes of codes, the norm, and the value that they stand for."""
    indices, norm = codes(value, made.rotation, made.value_codebook)
    return packed(indices, made.value_bits), norm, made.rotation.T @ (norm * made.value_codebook[indices])
