"""Forward pass of tiled softmax attention on TPUs."""

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_pallas.tpu.mosaic.launch import launch
from ejkernel_pallas.tpu.tiled_attention.config import TpuForward, forward_blocks
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_forward import forward_kernel, forward_scratch
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import (
    canonical_record,
    operands,
    per_head_operand,
    per_query_operand,
    rows_operand,
    undo_rows_layout,
    with_segments_of_function,
)
from ejkernel_pallas.tpu.tiled_attention.kernels.pair_call import tile_pairs_call
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import ForwardRefs
from ejkernel_pallas.tpu.tiled_attention.plan import pairs_by_query
from ejkernel_pallas.tpu.tiled_attention.spec import make_spec


def forward(record: TiledAttention, config: TpuForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes.

    Raises:
        ValueError: A tile size is not valid for a kernel.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    record = with_segments_of_function(canonical_record(record))
    spec = make_spec(record, forward_blocks(config))
    (batch, queries, heads, _), value_size = record.query.shape, record.value.shape[3]
    inputs = operands(record, spec)
    if record.softmax_aux is not None:
        inputs["sinks"] = per_head_operand(record.softmax_aux.astype(jnp.float32))
    shape = (batch, queries, heads, value_size)
    outputs = {
        "output": rows_operand(jax.ShapeDtypeStruct(shape, record.query.dtype), spec.block_q),
        "lse": per_query_operand(jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32), spec),
    }
    table, scratch_memory = pairs_by_query(record, spec), forward_scratch(spec, record.value.dtype)
    name = "ejkernel_attention_forward"
    results = launch(tile_pairs_call(name, forward_kernel, ForwardRefs, table, spec, inputs, outputs, scratch_memory))
    return undo_rows_layout(results["output"], shape), SoftmaxResiduals(
        lse=results["lse"].reshape(batch, heads, queries)
    )
