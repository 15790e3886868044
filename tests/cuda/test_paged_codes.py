"""Decoding over codes without a GPU: what is served, what is refused, and how blocks are dealt."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel import explain
from ejkernel.modules import ragged_page_attention_v2_turboquant
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.plugins import registry
from ejkernel_cuda import library
from ejkernel_cuda.paged_codes import FORMATS, IMPLEMENTATIONS, config
from ejkernel_cuda.paged_codes import forward as call
from ejkernel_cuda.paged_decode.config import PagedDecodeGrid

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)


def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(key_bits=4, value_bits=4, signs=0, size=128, rows=4, heads=8, kv_heads=2, **changes):
    """The arguments of a call on four sequences, by name."""
    pages, real = (32, 16, kv_heads), jnp.float32
    return {
        "queries": array(rows, heads, size, dtype=jnp.bfloat16),
        "key_indices_pages": array(*pages, size * key_bits // 8, dtype=jnp.uint8),
        "key_signs_pages": array(*pages, signs // 8, dtype=jnp.uint8),
        "key_norms_pages": array(*pages, 2, dtype=jnp.bfloat16),
        "value_indices_pages": array(*pages, size * value_bits // 8, dtype=jnp.uint8),
        "value_norms_pages": array(*pages, dtype=jnp.bfloat16),
        "kv_lens": array(4),
        "block_tables": array(4, 8),
        "query_start_loc": array(5),
        "num_seqs": array(),
        "rotation_matrix": array(size, size, dtype=real),
        "qjl_projection": array(signs, size, dtype=real),
        "key_codebook": array(2**key_bits, dtype=real),
        "value_codebook": array(2**value_bits, dtype=real),
        **changes,
    }


def refusals(device=H200, options=None, **changes):
    """Returns why the implementation refuses a call of `ragged_page_attention_v2_turboquant`."""
    with target_device(device):
        decision = explain(ragged_page_attention_v2_turboquant, **arguments(**changes), **(options or {}))
    [verdict] = [v for v in decision.forward.verdicts if v.implementation.name == "cuda_codes"]
    return [reason for reason in verdict.reasons if library.COMPILED_MODULE not in reason]


def test_the_formats_that_are_compiled_are_served():
    for size, signs, key_bits, value_bits in FORMATS:
        assert refusals(size=size, signs=signs, key_bits=key_bits, value_bits=value_bits) == []
    sinks = array(8, dtype=jnp.float32)
    assert refusals(options={"sliding_window": 9, "logits_soft_cap": 5.0, "softmax_aux": sinks}) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"key_bits": 1}, "key_indices_pages: keys of 128 codes of 1 bits; wants a format"),
        ({"signs": 64}, "key_indices_pages: keys of 128 codes of 4 bits; wants a format"),
        ({"rows": 5}, "queries: got 5 rows of 4 sequences, the kernel serves at most one each"),
        (
            {"value_norms_pages": array(32, 16, 2, dtype=jnp.float32)},
            "key_indices_pages: got norms of bfloat16 and float32, the kernel reads bfloat16",
        ),
        ({"queries": array(4, 8, 128, dtype=jnp.float16)}, "dtype float16"),
        ({"device": dataclasses.replace(H200, compute_capability=8.0)}, "needs compute capability 9.0, this is 8.0"),
        (
            {"device": dataclasses.replace(H200, compute_capability=12.0)},
            "compute capability 12.0: the kernel needs more shared memory than the chip has",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_calls_are_refused_by_name(changes, sentence):
    [reason] = refusals(**changes)
    assert reason.startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, (132, 2)), ({"heads": 20, "kv_heads": 1}, (132, 3)), ({"heads": 32, "kv_heads": 8}, (132, 8))],
    ids=str,
)
def test_blocks_take_eight_query_heads_each(changes, expected):
    args = arguments(**changes)
    operation = registry().ops["ragged_page_attention_v2_turboquant"]
    record = jax.eval_shape(lambda **args: operation.lower(operation.arguments(**args)), **args)
    grid = config.heuristic(record, H200, "forward")
    assert (grid.num_thread_blocks, grid.num_work_queues) == expected
    assert config.candidates(record, H200, "forward")[0] == grid


@pytest.mark.parametrize("signs", [0, 128])
def test_the_call_is_one_launch_that_rotates(monkeypatch, signs):
    monkeypatch.setattr(call, "register_handler", lambda symbol: symbol)
    operation = registry().ops["ragged_page_attention_v2_turboquant"]

    def step(**args):
        args = operation.arguments(**args)
        record = operation.lower(args)
        assert list(IMPLEMENTATIONS[0].requires.extra(record)) == []
        return operation.finish(args, call.forward(record, PagedDecodeGrid(num_thread_blocks=16, num_work_queues=2))[0])

    with target_device(H200):
        text = jax.jit(step).trace(**arguments(signs=signs)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ejkernel_paged_codes(") == 1
    assert "key_bits = 4 : i32" in text
    # Queries as they are, and the matrix that rotates them; with signs, the projection of this matrix alone is XLA's.
    assert f"tensor<{128 + signs}x128xf32>" in text
    assert text.count("stablehlo.dot_general") == (1 if signs else 0)


def test_queries_in_the_coordinates_of_the_cache_are_refused():
    operation = registry().ops["ragged_page_attention_v2_turboquant"]
    with target_device(H200):
        record = jax.eval_shape(lambda **args: operation.lower(operation.arguments(**args)), **arguments())
        record = dataclasses.replace(record, rotation=None)
        [reason] = IMPLEMENTATIONS[0].requires.extra(record)
    assert reason == "rotation_matrix: got None, the kernel rotates queries and outputs itself"
