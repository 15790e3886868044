"""The other functions of `ejkernel.ejgpu`: masks, recurrences, pooling, and the inputs for them."""

import subprocess
import sys

import ending_together
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import ejgpu, modules

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 4), (3, 6)])
def test_attention_with_a_mask_of_keys(queries, keys, causal):
    q, k, v, bias = arrays((2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 5), (1, 4, queries, keys))
    allowed = np.array([[1] * keys, [0] + [1] * (keys - 2) + [0]])
    want = [
        ending_together.attention(
            q[n], k[n], v[n], causal=causal, scale=0.3, bias=bias[0] + np.where(allowed[n], 0, -np.inf)
        )
        for n in range(2)
    ]
    options = {"softmax_scale": 0.3, "causal": causal, "bias": bias}

    @jax.jit
    def attend(mask):
        return ejgpu.flash_attention(q, k, v, mask, varlen_mode=False, **options)

    full = jnp.broadcast_to(allowed[:, None, None], (2, 1, queries, keys))
    np.testing.assert_allclose(attend(allowed), np.nan_to_num(want), **CLOSE)
    np.testing.assert_allclose(attend(full > 0), np.nan_to_num(want), **CLOSE)


def test_attention_with_a_mask_of_tokens():
    q, k, v = arrays((2, 6, 2, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    mask = np.array([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    found = ejgpu.flash_attention(q, k, v, mask, causal=True)
    for n, valid in enumerate(mask.astype(bool)):
        want = ending_together.attention(q[n, valid], k[n, valid], v[n, valid])
        np.testing.assert_allclose(found[n, valid], want, **CLOSE)
        assert not found[n, ~valid].any()


def test_attention_has_gradients_and_dropout():
    q, k, v = arrays((1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))

    def attend(q, seed):
        return jnp.sum(ejgpu.flash_attention(q, k, v, dropout_prob=0.5, dropout_seed=seed) ** 2)

    one, other = (jax.jit(jax.grad(attend))(q, seed) for seed in (0, 1))
    assert jnp.isfinite(one).all()
    assert (one != other).any()


def test_masks_that_do_not_fit_are_refused():
    q, k = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 5, 2, 4))
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(1, 5\) with varlen_mode, wants as many queries"):
        ejgpu.flash_attention(q, k, k, jnp.ones((1, 5)))
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(1, 3\), wants \[B=1, S=5\]"):
        ejgpu.flash_attention(q, k, k, jnp.ones((1, 3)))
    with pytest.raises(
        ValueError, match=r"attention_mask: got shape \(1, 1, 3, 4\), wants \[B=1, H=2 or 1, T=3, S=5\]"
    ):
        ejgpu.flash_attention(q, k, k, jnp.ones((1, 1, 3, 4)))


def test_recurrences_return_their_state():
    q, k, v = (jnp.asarray(x) for x in arrays((1, 9, 2, 4), (1, 9, 2, 4), (1, 9, 2, 6)))
    g, cu = -jnp.ones((1, 9, 2)), jnp.array([0, 4, 4, 9])
    start = jnp.ones((3, 2, 4, 6))
    options = {"scale": 0.5, "initial_state": start, "cu_seqlens": cu, "reverse": True}
    same = {"softmax_scale": 0.5, "initial_state": start, "cu_seqlens": cu, "reverse": True, "return_state": True}
    pairs = [
        (ejgpu.recurrent(q, k, v, g, gk=0.5 * k, gv=-v**2, **options),
         modules.recurrent_attention(q, k, v, g, gk=0.5 * k, gv=-v**2, **same)),
        (ejgpu.recurrent_gla(q, k, v, g, g_gamma=-jnp.ones(2), **options),
         modules.gated_linear_attention(q, k, v, g, g_gamma=-jnp.ones(2), **same)),
        (ejgpu.lightning_attn(q, k, v, 1, 4, **options),
         modules.lightning_attention(q, k, v, layer_idx=1, num_layers=4, **same)),
    ]  # fmt: skip
    for found, want in pairs:
        assert [x.shape for x in found] == [(1, 9, 2, 6), (3, 2, 4, 6)]
        jax.tree.map(np.testing.assert_array_equal, found, want)


def test_recurrences_match_a_loop():
    q, k, v = arrays((1, 5, 1, 3), (1, 5, 1, 3), (1, 5, 1, 2))
    g = -np.abs(arrays((1, 5, 1))[0])
    state, want = np.zeros((3, 2)), []
    for t in range(5):
        state = np.exp(g[0, t, 0]) * state + np.outer(k[0, t, 0], v[0, t, 0])
        want.append(q[0, t, 0] @ state)
    output, last = ejgpu.recurrent(q, k, v, g, scale=1.0)
    np.testing.assert_allclose(output[0, :, 0], want, **CLOSE)
    np.testing.assert_allclose(last[0, 0], state, **CLOSE)


def test_pooling_is_a_mean_of_chunks():
    (x,) = arrays((1, 7, 2, 3))
    found = ejgpu.mean_pooling(x, 3)
    np.testing.assert_allclose(found[0], [x[0, n : n + 3].mean(axis=0) for n in (0, 3, 6)], **CLOSE)
    packed = ejgpu.mean_pooling(x, 2, jnp.array([0, 3, 3, 7]))
    want = [x[0, a:b].mean(axis=0) for a, b in ((0, 2), (2, 3), (3, 5), (5, 7))]
    np.testing.assert_allclose(packed[0, :4], want, **CLOSE)
    assert not packed[0, 4:].any()


@pytest.mark.parametrize("equal", [True, False])
def test_varlen_input_helper_makes_packed_inputs(equal):
    q, k, v, metadata = ejgpu.varlen_input_helper(3, 4, 2, 31, 64, 8, equal_seqlens=equal, seed=5)
    assert (q.shape, q.dtype) == ((metadata.cu_seqlens_q[-1], 4, 8), jnp.float16)
    assert k.shape == v.shape == (metadata.cu_seqlens_k[-1], 2, 8)
    for side, longest in (("q", 10), ("k", 21)):
        lengths = np.diff(getattr(metadata, f"cu_seqlens_{side}"))
        assert (lengths == longest).all() if equal else ((lengths >= 1) & (lengths <= longest)).all()
        assert getattr(metadata, f"max_seqlens_{side}") == lengths.max()
    assert (metadata.sm_scale, metadata.layout, metadata.num_contexts) == (8**-0.5, "thd", 3)
    numbered = ejgpu.varlen_input_helper(3, 4, 2, 31, 64, 8, equal_seqlens=equal, debug_mode=True, seed=5)[0]
    np.testing.assert_array_equal(numbered[:, 1, 2], np.arange(q.shape[0]))
    with pytest.raises(ValueError, match="qseqlen: got int 2, wants an int of at least 3"):
        ejgpu.varlen_input_helper(3, 4, 2, 2, 64, 8)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_input_helper_makes_dense_inputs_and_metadata(layout):
    q, k, v, metadata = ejgpu.input_helper(2, 4, 2, 5, 6, 8, dtype="float32", layout=layout)
    metadata.need_causal().need_bias(jnp.ones((1, 1, 5, 6))).need_alibi(jnp.ones((2, 4))).need_dropout(0.25, 7)
    metadata.check_args(q, k, v)
    output = ejgpu.flash_attn_varlen(
        q, k, v, metadata.sm_scale, metadata.causal, metadata.layout, metadata.bias, metadata.dropout_p,
        metadata.alibi_slopes, metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.max_seqlens_q,
        metadata.max_seqlens_k, metadata.dropout_seed,
    )  # fmt: skip
    assert output.shape == q.shape
    metadata.layout = "thd"
    with pytest.raises(ValueError, match=r"layout: got 'thd' with varlen=False, wants bshd or bhsd"):
        metadata.check_args(q, k, v)
    with pytest.raises(ValueError, match=r"layout: got 'thd', wants 'bshd' or 'bhsd'"):
        ejgpu.input_helper(2, 4, 2, 5, 6, 8, layout="thd")


def test_attention_metadata_checks_its_arguments():
    metadata = ejgpu.AttentionMetadata()
    with pytest.raises(ValueError, match=r"cu_seqlens_k: got shape \(3,\), wants \[N\+1=2\]"):
        metadata.set_varlen_params(jnp.array([0, 1]), jnp.array([0, 1, 2]))
    with pytest.raises(ValueError, match=r"bias: got shape \(3,\)"):
        metadata.need_bias(jnp.ones(3))
    with pytest.raises(ValueError, match=r"alibi_slopes: got dtype int32, wants a floating dtype"):
        metadata.need_alibi(jnp.ones((1, 2), jnp.int32))
    with pytest.raises(ValueError, match=r"dropout_p: got 2"):
        metadata.need_dropout(2.0)
    q, k = jnp.ones((1, 4, 3, 2)), jnp.ones((1, 4, 2, 2))
    with pytest.raises(ValueError, match=r"k: got shape .* with 2 heads, wants a divisor of q's 3"):
        metadata.check_args(q, k, k)


def test_the_package_imports_its_modules_lazily():
    script = "import sys, ejkernel; print('ejkernel.ejgpu' in sys.modules); from ejkernel import ejgpu; "
    script += "print(*[name for name in sys.modules if name.startswith('ejkernel.modules.operations.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert done == "False\nejkernel.modules.operations.shared ejkernel.modules.operations.shared.shapes\n"
