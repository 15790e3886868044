"""The selective scan of packed sequences in Triton: what its kernels take of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_fits_and_spills_nothing

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.device import target_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton import launch
from ejkernel_triton.selective_scan import DIFFERENTIABLE_FIELDS, config
from ejkernel_triton.selective_scan.backward import backward
from ejkernel_triton.selective_scan.forward import forward


def launches(chip, tokens=4096, channels=2048, sequences=16):
    """What a packed call with states and its gradients launch."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
    record = SelectiveScan(
        x=shape((1, tokens, channels), dtype),
        step=shape((1, tokens, channels), dtype),
        decay=shape((channels, 16), jnp.float32),
        write=shape((1, tokens, 16), dtype),
        read=shape((1, tokens, 16), dtype),
        skip=shape((channels,), jnp.float32),
        initial_state=shape((sequences, channels, 16), jnp.float32),
        cu_seqlens=shape((sequences + 1,), jnp.int32),
    )

    def run(record):
        output, residuals = forward(record, config.heuristic(record, CHIPS[chip], "forward"))
        saved = Pullback(
            record=record, residuals=residuals, output=output, cotangent=output, grad_fields=DIFFERENTIABLE_FIELDS
        )
        return backward(saved, config.heuristic(record, CHIPS[chip], "backward"))

    with target_device(CHIPS[chip]), launch.collect_launches() as calls:
        jax.eval_shape(run, record)
    return calls


@pytest.mark.parametrize("chip", ["sm_90"])
def test_packed_sequences_are_scanned_at_the_same_time_and_spill_nothing(chip):
    calls = launches(chip)
    assert [call.kernel.__name__ for call in calls] == ["selective_scan_fwd_kernel", "selective_scan_bwd_kernel"]
    assert all(call.grid == 16 * 2048 // 32 for call in calls)
    assert_fits_and_spills_nothing(calls, chip)
