"""`ejgpu.native_spare_attention` over blocks that are given, against a loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import ejgpu, modules
from ejkernel.xla_utils import prepare_token_indices

TOKENS, HEADS, KV_HEADS, SIZE = 21, 4, 2, 4
CU = jnp.array([0, 9, 9, 21])


def inputs() -> tuple[jax.Array, ...]:
    q, k, v = (
        ejgpu.numeric_gen(1, TOKENS, heads, 8, dtype="float32", seed=seed)
        for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    return q, k, v, ejgpu.generate_block_indices(1, TOKENS, KV_HEADS, 3, SIZE)


def loop(q, k, v, blocks, counts: int, bounds=(0, TOKENS)) -> np.ndarray:
    """Attention to the tokens of the listed blocks of the query's sequence, up to its own."""
    q, k, v = (np.asarray(x, np.float64)[0] for x in (q, k, v))
    output = np.zeros(q.shape)
    for start, end in itertools.pairwise(bounds):
        for t in range(start, end):
            for h in range(HEADS):
                kv_head = h // (HEADS // KV_HEADS)
                listed = {int(block) for block in blocks[0, t, kv_head, :counts]}
                seen = [j for j in range(start, t + 1) if (j - start) // SIZE in listed]
                if seen:
                    scores = np.exp([q[t, h] @ k[j, kv_head] * 8**-0.5 for j in seen])
                    output[t, h] = scores / scores.sum() @ v[seen, kv_head]
    return output[None]


@pytest.mark.parametrize("counts", [1, 3])
def test_listed_blocks_are_attended(counts):
    q, k, v, blocks = inputs()
    found = ejgpu.native_spare_attention(q, k, v, None, None, blocks, counts, SIZE)
    np.testing.assert_allclose(found, loop(q, k, v, blocks, counts), rtol=2e-5, atol=2e-5)


def test_packed_sequences_have_blocks_of_their_own():
    q, k, v, blocks = inputs()
    want = loop(q, k, v, blocks, 3, (0, 9, 21))
    for extra in ({}, {"token_indices": prepare_token_indices(CU)}):
        found = ejgpu.apply_native_spare_attention(q, k, v, blocks, 3, SIZE, cu_seqlens=CU, **extra)
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


def test_every_argument_reaches_native_sparse_attention():
    q, k, v, _ = inputs()
    g_cmp, g_slc = jax.nn.sigmoid(jax.random.normal(jax.random.key(9), (2, 1, TOKENS, HEADS)))

    @jax.jit
    def both(cu):
        found = ejgpu.native_spare_attention(q, k, v, g_cmp, g_slc, None, 2, SIZE, 0.3, cu)
        want = modules.native_sparse_attention(
            q, k, v, g_cmp, g_slc, None, 2, cu, block_size=SIZE, softmax_scale=0.3
        )  # fmt: skip
        return found, want

    np.testing.assert_array_equal(*both(CU))


def test_what_is_wrong_is_named():
    q, k, v, blocks = inputs()
    tokens = prepare_token_indices(CU)
    with pytest.raises(ValueError, match="block_indices: got None with g_cmp None"):
        ejgpu.apply_native_spare_attention(q, k, v, None, 3, SIZE)
    with pytest.raises(ValueError, match="token_indices: got a value without cu_seqlens"):
        ejgpu.apply_native_spare_attention(q, k, v, blocks, 3, SIZE, token_indices=tokens)
    with pytest.raises(ValueError, match="token_indices: got indices that cu_seqlens does not describe"):
        ejgpu.apply_native_spare_attention(q, k, v, blocks, 3, SIZE, cu_seqlens=CU, token_indices=tokens[::-1])
    with pytest.raises(ValueError, match=r"token_indices: got shape \(4, 2\), wants \[T=21, two=2\]"):
        ejgpu.apply_native_spare_attention(q, k, v, blocks, 3, SIZE, cu_seqlens=CU, token_indices=tokens[:4])
