"""Launches TPU kernels by `pallas_call`: arrays by name in, typed refs in the kernel, results by name out.

tables ────────────────────────────────► SMEM ─┐  (prefetched: index maps and the kernel read them)
inputs ─ Operand.block ─ double buffer ─► VMEM ─┤
         no block: left in HBM ────────────────┼─► refs(table=..., query=..., acc=...) ─► kernel(refs)
outputs ◄─ Operand.block ─ double buffer ─ VMEM ┤
scratch ───────────────── VMEM, SMEM, semaphores┘
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import _compat
from ejkernel_pallas.tpu.interpret import is_interpreting

Ref = Any
"""A reference to VMEM, SMEM, HBM or a semaphore, inside a kernel."""
BlockIndex = tuple[Any, ...]

DEFAULT_VMEM_LIMIT_BYTES = 48 * 2**20
"""The default limit of a kernel's VMEM: that of the chip with the least VMEM, minus what XLA keeps there."""
SMEM_BYTES = 2**20
"""Scalar memory of a core of every chip."""
MIN_COMPILER_VMEM_BYTES = 8 * 2**20
"""The least VMEM reserved for the compiler, in addition to blocks and scratch memory, where `vmem_limit_bytes` computes
a kernel's limit; a quarter of these if that is more.
"""


def identity_index(*grid_indices: Any) -> BlockIndex:
    """Returns the grid indices and tables themselves: the coordinates of operands whose index maps read these."""
    return grid_indices


@dataclasses.dataclass(frozen=True)
class Operand:
    """One array of a kernel.

    Attributes:
        array: The array that is passed; for results, a shape and dtype.
        block: Shape of a block, where None drops an axis. Without a block the array stays in HBM, and the kernel
            copies what it needs.
        index_map: Maps the coordinates of a grid step, and `table` if there is one, to the block's index.
        table: int32 vector that `index_map` reads; prefetched to scalar memory.
        memory_space: Where blocks are; None for VMEM.
    """

    array: Any
    block: tuple[int | None, ...] | None = None
    index_map: Callable[..., BlockIndex] = identity_index
    table: Any = None
    memory_space: Any = None

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of one block."""
        return math.prod(size or 1 for size in self.block or ()) * jnp.dtype(self.array.dtype).itemsize

    def spec(self, coordinate_map: Callable[..., BlockIndex]) -> pl.BlockSpec:
        """Returns the block's specification; `coordinate_map` returns a grid step's coordinates."""
        if self.block is None:
            return pl.BlockSpec(memory_space=pl.ANY)
        return pl.BlockSpec(
            self.block, lambda *step: self.index_map(*coordinate_map(*step)), memory_space=self.memory_space
        )


def resident_operand(array: Any) -> Operand:
    """Returns an operand that stays in VMEM as a whole for all grid steps."""
    return Operand(array, array.shape, lambda *_: (0,) * array.ndim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A kernel, its arrays, and its compile-time options.

    Attributes:
        name: Its name in traces and dumps.
        kernel: Called with the refs.
        refs: Constructs the refs from tables, inputs, outputs and scratch memory, passed by name.
        grid: Steps along each axis; may be traced.
        num_parallel_axes: The number of leading grid axes that are independent.
        scalar_tables: int32 vectors in scalar memory.
        inputs: The kernel's inputs.
        outputs: The kernel's outputs.
        scratch: Memories and semaphores that persist between steps, or tuples of them.
        coordinate_map: Maps grid indices and tables to the coordinates that operands' index maps read.
        aliases: Inputs whose memory becomes an output's: the output's name by the input's.
        vmem_limit: Bytes of VMEM.
        has_inner_pipelines: Whether the kernel contains pipelines.
        compiler_params: Further fields of `pltpu.CompilerParams`.
    """

    name: str
    kernel: Callable[[Any], None]
    refs: Callable[..., Any]
    grid: tuple[Any, ...] = ()
    num_parallel_axes: int = 0
    scalar_tables: Mapping[str, Any]
    inputs: Mapping[str, Operand]
    outputs: Mapping[str, Operand]
    scratch: Mapping[str, Any]
    coordinate_map: Callable[..., BlockIndex] = identity_index
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    vmem_limit: int = DEFAULT_VMEM_LIMIT_BYTES
    has_inner_pipelines: bool = False
    compiler_params: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def spec(self, name: str, x: Operand) -> pl.BlockSpec:
        """Returns the specification of an operand's block."""
        count = len(self.grid) + len(self.scalar_tables)
        if x.table is None:  # tables of other operands are left out
            return x.spec(lambda *step: self.coordinate_map(*step[:count]))
        table = count + [key for key, y in self.inputs.items() if y.table is not None].index(name)
        return x.spec(lambda *step: (*self.coordinate_map(*step[:count]), step[table]))


@dataclasses.dataclass(frozen=True)
class KernelMemory:
    """The memory that a kernel asks for, without what the compiler adds: spilled registers and padding of tiles.

    Attributes:
        vmem_bytes: Two buffers of every block in VMEM, and scratch memory there.
        smem_bytes: Scalar tables, two buffers of every block in SMEM, and scratch memory there.
    """

    vmem_bytes: int
    smem_bytes: int


def memory_of(call: KernelCall) -> KernelMemory:
    """Returns the memory of a kernel, computed from shapes alone."""
    operands = (*call.inputs.values(), *call.outputs.values())
    tables = [*call.scalar_tables.values(), *(x.table for x in call.inputs.values() if x.table is not None)]
    total = dict.fromkeys((pltpu.VMEM, pltpu.SMEM), 0) | {pltpu.SMEM: sum(4 * math.prod(x.shape) for x in tables)}
    for x in operands:
        total[x.memory_space or pltpu.VMEM] += 2 * x.block_bytes if x.block is not None else 0
    for x in jax.tree.leaves(tuple(call.scratch.values())):
        if getattr(x, "memory_space", None) in total:
            total[x.memory_space] += math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
    return KernelMemory(vmem_bytes=total[pltpu.VMEM], smem_bytes=total[pltpu.SMEM])


def check_memory(call: KernelCall) -> None:
    """Raises ValueError, before compilation, if a kernel needs more memory than it can have. Implementations refuse
    such calls first; their limits are in terms of the call.
    """
    memory = memory_of(call)
    for kind, needed, limit in (
        ("VMEM", memory.vmem_bytes, call.vmem_limit),
        ("SMEM", memory.smem_bytes, SMEM_BYTES),
    ):
        if needed > limit:
            raise ValueError(f"{call.name}: got blocks and tables of {needed} bytes of {kind}, wants at most {limit}")


def launch(call: KernelCall) -> dict[str, jax.Array]:
    """Runs a kernel; returns its results by name.

    Raises:
        ValueError: The kernel needs more memory than a chip has.
    """
    check_memory(call)
    inputs, outputs = call.inputs, list(call.outputs)
    names = (*call.scalar_tables, *inputs, *outputs, *call.scratch)
    tables = [*call.scalar_tables.values(), *(x.table for x in inputs.values() if x.table is not None)]
    arrays = [_keep_in_hbm(x.array) if name in call.aliases and x.block else x.array for name, x in inputs.items()]
    kernel_operands = _compat.as_varying([*tables, *arrays], arrays)

    def kernel(*refs: Any) -> None:
        # Tables of single operands are for index maps only and are not passed to the kernel.
        named = (*refs[: len(call.scalar_tables)], *refs[len(tables) :])
        call.kernel(call.refs(**dict(zip(names, named, strict=True))))

    run = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=call.grid,
            in_specs=[call.spec(*item) for item in inputs.items()],
            out_specs=[call.spec(*item) for item in call.outputs.items()],
            scratch_shapes=list(call.scratch.values()),
        ),
        out_shape=[
            _compat.shape_varying_like(x.array.shape, x.array.dtype, kernel_operands[-1]) for x in call.outputs.values()
        ],
        input_output_aliases={
            n: outputs.index(call.aliases[name]) for n, name in enumerate(inputs, len(tables)) if name in call.aliases
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * call.num_parallel_axes
            + ("arbitrary",) * (len(call.grid) - call.num_parallel_axes)
            or None,
            vmem_limit_bytes=call.vmem_limit,
            **call.compiler_params,
        ),
        interpret=is_interpreting(),
        name=call.name,
    )
    with _compat.trace_without_tpu() if call.has_inner_pipelines else contextlib.nullcontext():
        return dict(zip(outputs, run(*kernel_operands), strict=True))


def _keep_in_hbm(array: Any) -> Any:
    """Returns an array that XLA does not move to VMEM, and back after the kernel, where it has room for all of it.

    Only an array that is updated in place needs this: the kernel copies the few blocks that it changes itself.
    """
    return array if is_interpreting() else _constrain_to_hbm(array)


@jax.custom_batching.custom_vmap
def _constrain_to_hbm(array: Any) -> Any:
    return pltpu.with_memory_space_constraint(array, pltpu.HBM)


def _constrain_batch_to_hbm(axis_size: int, is_batched: list[bool], array: Any) -> tuple[Any, bool]:
    """Returns the constraint on all arrays of a batch; JAX has no rule of its own."""
    return _constrain_to_hbm(array), is_batched[0]


_constrain_to_hbm.def_vmap(_constrain_batch_to_hbm)


def vmem_limit_bytes(operands: tuple[Operand, ...], scratch: Mapping[str, Any]) -> int:
    """Returns the bytes of VMEM for two blocks of every operand, scratch memory, and the compiler's reserve."""
    scratch_bytes = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in scratch.values())
    used_bytes = 2 * sum(x.block_bytes for x in operands) + scratch_bytes
    return used_bytes + max(MIN_COMPILER_VMEM_BYTES, used_bytes // 4)
