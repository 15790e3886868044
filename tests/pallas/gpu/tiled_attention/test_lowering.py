"""The Mosaic GPU kernels lowered for CUDA without a GPU: layouts, shared memory and shapes are checked by lowering."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.device import DeviceInfo
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel.types.pullback import Pullback
from ejkernel.types.sparse_masks import NumpyMask
from ejkernel_pallas.gpu.tiled_attention import config
from ejkernel_pallas.gpu.tiled_attention.backward import backward
from ejkernel_pallas.gpu.tiled_attention.forward import forward
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
HEADS = 4
DROPOUT = {"dropout_prob": 0.1, "dropout_seed": jax.ShapeDtypeStruct((), jnp.uint32)}
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"sliding_window": (100, 30)},
    "segments": {"causal": True},
    "soft cap": {"logits_soft_cap": 30.0},
    "sinks": {"causal": True, "softmax_aux": jax.ShapeDtypeStruct((HEADS,), jnp.float32)},
    "dropout": {"causal": True} | DROPOUT,
    "dropout, soft cap": {"logits_soft_cap": 30.0} | DROPOUT,
    "dropout, segments": DROPOUT,
    "pattern": {"causal": True, "pattern": NumpyMask(np.random.RandomState(0).rand(512, 512) < 0.3)},
}


def make(size, feature, queries=512, keys=512, dtype=jnp.bfloat16):
    shapes = ((2, queries, HEADS, size), (2, keys, 2, size), (2, keys, 2, 128 if size == 192 else size))
    q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    fields = dict(FEATURES[feature])
    if feature.endswith("segments"):
        fields |= {
            "q_segment_ids": jax.ShapeDtypeStruct((2, queries), jnp.int32),
            "kv_segment_ids": jax.ShapeDtypeStruct((2, keys), jnp.int32),
        }
    return TiledAttention(query=q, key=k, value=v, softmax_scale=0.1, **fields)


def lowered(record, forward_config, backward_config=None):
    """A call, and its gradients where there is a configuration for them."""
    wanted = frozenset(x for x in ("query", "key", "value", "softmax_aux") if getattr(record, x) is not None)

    def run(record):
        output, residuals = forward(record, forward_config)
        if backward_config is None:
            return output, residuals.lse
        saved = Pullback(record=record, residuals=residuals, output=output, cotangent=output, grad_fields=wanted)
        return output, backward(saved, backward_config)

    traced = jax.jit(run).trace(record)
    return traced.lower(lowering_platforms=("cuda",)).as_text(), traced.out_info


def tiles_of(record, direction):
    return config.heuristic(record, H200, direction)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_a_call_and_its_gradients_lower(size, feature):
    record = make(size, feature)
    text, (output, gradients) = lowered(record, tiles_of(record, "forward"), tiles_of(record, "backward"))
    assert text.count("@mosaic_gpu") == 2
    assert output.shape == (*record.query.shape[:3], record.value.shape[3])
    assert {name: x.shape for name, x in gradients.items()} == {name: getattr(record, name).shape for name in gradients}


@pytest.mark.parametrize("window", [None, (100, 3)])
@pytest.mark.parametrize(("size", "queries"), [(64, 300), (128, 1), (192, 70), (256, 70)])
def test_packed_rows_lower_in_a_batch_invariant_block(size, queries, window):
    """Blocks begin with documents. The second kernel is that of ids out of order."""
    record = dataclasses.replace(make(size, "segments", queries), sliding_window=window)
    params = dataclasses.replace(tiles_of(record, "forward"), batch_invariant=True)
    assert dataclasses.replace(make_spec(record), is_batch_invariant=True).lists_first_keys
    text, (output, _) = lowered(record, params)
    assert text.count("custom_call @mosaic_gpu") == 2
    assert output.shape == (*record.query.shape[:3], record.value.shape[3])


@pytest.mark.parametrize("window", [None, (100, 3)])
@pytest.mark.parametrize(("size", "queries"), [(64, 300), (64, 1), (128, 300), (128, 1), (192, 70), (256, 70)])
def test_positions_lower_in_a_batch_invariant_block_and_outside(size, queries, window):
    positions = {
        "q_positions": jax.ShapeDtypeStruct((2, queries), jnp.int32),
        "kv_positions": jax.ShapeDtypeStruct((1, 500), jnp.int32),
    }
    record = dataclasses.replace(make(size, "causal", queries, 500), sliding_window=window, **positions)
    for in_block in (False, True):
        params = dataclasses.replace(tiles_of(record, "forward"), batch_invariant=in_block)
        text, (output, lse) = lowered(record, params)
        assert text.count("custom_call @mosaic_gpu") == 1
        assert (output.shape, lse.shape) == ((2, queries, HEADS, record.value.shape[3]), (2, HEADS, queries))


@pytest.mark.parametrize("size", [64, 128])
def test_a_soft_cap_by_function_has_the_program_of_the_argument(size):
    function = score_function("score_mod", lambda score, b, h, q, k: 30.0 * jnp.tanh(score / 30.0), jnp.float32)
    records = make(size, "soft cap"), dataclasses.replace(make(size, "full"), score_mod=function)
    texts = [lowered(x, tiles_of(x, "forward"), tiles_of(x, "backward"))[0] for x in records]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("size", [64, 256])
def test_functions_of_pairs_lower(size):
    """A soft cap, whose derivative the backward pass needs, and a mask that reads an array by batch row and key."""
    starts = jnp.zeros((2, 512), jnp.int32)
    functions = {
        "score_mod": score_function("score_mod", lambda s, b, h, q, k: 3 * jnp.tanh(s / 3) + h, jnp.float32),
        "mask_mod": mask_function("mask_mod", lambda b, h, q, k: (q >= k) | (starts[b, k] == q)),
    }
    record = dataclasses.replace(make(size, "full"), **functions)
    text, _ = lowered(record, tiles_of(record, "forward"), tiles_of(record, "backward"))
    assert text.count("@mosaic_gpu") == 2


def test_a_scaled_difference_of_indices_lowers_with_a_mask():
    """With a scale that is a power of two, scores are in units of products, and the mask is not."""
    functions = {
        "score_mod": score_function("score_mod", lambda s, b, h, q, k: s + (k - q) * jnp.exp2(-h - 1.0), jnp.float32),
        "mask_mod": mask_function("mask_mod", lambda b, h, q, k: (q >= k) | (k < 70 + b)),
    }
    record = dataclasses.replace(make(64, "full"), softmax_scale=0.125, **functions)
    text, _ = lowered(record, tiles_of(record, "forward"), tiles_of(record, "backward"))
    assert text.count("@mosaic_gpu") == 2


@pytest.mark.parametrize("size", [128, 192, 256])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (129, 63), (700, 333)])
def test_lengths_that_tiles_do_not_divide_lower(queries, keys, size):
    record = make(size, "causal", queries, keys, jnp.float16)
    _, (output, gradients) = lowered(record, tiles_of(record, "forward"), tiles_of(record, "backward"))
    assert output.shape[1] == queries
    assert gradients["key"].shape[1] == keys


@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_candidates_fit_shared_memory(size):
    record = make(size, "dropout, segments")
    spec = make_spec(record)
    for params in config.candidates(record, H200, "forward"):
        assert config.forward_smem_bytes(config.forward_tile(params, spec), spec) <= config.SHARED_MEMORY_BYTES
    for params in config.candidates(record, H200, "backward"):
        assert config.backward_smem_bytes(config.backward_tile(params, spec), spec) <= config.SHARED_MEMORY_BYTES


@pytest.mark.parametrize("name", ["block_q", "block_kv", "stages"])
def test_invalid_forward_tile_fields_are_errors(name):
    record = make(128, "full")
    params = dataclasses.replace(tiles_of(record, "forward"), **{name: 1})
    with pytest.raises(ValueError, match=f"cfg: got {name}=1"):
        forward(record, params)


def test_tiles_that_exceed_shared_memory_are_errors():
    record = make(256, "full")
    params = dataclasses.replace(tiles_of(record, "forward"), stages=8)
    with pytest.raises(ValueError, match="shared memory"):
        forward(record, params)


@pytest.mark.parametrize(("name", "value", "word"), [("block_kv", 64, "block_kv=128"), ("stages", 9, "shared memory")])
def test_invalid_backward_tile_fields_are_errors(name, value, word):
    record = make(128, "full")
    params = dataclasses.replace(tiles_of(record, "backward"), **{name: value})
    with pytest.raises(ValueError, match=word):
        config.backward_tile(params, make_spec(record))
