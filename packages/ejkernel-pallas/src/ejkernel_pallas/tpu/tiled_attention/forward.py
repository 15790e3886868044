"""Forward pass of tiled softmax attention on TPUs."""

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_pallas.tpu.mosaic.launch import launch
from ejkernel_pallas.tpu.tiled_attention.call import pairs_call
from ejkernel_pallas.tpu.tiled_attention.forward_kernel import forward_kernel, scratch
from ejkernel_pallas.tpu.tiled_attention.operands import canonical, of_heads, of_queries, operands, rows, unrows
from ejkernel_pallas.tpu.tiled_attention.pair_table import pairs_by_query
from ejkernel_pallas.tpu.tiled_attention.refs import ForwardRefs
from ejkernel_pallas.tpu.tiled_attention.spec import make_spec
from ejkernel_pallas.tpu.tiled_attention.tiles import TpuForward, forward_blocks


def forward(record: TiledAttention, params: TpuForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals of a record.

    Args:
        record: The canonical arguments.
        params: Tile sizes.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    record = canonical(record)
    spec = make_spec(record, forward_blocks(params))
    (batch, queries, heads, _), value_size = record.query.shape, record.value.shape[3]
    inputs = operands(record, spec)
    if record.softmax_aux is not None:
        inputs["sinks"] = of_heads(record.softmax_aux.astype(jnp.float32))
    shape = (batch, queries, heads, value_size)
    outputs = {
        "output": rows(jax.ShapeDtypeStruct(shape, record.query.dtype), spec.block_q),
        "lse": of_queries(jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32), spec),
    }
    table, kept = pairs_by_query(record, spec), scratch(spec, record.value.dtype)
    name = "ejkernel_attention_forward"
    made = launch(pairs_call(name, forward_kernel, ForwardRefs, table, spec, inputs, outputs, kept))
    return unrows(made["output"], shape), SoftmaxResiduals(lse=made["lse"].reshape(batch, heads, queries))
