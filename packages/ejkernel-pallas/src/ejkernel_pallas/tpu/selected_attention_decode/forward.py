"""Forward pass of the decode step of native sparse attention on TPUs: lists of blocks, and block means."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.selected_attention import (
    BranchResiduals,
    SelectedAttention,
    SelectedResiduals,
    select,
)
from ejkernel.families.selected_attention.branches import (
    attend_in_branches,
    dense_branch,
    with_zeroed_query_padding,
)
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.selected_attention.forward import DENSE_KERNEL
from ejkernel_pallas.tpu.selected_attention_decode import plan
from ejkernel_pallas.tpu.selected_attention_decode.config import NUM_BUFFERS, TpuSelectedDecode
from ejkernel_pallas.tpu.selected_attention_decode.kernels.attend_blocks import attend_blocks
from ejkernel_pallas.tpu.selected_attention_decode.kernels.refs import SelectedDecodeRefs
from ejkernel_pallas.tpu.selected_attention_decode.spec import BlockLists, SelectedDecodeSpec, make_spec


def forward(record: SelectedAttention, config: TpuSelectedDecode) -> tuple[jax.Array, SelectedResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tiles.

    Returns:
        [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """

    def attend(name: str, record: SelectedAttention) -> BranchResiduals | None:
        if name == "compressed":
            return dense_branch(name, record, DENSE_KERNEL)
        lists = plan.window_lists(record) if name == "window" else plan.selected_lists(record)
        return None if lists is None else _attend(record, lists, config)

    return attend_in_branches(with_zeroed_query_padding(record), attend, lambda record, _: select(record))


def _attend(record: SelectedAttention, lists: BlockLists, config: TpuSelectedDecode) -> BranchResiduals:
    """Returns attention of the queries to the blocks that they list."""
    batch, tokens, heads, _ = record.query.shape
    value_size = record.value.shape[3]
    if not record.query.size or not record.key.size or not record.value.size or not lists.blocks.size:
        lse = jnp.full((batch, heads, tokens), -jnp.inf, jnp.float32)
        return BranchResiduals(output=jnp.zeros((batch, tokens, heads, value_size), record.query.dtype), lse=lse)
    spec = make_spec(record, lists, config)
    inputs, outputs = _inputs(record, spec), _outputs(record, spec)
    scratch = _scratch(record, spec)
    blocks = tuple(x for x in (*inputs.values(), *outputs.values()) if x.block is not None and x.memory_space is None)
    memory = {name: x for name, x in scratch.items() if getattr(x, "memory_space", None) == pltpu.VMEM}
    results = launch(
        KernelCall(
            name="ejkernel_selected_attention_decode",
            kernel=functools.partial(attend_blocks, spec=spec),
            refs=SelectedDecodeRefs,
            grid=(batch * tokens * spec.steps_per_query,),
            scalar_tables=plan.scalar_tables(record, lists, spec),
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            vmem_limit=vmem_limit_bytes(blocks, memory),
            compiler_params={"disable_bounds_checks": True},
        )
    )
    output = results["output"][:, :, : spec.group_size].reshape(batch, tokens, heads, value_size)
    lse = results["lse"][:, :, : spec.group_size, 0].reshape(batch, tokens, heads).swapaxes(1, 2)
    return BranchResiduals(output=output, lse=lse)


def _rows_operand(array: Any, spec: SelectedDecodeSpec) -> Operand:
    """Returns the operand that gives a step its heads of [B T, Hk, rows, n]."""
    groups = spec.kv_heads // spec.heads_per_step

    def index(step: Any, *_: Any) -> Any:
        group = step // spec.steps_per_list
        return group // groups, group % groups, 0, 0

    return Operand(array, (None, spec.heads_per_step, *array.shape[2:]), index)


def _inputs(record: SelectedAttention, spec: SelectedDecodeSpec) -> dict[str, Operand]:
    """Returns the kernel's inputs: queries, and all keys and values in HBM."""
    return {
        "query": _rows_operand(plan.rows_of_heads(record, spec), spec),
        "keys": Operand(plan.copied_tokens(record.key, spec)),
        "values": Operand(plan.copied_tokens(record.value, spec)),
    }


def _outputs(record: SelectedAttention, spec: SelectedDecodeSpec) -> dict[str, Operand]:
    """Returns the kernel's outputs: rows of outputs, and lse in every lane."""
    shape = (record.query.shape[0] * spec.num_queries, spec.kv_heads, spec.rows)
    sizes = {"output": (record.value.shape[3], record.query.dtype), "lse": (LANES, jnp.float32)}
    return {
        name: _rows_operand(jax.ShapeDtypeStruct((*shape, size), dtype), spec) for name, (size, dtype) in sizes.items()
    }


def _scratch(record: SelectedAttention, spec: SelectedDecodeSpec) -> dict[str, Any]:
    """Returns the kernel's scratch memory."""
    tokens = spec.tokens_per_copy // spec.tokens_per_word
    copied = (
        NUM_BUFFERS,
        spec.lists_per_step,
        spec.copies_per_list,
        tokens,
        spec.word_rows_per_copy,
        spec.elements_per_word,
    )
    rows, copies = (spec.heads_per_step, spec.rows), (NUM_BUFFERS, spec.copies_per_step)
    buffers = {
        "key_buffer": pltpu.VMEM((*copied, record.key.shape[3]), record.key.dtype),
        "value_buffer": pltpu.VMEM((*copied, record.value.shape[3]), record.value.dtype),
        "row_max": pltpu.VMEM((*rows, LANES), jnp.float32),
        "row_sum": pltpu.VMEM((*rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((*rows, record.value.shape[3]), jnp.float32),
        "counts": pltpu.SMEM((NUM_BUFFERS, 2), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
    }
    names = ("valid_firsts", "valid_ends", "partial_copies")
    return buffers | {name: pltpu.SMEM(copies, jnp.int32) for name in names}
