"""The linear recurrence's kernels compiled for real chips by their own compiler, which needs none of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.modules import (
    gated_delta_rule,
    kernel_delta_attention,
    lightning_attention,
    ragged_gated_delta_rule,
    rwkv7,
)
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

T, H, D = 256, 2, 128


def tokens(heads=H, *sizes, dtype="bfloat16"):
    return shaped((1, T, heads, *sizes), dtype)


def lightning(query, key, value):
    """The call of the documentation."""
    return lightning_attention(query, key, value, layer_idx=0, num_layers=24, platform="pallas")


CALLS = {
    "lightning": (lightning, (tokens(H, D),) * 3),
    "a gate a head": (
        functools.partial(gated_delta_rule, platform="pallas"),
        (*(tokens(H, D),) * 3, tokens(dtype="float32"), tokens(dtype="float32")),
    ),
    "a gate a channel": (
        functools.partial(kernel_delta_attention, platform="pallas"),
        (*(tokens(H, D),) * 3, tokens(dtype="float32"), tokens(H, D, dtype="float32")),
    ),
    "low-rank term": (
        functools.partial(rwkv7, platform="pallas"),
        (tokens(H, 64), tokens(H, 64, dtype="float32"), *(tokens(H, 64),) * 4),
    ),
}
STEPS = {
    "a gate a head": tokens(dtype="float32"),
    "a gate a channel": tokens(H, D, dtype="float32"),
}


@pytest.mark.parametrize(("gates", "chip_name"), on_chips(STEPS))
def test_decode_steps_update_donated_slots_without_a_copy(gates, chip_name):
    def step(query, key, value, beta, decay, slots, starts, indices):
        rows = (x[0] for x in (query, key, value, beta, decay))
        return ragged_gated_delta_rule(*rows, slots, starts, indices, platform="pallas")

    slots = shaped((T // 2, H, D, D), "float32")
    starts, indices = shaped((T // 4 + 1,), "int32"), shaped((T // 4,), "int32")
    given = (*(tokens(H, D),) * 3, tokens(dtype="float32"), STEPS[gates], slots, starts, indices)
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[chip_name].kind)):
        run = compiled(step, given, chip_name, donate=5)
    memory, size = run.memory_analysis(), 4 * slots.size
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 4
    shape = f"f32[{T // 2},{H},{D},{D}]"
    assert not [line for line in run.as_text().splitlines() if f" = {shape}" in line and " copy" in line]


@pytest.mark.parametrize(("call", "name"), on_chips(CALLS))
def test_both_passes_compile_and_keep_no_scores(call, name):
    run, arguments = CALLS[call]

    def both(*arguments):
        output, pull = jax.vjp(lambda *given: jax.tree.leaves(run(*given))[0], *arguments)
        return output, pull(jnp.ones_like(output))

    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        made = compiled(both, arguments, name)
    for kernel in ("chunk_fwd", "chunk_states", "chunk_bwd"):
        assert f"ejkernel_linear_recurrence_{kernel}" in made.as_text()
    # States of two chunks and of the gradients: nothing grows with the square of the length.
    assert made.memory_analysis().temp_size_in_bytes < 16 * T * H * D * 4
