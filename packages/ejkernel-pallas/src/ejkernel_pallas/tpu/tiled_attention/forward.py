"""Forward pass of tiled softmax attention on TPUs."""

import functools

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.ops.config.params import FwdParams
from ejkernel_pallas.tpu.mosaic.launch import Call, launch
from ejkernel_pallas.tpu.tiled_attention.forward_kernel import forward_kernel, scratch
from ejkernel_pallas.tpu.tiled_attention.operands import canonical, of_heads, of_queries, operands, rows, unrows
from ejkernel_pallas.tpu.tiled_attention.refs import ForwardRefs
from ejkernel_pallas.tpu.tiled_attention.spec import make_spec
from ejkernel_pallas.tpu.tiled_attention.tiles import forward_blocks
from ejkernel_pallas.tpu.tiled_attention.visits import distinct_rows, key_visits, walk


def forward(record: TiledAttention, params: FwdParams) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals of a record.

    Args:
        record: The canonical arguments.
        params: `q_blocksize`, `kv_blocksize`; of one product `blocksize_m` queries, `blocksize_n` keys.

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
        "output": rows(jax.ShapeDtypeStruct(shape, record.query.dtype), spec.q_block),
        "lse": of_queries(jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32), spec),
    }
    table = key_visits(record, spec)
    distinct = distinct_rows(table)
    made = launch(
        Call(
            name="ejkernel_attention_forward",
            kernel=functools.partial(forward_kernel, spec=spec, distinct=distinct),
            refs=ForwardRefs,
            grid=(batch, heads, table.shape[2]),
            parallel=2,
            tables={"table": table.reshape(-1)},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch(spec, record.value.dtype),
            where=functools.partial(walk, distinct=distinct),
        )
    )
    return unrows(made["output"], shape), SoftmaxResiduals(lse=made["lse"].reshape(batch, heads, queries))
