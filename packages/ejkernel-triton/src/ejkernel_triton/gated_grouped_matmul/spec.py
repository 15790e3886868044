"""The compile-time constants of the gated grouped matmul's kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedSpec:
    """Constants of `gated_grouped_gemm_kernel`: T tokens, C contracted elements, M rows, F columns.

    Attributes:
        NUM_TOKENS: T.
        CONTRACTED_SIZE: C.
        ROWS: M.
        COLUMNS: F. With a gate, a matrix has 2 F columns: those of the gate and of the values.
        NUM_MATRICES: E.
        RHS_STRIDES: Strides of a matrix along contracted elements and along columns, in elements.
        GATE_LAYOUT: Columns of a matrix: the gate's and the values' in `"halves"` or `"interleaved"`, or `"no gate"`.
        GATHERS_ROWS: Whether rows name tokens; otherwise row m is token m.
        HAS_BIAS: Whether there is a bias.
        ACTIVATION: The gate's activation function: `"silu"`, `"gelu"` or `"relu2"`.
        ALPHA: Factor in the sigmoid of silu.
        BETA: Added to the values.
        CLAMP_LIMIT: The largest value of the gate, and the largest magnitude of the values; None for none.
        BLOCK_M: Rows per tile.
        BLOCK_N: Output columns per tile.
        BLOCK_K: Contracted elements per step.
        TILE_LIST_LENGTH: Entries of the tile list.
        NUM_PROGRAMS: Programs that share the tiles.
        GROUP_M: Tile rows per swizzle group: they run before the next column of tiles.
        PRECISION: How Triton multiplies float32 tiles: "ieee", "tf32" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
    """

    NUM_TOKENS: int
    CONTRACTED_SIZE: int
    ROWS: int
    COLUMNS: int
    NUM_MATRICES: int
    RHS_STRIDES: tuple[int, int]
    GATE_LAYOUT: str
    GATHERS_ROWS: bool
    HAS_BIAS: bool
    ACTIVATION: str
    ALPHA: float
    BETA: float
    CLAMP_LIMIT: float | None
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    TILE_LIST_LENGTH: int
    NUM_PROGRAMS: int
    GROUP_M: int
    PRECISION: str
    WIDEN_TO_FLOAT32: bool
