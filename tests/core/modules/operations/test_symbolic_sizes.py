"""Batch, tokens and requests are exported as symbols: one program serves every size, with its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import modules
from ejkernel.quantization import quantize

SIZES = ({"b": 1, "t": 1, "r": 1}, {"b": 3, "t": 21, "r": 3})
"""One token, which is fewer than any tile has, and several."""

QKV = {"query": "b t 4 8", "key": "b t 2 8", "value": "b t 2 8"}
RWKV = {name: "b t 2 8" for name in ["r", "k", "v", "a", "b"]} | {"w": "b t 2 8 negative"}
NETWORK = {"x": "b t 6", "weight_ih": "1 24 6", "weight_hh": "1 1 24 8"}
INDEXER = {"query": "b t 4 8", "key": "b t 8", "weights": "b t 4"}
LATENT = {"query": "b t 4 12", "key_value": "b t 16", "w_kc": "16 4 8", "w_vc": "16 4 8", "b_k": "b t 4"}
SELECTION = {"query_index": "b t 2 8", "key_index": "b t 8", "index_weights": "b t 2"}
GATES = {"beta": "b t 4 share", "decay": "b t 4 negative"}
HEAD = {"hidden": "b t 8", "lm_head_weight": "8 12", "targets": "b t below 12"}

CALLS = {
    "attention": ("attention", QKV, {"causal": True}),
    "routing": ("expert_routing", {"logits": "t 8"}, {"top_k": 2}),
    "indexer": ("lightning_indexer", INDEXER, {"top_k": 3}),
    "listed tokens": ("token_sparse_attention", QKV | {"indices": "b t 2 3 below 9"}, {}),
    "listed blocks": ("native_sparse_attention", QKV | {"block_indices": "b t 2 2 below 2"}, {"block_size": 4}),
    "selected blocks": (
        "native_sparse_attention",
        QKV | {"g_cmp": "b t 4 share"},
        {"block_size": 4, "block_counts": 2},
    ),
    "sparse latents": ("deepseek_attn", LATENT | SELECTION, {"index_topk": 3, "softmax_scale": 0.3}),
    "indexer loss": (
        "lightning_indexer_loss",
        {"query": "b t 4 8", "key": "b t 2 8", "indices": "b t 3 below 9", "scores": "b t 3"},
        {},
    ),
    "dense indexer loss": (
        "lightning_indexer_dense_loss",
        {"query": "b t 4 8", "key": "b t 2 8"} | SELECTION,
        {},
    ),
    "losses of logits": ("fused_cross_entropy", {"logits": "b t 12", "targets": "b t below 12"}, {}),
    "losses of a head": ("fused_cross_entropy", HEAD, {}),
    "losses of chunks": ("fused_cross_entropy", HEAD, {"chunk_size": 4, "chunk_strategy": "token"}),
    "delta rule": ("gated_delta_rule", QKV | GATES, {}),
    "rwkv7": ("rwkv7", RWKV, {}),
    "mamba 1": (
        "state_space_v1",
        {"hidden_states": "b t 6", "A": "6 4 negative", "B": "b t 4", "C": "b t 4", "D": "6", "dt": "b t 6 share"},
        {},
    ),
    "convolution": ("causal_conv1d", {"x": "b t 6", "weight": "6 4", "initial_state": "b 6 3"}, {"return_state": True}),
    "recurrent network": ("gru", NETWORK, {}),
    "pooling": ("mean_pooling", {"x": "b t 6"}, {"chunk_size": 4}),
    "groups": ("grouped_matmul", {"lhs": "t 8", "rhs": "3 8 6", "group_sizes": "3 below 1"}, {}),
    "requests": (
        "decode_attention",
        {
            "query": "r 4 8",
            "key_buffer": "64 2 8",
            "value_buffer": "64 2 8",
            "req_to_tokens": "r 8 below 64",
            "kv_lens": "r below 8",
        },
        {},
    ),
    "pages": (
        "unified_attention",
        {
            "queries": "r 4 8",
            "key_cache": "9 4 2 8",
            "value_cache": "9 4 2 8",
            "kv_lens": "r below 8",
            "block_tables": "r 3 below 9",
            "query_start_loc": "r+1 cumulative",
        },
        {},
    ),
}
"""Operation, its arrays with what they hold, and other arguments."""


def shape_and_kind(text, sizes):
    dims = [word for word in text.split() if word[0].isdigit() or (word[0] in sizes and len(word) in (1, 3))]
    if "below" in text:
        dims.pop()
    shape = tuple(int(d) if d.isdigit() else sizes[d[0]] + (1 if d.endswith("+1") else 0) for d in dims)
    return shape, next((kind for kind in ("negative", "share", "below", "cumulative") if kind in text), "normal")


def array_of(text, sizes, random):
    shape, kind = shape_and_kind(text, sizes)
    if kind == "below":
        return jnp.asarray(random.integers(0, int(text.split()[-1]), shape), jnp.int32)
    if kind == "cumulative":
        return jnp.arange(shape[0], dtype=jnp.int32)
    x = random.standard_normal(shape).astype(np.float32) / 2
    return jnp.asarray({"normal": x, "negative": -abs(x), "share": 1 / (1 + np.exp(-x))}[kind])


def struct_of(text, sizes):
    shape, kind = shape_and_kind(text, sizes)
    return jax.ShapeDtypeStruct(shape, jnp.int32 if kind in ("below", "cumulative") else jnp.float32)


def outputs_and_gradients(name, options):
    operation = getattr(modules, name)

    def run(arrays):
        floating = {key: x for key, x in arrays.items() if x.dtype == jnp.float32}

        def loss(floating):
            outputs = jax.tree.leaves(operation(**{**arrays, **floating}, **options))
            floats = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum((jnp.sum(jnp.sin(jnp.where(jnp.isfinite(x), x, 0))) for x in floats), 0.0), outputs

        if name in ("decode_attention", "unified_attention", "expert_routing"):  # without gradients
            return loss(floating)[1]
        return jax.grad(loss, has_aux=True)(floating)

    return jax.jit(run)


@pytest.mark.parametrize("call", CALLS)
def test_one_program_serves_every_size(call):
    name, arrays, options = CALLS[call]
    letters = sorted({word[0] for text in arrays.values() for word in text.split() if word in ("b", "t", "r", "r+1")})
    symbols = dict(zip(letters, jax.export.symbolic_shape(", ".join(letters)), strict=True))
    run = outputs_and_gradients(name, options)
    program = jax.export.export(run)({key: struct_of(text, symbols) for key, text in arrays.items()})
    for sizes in SIZES:
        random = np.random.default_rng(0)
        inputs = {key: array_of(text, sizes, random) for key, text in arrays.items()}
        for got, want in zip(*map(jax.tree.leaves, (program.call(inputs), run(inputs))), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
def test_one_program_multiplies_any_number_of_rows_with_a_quantised_matrix(mode):
    matrix = jax.random.normal(jax.random.key(0), (64, 48))
    w, scales, rest = quantize(matrix, mode=mode)
    options = {"zeros": rest} if mode == "affine" else {"tensor_scale": rest}

    def run(x):
        return modules.quantized_matmul(x, w, scales, mode=mode, transpose=True, **options)

    shape = jax.export.symbolic_shape("b, t, 64")
    program = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct(shape, jnp.float32))
    for sizes in SIZES:
        x = jax.random.normal(jax.random.key(1), (sizes["b"], sizes["t"], 64))
        np.testing.assert_allclose(program.call(x), run(x), rtol=2e-5, atol=2e-5)


def test_a_batch_invariant_block_names_the_sizes_that_have_to_be_numbers():
    from ejkernel.ops import batch_invariant

    def attend(x):
        with batch_invariant():
            return modules.lightning_indexer(x, x[:, :, 0], x[..., 0], top_k=2)

    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t, 2, 8"), jnp.float32)
    with pytest.raises(NotImplementedError, match="symbolic sizes cannot be cut into fixed tiles"):
        jax.export.export(jax.jit(attend))(shape)
