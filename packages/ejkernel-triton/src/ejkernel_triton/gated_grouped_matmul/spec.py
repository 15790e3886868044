"""The compile-time constants of the gated grouped matmul's kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedSpec:
    """Constants of `gated_grouped_gemm_kernel`: T tokens, C contracted elements, M rows, F columns.

    Attributes:
        TOKENS: T.
        CONTRACTED: C.
        ROWS: M.
        COLUMNS: F; a matrix has twice as many.
        MATRICES: E.
        GATHERS: Whether rows name tokens; otherwise row m is token m.
        ACTIVATION: The gate's activation function.
        BLOCK_M: Rows per tile.
        BLOCK_N: Output columns per tile.
        BLOCK_K: Contracted elements per step.
        ENTRIES: Entries of the tile list.
        PROGRAMS: Programs that share the tiles.
        GROUP_M: Tile rows per swizzle group: they run before the next column of tiles.
        PRECISION: How Triton multiplies float32 tiles: "ieee", "tf32" or "tf32x3".
        WIDEN: Whether operands are converted to float32 first: the interpreter multiplies the bits of bfloat16.
    """

    TOKENS: int
    CONTRACTED: int
    ROWS: int
    COLUMNS: int
    MATRICES: int
    GATHERS: bool
    ACTIVATION: str
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    ENTRIES: int
    PROGRAMS: int
    GROUP_M: int
    PRECISION: str
    WIDEN: bool
