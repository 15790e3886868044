"""The refs of the grouped-matmul kernels: blocks of arrays, results and scratch memory, each with its shape."""

import dataclasses

from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsRefs:
    """Refs of the kernel that accumulates for tiles of rows; unused fields are None.

    Attributes:
        work_items: Work items in scalar memory, as module `plan` lists them.
        rows: [block_m, block_k], rows of the left operand.
        matrices: [block_k, block_n], a tile of the group's matrix, or the other way around if
            `GroupedSpec.transposes_matrices`.
        output: [block_m, block_n].
        scales: [blocks of scales, block_n], or [blocks of scales, block_k] for the gradient.
        bias: [1, block_n].
        existing_output: [block_m, block_n] of an input, not aliased with `output`: added to products, and copied to
            rows that no group has.
        acc: Scratch, float32 [block_m, block_n].
        staged_last_product: Scratch, float32 [block_m, 256]: the last product of a sum.
        row_mask: Scratch, int32 [rows of a subtile, 128]: 1 where a row belongs to the item's matrix.
        factor_matrices: The columns of a gated product's factor, like `matrices`, if they have separate blocks.
        factor_bias: Their bias, in the shape of `bias`.
        factor_acc: Their accumulator, in the shape of `acc`.
        row_has_token: float32 [1, block_m]: 1 where a row of a gated product has a token.
    """

    work_items: Ref
    rows: Ref
    matrices: Ref
    output: Ref
    scales: Ref = None
    bias: Ref = None
    existing_output: Ref = None
    acc: Ref = None
    staged_last_product: Ref = None
    row_mask: Ref = None
    factor_matrices: Ref = None
    factor_bias: Ref = None
    factor_acc: Ref = None
    row_has_token: Ref = None

    @property
    def refs_per_product(self) -> "tuple[RowsRefs, ...]":
        """Returns the refs of each product of a tile: of gate and factor where they have blocks of their own."""
        if self.factor_matrices is None:
            return (self,)
        factor = dataclasses.replace(
            self,
            matrices=self.factor_matrices,
            bias=self.factor_bias,
            acc=self.factor_acc,
        )
        return self, factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatricesRefs:
    """Refs of the kernel that accumulates for tiles of matrices; unused fields are None.

    Attributes:
        work_items: Work items in scalar memory, as module `plan` lists them.
        cotangent: [block_m, block_n].
        rows: [block_m, block_k].
        scales: [blocks of scales, block_n].
        matrices: [block_k, block_n], or the other way around if `GroupedSpec.transposes_matrices`.
        rhs: Gradient in the shape of the matrices.
        rhs_scale: [blocks of scales, block_n].
        rhs_bias: [1, block_n].
        acc: Scratch, float32, in the shape of the matrices.
        group_rows_buffer: Scratch, [rows of a subtile, block_k]: rows with 0 in place of those of other groups.
        group_cotangent_buffer: Scratch, [rows of a subtile, block_n], the same for the cotangent.
        bias_acc: Scratch, float32 [1, block_n].
    """

    work_items: Ref
    cotangent: Ref
    rows: Ref = None
    scales: Ref = None
    matrices: Ref = None
    rhs: Ref = None
    rhs_scale: Ref = None
    rhs_bias: Ref = None
    acc: Ref = None
    group_rows_buffer: Ref = None
    group_cotangent_buffer: Ref = None
    bias_acc: Ref = None
