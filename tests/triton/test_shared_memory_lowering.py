"""The bounds of shared memory that heuristics use, held against what Triton compiles for chips that are not here.

It runs where programs are lowered for GPUs (`nox -s triton_lowering`), since compiling takes minutes.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from recurrence_grid import GATES, delta_launches, delta_record
from shared_memory_grid import DEVICES, every_term, latent, paged
from triton_chips import on_chips

from ejkernel.ops import chips
from ejkernel.ops.device import target_device
from ejkernel_triton import ahead, launch
from ejkernel_triton.paged_attention import config as paged_config
from ejkernel_triton.paged_attention.config import shared_memory_bytes
from ejkernel_triton.paged_attention.fixed_splits import config as fixed_splits
from ejkernel_triton.paged_attention.forward import forward

F32, BF16, F16, I8 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8
FEATURES = {"logits_soft_cap": 30.0, "sliding_window": (100, 0)}
PAGED = {
    # What asked for 262,272 of 232,448 bytes.
    "float32, 256": paged(64, 8, (256, 256), (F32, F32)),
    "float32, 192": paged(64, 8, (192, 192), (F32, F32)),
    # And 262,144.
    "20 latent heads, int8": latent(64, 20, (512, 64), (F16, I8), **FEATURES),
    "float32, one sequence of many heads": paged(None, 128, (256, 256), (F32, F32), page=64),
    "float32 over int8": paged(16, 8, (128, 128), (F32, I8), page=64),
    "12 heads": paged(400, 12, (128, 128), (BF16, BF16), page=64),
    "int8": paged(16, 8, (256, 256), (BF16, I8)),
    "decoding": paged(None, 8, (128, 128), (BF16, BF16)),
    "latent decoding": latent(None, 16, (512, 64), (BF16, BF16)),
    "latent decoding, many heads": latent(None, 128, (512, 64), (BF16, BF16)),
    "latent decoding, float32": latent(None, 16, (256, 64), (F32, F32)),
    # Biases of pairs pass through shared memory: 196,608 bytes instead of 131,072.
    "trees": paged(4, 8, (128, 128), (BF16, I8), **every_term(8)),
    "packed trees": paged(4, 8, (128, 128), (BF16, BF16), page=64, **every_term(8, (8192,))),
    "trees of long prefills": paged(400, 8, (128, 128), (BF16, BF16), page=64, **every_term(8)),
    "trees in bfloat16": paged(400, 8, (128, 128), (BF16, BF16), page=64, **every_term(8, (400, 400), BF16)),
    "trees, float32": paged(64, 8, (256, 256), (F32, F32), **every_term(8)),
    "latent trees": latent(4, 16, (512, 64), (BF16, I8), **every_term(16)),
    "latent trees, many heads": latent(4, 128, (512, 64), (BF16, BF16), **every_term(128)),
    "decoding with a prefix": paged(None, 8, (128, 128), (BF16, BF16), **every_term(8, None)),
}


@pytest.mark.parametrize(("name", "target"), on_chips(PAGED))
def test_paged_attention_takes_at_most_the_predicted_shared_memory(name, target):
    record, device, chip = PAGED[name], DEVICES[target], chips.gpu_named(target)
    chosen = paged_config.heuristic(record, device, "forward")
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, chosen), record)
    attending = [call for call in calls if call.kernel.__name__ == "paged_attention_kernel"]
    # The keys of a prefix are another call, with tile sizes of its own.
    (own,) = (call for call in attending if not call.constants["spec"].LOAD_ROW_POSITIONS)
    assert len(attending) == 1 + (record.shared_prefix is not None)
    took, bound = ahead.shared_memory_bytes(own, target), shared_memory_bytes(record, chosen, chip)
    assert took <= bound <= chip.shared_memory
    assert all(ahead.shared_memory_bytes(call, target) <= chip.shared_memory for call in attending)


IN_A_BLOCK = ("float32, 256", "12 heads", "int8", "decoding")


@pytest.mark.parametrize(("name", "target"), on_chips(IN_A_BLOCK))
def test_splits_of_fixed_size_take_at_most_the_predicted_shared_memory(name, target):
    """Accumulators pass through shared memory in the main loop: 77,824 bytes instead of 71,680 in decoding."""
    record, device, chip = PAGED[name], DEVICES[target], chips.gpu_named(target)
    chosen = fixed_splits.batch_invariant(record, device, "forward")
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, chosen), record)
    (call,) = (call for call in calls if call.kernel.__name__ == "fixed_split_kernel")
    assert ahead.shared_memory_bytes(call, target) <= shared_memory_bytes(record, chosen, chip) <= chip.shared_memory


@pytest.mark.parametrize(
    ("gates_and_dtype", "target"),
    on_chips(itertools.product(GATES, (F32, BF16)), ["sm_80", "sm_90", "sm_120", "gfx942"]),
)
def test_the_delta_rule_fits_with_heads_of_256(gates_and_dtype, target):
    gates, dtype = gates_and_dtype
    calls = delta_launches(delta_record(gates, dtype), DEVICES[target])
    # Those that hold all key channels of a state.
    of_states = [call for call in calls if call.kernel.__name__ in ("chunk_fwd_h_kernel", "chunk_bwd_dhu_kernel")]
    took = {call.kernel.__name__: ahead.shared_memory_bytes(call, target) for call in of_states}
    assert len(took) == 2
    assert max(took.values()) <= chips.gpu_named(target).shared_memory, took
