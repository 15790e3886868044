"""The order of the rows that a kernel unpacks from 32-bit words of packed codes.

    words of 4-bit codes of one vector along sublanes, one vector per lane (4 words, D = 32)

    sublane 0   codes  7 ..  0           copy of the words, twice, to fill 8 sublanes
    sublane 1   codes 15 ..  8    ─►     sublanes 0 to 3 are shifted by 4 p bits, sublanes 4 to 7 by 4 (p + 4)
    sublane 2   codes 23 .. 16           plane p: codes p, p + 8, p + 16, p + 24, p + 4, p + 12, p + 20, p + 28
    sublane 3   codes 31 .. 24

A plane is one shift and one bitwise and. Unpacked rows are the planes one after the other, which is another order than
that of the vector's coordinates. Nothing in the kernel restores it: queries are put into this order, and so are
outputs taken out of it, once per call.

Codes of 3 bits cross words. Eight of them are 3 bytes, so the kernel first makes words of 24 bits, whose highest byte
is not read: plane p has codes p, p + 8, p + 16 and so on.
"""

import dataclasses

import jax

from ejkernel_pallas.tpu.mosaic.vectors import SUBLANES

WORD_BITS, CODES_PER_24_BITS = 32, 8


@dataclasses.dataclass(frozen=True)
class CodeRows:
    """Vectors of `count` codes of `bits` bits.

    Attributes:
        bits: Bits of a code.
        count: Codes of a vector, and unpacked rows.
        packs_halves: Whether the low and the high half of a word are unpacked together, to a row each of 16 bits.
    """

    bits: int
    count: int
    packs_halves: bool = False

    @property
    def stored_bytes(self) -> int:
        """Returns the number of bytes of a vector."""
        return self.count * self.bits // 8

    @property
    def words(self) -> int:
        """Returns the number of words that planes are read from: those of a vector, or words of 24 bits."""
        return self.count // (CODES_PER_24_BITS if self.crosses_words else WORD_BITS // self.bits)

    @property
    def crosses_words(self) -> bool:
        """Returns whether a code may begin in one word and end in the next."""
        return self.bits == 3

    @property
    def copies(self) -> int:
        """Returns how often the words are repeated, to fill all sublanes."""
        return max(1, SUBLANES // self.words)

    @property
    def num_planes(self) -> int:
        """Returns the number of planes."""
        return self.count // (self.words * self.copies * self._halves)

    @property
    def _halves(self) -> int:
        return 2 if self.packs_halves else 1

    @property
    def is_supported(self) -> bool:
        """Returns whether vectors are whole words, and planes whole tiles of sublanes."""
        if self.count * self.bits % WORD_BITS or self.bits not in (1, 2, 3, 4):
            return False
        return self.words % SUBLANES == 0 or (self.words in (1, 2, 4) and not self.crosses_words)

    def as_rows(self, x: jax.Array) -> jax.Array:
        """Returns coordinates [..., count] in the order of unpacked rows."""
        shape = (*x.shape[:-1], self.words, self._halves, self.copies, self.num_planes)
        n = x.ndim - 1
        return x.reshape(shape).transpose(*range(n), n + 3, n + 2, n, n + 1).reshape(x.shape)

    def as_coordinates(self, x: jax.Array) -> jax.Array:
        """Returns unpacked rows [..., count] in the order of coordinates."""
        shape = (*x.shape[:-1], self.num_planes, self.copies, self.words, self._halves)
        n = x.ndim - 1
        return x.reshape(shape).transpose(*range(n), n + 2, n + 3, n + 1, n).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class CodeFormat:
    """The codes of a TurboQuant cache.

    Attributes:
        keys: Codes of keys.
        values: Codes of values.
        signs: Signs of the keys' residuals; None without them.
        sign_column: The column of the queries where those of the signs begin.
    """

    keys: CodeRows
    values: CodeRows
    signs: CodeRows | None
    sign_column: int

    @property
    def query_columns(self) -> int:
        """Returns the number of columns of packed queries."""
        return self.keys.count if self.signs is None else self.sign_column + self.signs.count
