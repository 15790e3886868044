"""GPT-OSS's experts from the blocks and scales of its checkpoint, against the matrices that these stand for."""

import jax
import numpy as np
from tests.models.recipes import gpt_oss_experts

EXPERTS, HIDDEN, COLUMNS = 4, 32, 32
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def matrices(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrices [E, K, N] of blocks [E, N, K / 32, 16] and scales [E, N, K / 32], in NumPy."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.where(codes & 8, -1, 1) * FP4[codes & 7] * 2.0 ** (scales.astype(np.int32) - 127)[..., None]
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2).astype(np.float32)


def test_blocks_and_scales_are_the_matrices_they_stand_for() -> None:
    rng = np.random.default_rng(0)
    names = {"experts.gate_up_proj": 2 * COLUMNS, "experts.down_proj": HIDDEN}
    biases = {f"{name}_bias": rng.normal(size=(EXPERTS, size)).astype(np.float32) for name, size in names.items()}
    router = {"router.weight": rng.normal(size=(EXPERTS, HIDDEN)), "router.bias": rng.normal(size=EXPERTS)}
    weights = {name: x.astype(np.float32) for name, x in {**biases, **router}.items()}
    stored, dense = {}, {}
    for name, size in names.items():
        blocks = rng.integers(0, 256, (EXPERTS, size, 1, 16)).astype(np.uint8)
        scales = rng.integers(122, 126, (EXPERTS, size, 1)).astype(np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = matrices(blocks, scales)
    x = rng.normal(size=(2, 9, HIDDEN)).astype(np.float32)
    got = jax.jit(gpt_oss_experts.on_disk)(weights | stored, x)
    want = jax.jit(gpt_oss_experts.prefill)(weights | dense, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
