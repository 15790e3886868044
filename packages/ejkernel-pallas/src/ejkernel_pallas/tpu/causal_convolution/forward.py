"""Forward pass of the causal convolution on TPUs."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.causal_convolution import CausalConvolution, reference
from ejkernel.families.causal_convolution.final_states import final_states
from ejkernel.families.causal_convolution.slot_states import forward_with_slot_states
from ejkernel_pallas.tpu.causal_convolution import plan
from ejkernel_pallas.tpu.causal_convolution.config import TpuConvolution
from ejkernel_pallas.tpu.causal_convolution.kernels.causal_conv_fwd import causal_conv_fwd
from ejkernel_pallas.tpu.causal_convolution.kernels.causal_conv_update import UpdateRefs, causal_conv_update
from ejkernel_pallas.tpu.causal_convolution.kernels.tile import HALO_TOKENS, ConvolutionRefs
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec, make_spec
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES


def forward(record: CausalConvolution, config: TpuConvolution) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns the output and the final states of a record.

    Args:
        record: The canonical arguments.
        config: Blocks.

    Returns:
        Output [B, T, C] and final states, both in x's dtype, or the slots in theirs. There are no residuals.
    """
    states, channels = plan.slot_states(record), plan.update_block_channels(record, config)
    if states is None or not channels:
        return _convolve_blocks(record, config)
    return _update_slots(record, states, dataclasses.replace(make_spec(record, config), block_c=channels)), ()


@forward_with_slot_states
def _convolve_blocks(
    record: CausalConvolution, config: TpuConvolution
) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns the output and the final states of a record, by blocks of tokens."""
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


def _update_slots(
    record: CausalConvolution, states: plan.SlotStates, spec: ConvolutionSpec
) -> tuple[jax.Array, jax.Array]:
    """Returns the output of a step, and the slots with the last tokens of its sequences, updated in place."""
    slots, x = jnp.transpose(states.slots, (2, 0, 1)), record.x[0]  # the layout of XLA on TPUs: no copy
    by_row = pltpu.VMEM((x.shape[0] * SUBLANES, LANES), jnp.float32)
    weights = Operand(
        plan.weights_by_row(record, spec),
        (spec.filter_width + 1, None, SUBLANES, LANES),
        lambda tile, *_: (0, tile, 0, 0),
    )

    def tile_operand(x: Any) -> Operand:
        return Operand(x, (*x.shape[:-1], spec.block_c), lambda tile, *_: (*(0,) * (len(x.shape) - 1), tile))

    results = launch(
        KernelCall(
            name="ejkernel_causal_convolution_causal_conv_update",
            kernel=functools.partial(causal_conv_update, spec=spec),
            refs=UpdateRefs,
            grid=(x.shape[1] // spec.block_c,),
            num_parallel_axes=1,
            scalar_tables=plan.slot_tables(states, x.shape[0]),
            inputs={"x": tile_operand(x), "weights": weights, "initial_states": tile_operand(slots)},
            outputs={
                "output": tile_operand(jax.ShapeDtypeStruct(x.shape, x.dtype)),
                "final_states": tile_operand(jax.ShapeDtypeStruct(slots.shape, slots.dtype)),
            },
            scratch={
                "tokens_by_row": by_row,
                "outputs_by_row": by_row,
                "states_by_row": pltpu.VMEM((slots.shape[0], slots.shape[1] * SUBLANES, LANES), jnp.float32),
            },
            aliases={"initial_states": "final_states"},
        )
    )
    return results["output"][None], jnp.transpose(results["final_states"], (1, 2, 0))


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
