"""Where splits of a sequence's keys begin: at positions that depend on nothing but the key's position.

    units    0  1  2  3 |   4     6     8    10 |     12          16      first size 1, twice as long from 4 and 12 on
    splits   0  1  2  3 |   4     5     6     7 |      8           9

Short splits at the beginning give several programs work if a sequence is alone; longer ones later cost fewer folds.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.gpu.hopper.sizes import I32


@dataclasses.dataclass(frozen=True)
class SplitBoundaries:
    """Boundaries of splits, in units of key blocks or of several blocks.

    Attributes:
        first_size: Units of the first splits.
        doublings: Units from which on splits are twice as long, multiples of the size from there on. Sizes are then
            powers of two.
    """

    first_size: int
    doublings: tuple[int, ...] = ()

    @property
    def _pieces(self) -> list[tuple[int, int, int]]:
        """Returns, per size, the unit and the index of the first split, and the size."""
        pieces, unit, index = [(0, 0, self.first_size)], 0, 0
        for start in self.doublings:
            size = pieces[-1][2]
            unit, index = start, index + (start - unit) // size
            pieces.append((unit, index, 2 * size))
        return pieces

    def begins(self, unit: Any) -> Any:
        """Returns whether a split begins with a unit, int32."""
        if not self.doublings:
            return lax.rem(unit, I32(self.first_size)) == 0
        size: Any = I32(self.first_size)
        for start, _, larger in self._pieces[1:]:
            size = jnp.where(unit >= start, I32(larger), size)
        return jnp.bitwise_and(unit, size - 1) == 0

    def index(self, unit: Any) -> Any:
        """Returns the split that has a unit, int32."""
        if self.first_size == 1 and not self.doublings:
            return unit
        found = unit >> _log2(self.first_size)
        for start, index, size in self._pieces[1:]:
            found = jnp.where(unit >= start, index + ((unit - start) >> _log2(size)), found)
        return found

    def first_unit(self, index: Any) -> Any:
        """Returns the first unit of a split, int32."""
        if self.first_size == 1 and not self.doublings:
            return index
        found = index * self.first_size
        for start, first, size in self._pieces[1:]:
            found = jnp.where(index >= first, start + (index - first) * size, found)
        return found

    def next_begin(self, unit: Any) -> Any:
        """Returns the unit with which the next split after a unit's begins, int32; 0 for unit -1."""
        if not self.doublings:
            return (lax.div(unit + self.first_size, I32(self.first_size))) * self.first_size
        return jnp.where(unit < 0, 0, self.first_unit(self.index(unit) + 1))

    def count(self, units: int) -> int:
        """Returns the number of splits of the first units."""
        total = 0
        ends = [*self.doublings, max(units, *self.doublings, 0)]
        for (start, _, size), end in zip(self._pieces, ends, strict=True):
            total += max(0, cdiv(min(end, units) - start, size))
        return total


def _log2(size: int) -> int:
    return size.bit_length() - 1
