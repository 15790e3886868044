"""Forward pass of the causal convolution on TPUs."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.causal_convolution import CausalConvolution, reference
from ejkernel.families.causal_convolution.final_states import final_states
from ejkernel_pallas.tpu.causal_convolution import plan
from ejkernel_pallas.tpu.causal_convolution.config import TpuConvolution
from ejkernel_pallas.tpu.causal_convolution.kernels.causal_conv_fwd import causal_conv_fwd
from ejkernel_pallas.tpu.causal_convolution.kernels.tile import HALO_TOKENS, ConvolutionRefs
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec, make_spec
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES


def forward(record: CausalConvolution, config: TpuConvolution) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns the output and the final states of a record.

    Args:
        record: The canonical arguments.
        config: Blocks.

    Returns:
        Output [B, T, C] and final states, both in x's dtype. There are no residuals.
    """
    spec = make_spec(record, config)
    results = run(
        "causal_conv_fwd",
        causal_conv_fwd,
        record,
        spec,
        inputs={},
        outputs={"output": block_operand(spec, jax.ShapeDtypeStruct(record.x.shape, record.x.dtype))},
        scratch={},
    )
    output = results["output"]
    if spec.computes_first_tokens_separately:
        first = plan.find_first_tokens(record)
        (rows, _), _ = reference(first.first_tokens_record)
        output = plan.replace_first_tokens(first, spec.is_packed, output, rows)
    return (output, final_states(record)), ()


def block_operand(spec: ConvolutionSpec, x: Any, *, reverses_token_blocks: bool = False) -> Operand:
    """Returns the operand that gives a grid step its block of [B, T, C]."""

    def block_index(batch_row: Any, channel_tile: Any, token_block: Any) -> tuple[Any, ...]:
        return batch_row, spec.blocks_per_row - 1 - token_block if reverses_token_blocks else token_block, channel_tile

    return Operand(x, (None, spec.block_t, spec.block_c), lambda *step: block_index(*step[:3]))


def run(
    name: str,
    kernel: Any,
    record: CausalConvolution,
    spec: ConvolutionSpec,
    *,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    scratch: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Runs a kernel on all blocks; x and the weights are among its inputs."""
    reverses_token_blocks = bool(inputs)
    weights = Operand(
        plan.weights_and_bias(record, spec), (spec.filter_width + 1, spec.block_c), lambda *step: (0, step[1])
    )
    tokens = pltpu.VMEM((spec.block_c // LANES, HALO_TOKENS + spec.block_t, LANES), jnp.float32)
    return launch(
        KernelCall(
            name=f"ejkernel_causal_convolution_{name}",
            kernel=functools.partial(kernel, spec=spec),
            refs=ConvolutionRefs,
            grid=(record.x.shape[0], spec.num_channel_tiles, spec.blocks_per_row),
            # Rows and channels; the blocks of a row follow each other.
            num_parallel_axes=2,
            scalar_tables=plan.scalar_tables(record, spec),
            inputs={
                "x": block_operand(spec, record.x, reverses_token_blocks=reverses_token_blocks),
                "weights": weights,
                **inputs,
            },
            outputs=outputs,
            scratch={"tokens_with_halo": tokens, **scratch},
        )
    )
