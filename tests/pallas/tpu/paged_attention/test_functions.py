"""`score_mod` and `mask_mod` in the paged-attention kernel, interpreted, against the family's meaning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_paged_records import QUICKLY, lowered
from tpu_records import close, interpreted

from ejkernel.families.paged_attention import reference
from ejkernel.families.paged_attention.mask_functions import with_windows_of_function
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel.ops.device import DeviceInfo
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel_pallas.tpu.mosaic import paged_functions
from ejkernel_pallas.tpu.paged_attention import refusal_reasons
from ejkernel_pallas.tpu.paged_attention.config import TpuPaged, heuristic, tile_sizes_of
from ejkernel_pallas.tpu.paged_attention.forward import forward
from ejkernel_pallas.tpu.paged_attention.kernels import pair_functions
from ejkernel_pallas.tpu.paged_attention.spec import make_spec

DEVICE = DeviceInfo(platform="tpu", vendor="google", kind="TPU v6 lite")
V2, V3 = "ragged_page_attention_v2", "ragged_page_attention_v3"
TILES, SINGLE = TpuPaged(block_q=8, block_kv=128, parts=2), TpuPaged(block_q=1, block_kv=128)
TILES_OF_ONE = tile_sizes_of(SINGLE)
RANDOM = np.random.default_rng(5)
SLOPES, BIASES, HEAD_BIASES = (jnp.asarray(RANDOM.normal(size=n), jnp.float32) for n in (4, (3, 384), (4, 384)))
GATES = jnp.asarray(RANDOM.random((6, 384)), jnp.float32)
FLAGS, STARTS = jnp.asarray(RANDOM.random((3, 384)) < 0.7), jnp.array([150, 30, 0], jnp.int32)
DOCUMENTS = jnp.asarray(np.sort(RANDOM.integers(0, 3, (3, 384))), jnp.int32)


def score(function):
    return {"score_mod": score_function("score_mod", function, jnp.float32)}


def mask(function):
    return {"mask_mod": mask_function("mask_mod", function)}


def decay(s, b, h, q, k):
    return jnp.where(k == q, s, s * (1 + 0.1 * SLOPES[h]) - 0.01 * jnp.abs(q - k) * (b + 1))


def masking(s, b, h, q, k):
    """Finite for pairs that attend, and otherwise NaN, infinite, or -inf for pairs that it masks itself."""
    return jnp.where((q - k) % 9 == 1, -jnp.inf, s + 0.1 * jnp.log1p((q - k).astype(jnp.float32)))


def by_key(s, b, h, q, k):
    return s + BIASES[b, k] + HEAD_BIASES[h, k] + SLOPES[h]


def gated(s, b, h, q, k):
    """Reads values of query and head, and of head and key; a finite row of the lowest scores still attends."""
    lowest = jnp.finfo(jnp.float32).min
    return jnp.where(q == 20, lowest, s * GATES[h, q] + HEAD_BIASES[h % 4, k])


def flagged(b, h, q, k):
    return (FLAGS[b, k] | (k % 4 == q % 4)) & ((k >> 3) % 2 != h) & (k >= STARTS[b])


def same_document(b, h, q, k):
    return (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q - k < 100)


CASES = {
    "decoding, heads share products": (V2, SINGLE, score(masking) | mask(lambda b, h, q, k: k >= STARTS[b] + h)),
    "decoding, values by key, soft cap": (V2, SINGLE, score(by_key) | mask(flagged) | {"logits_soft_cap": 1.5}),
    "tiles, prefix, sinks, chunks": (
        V2,
        TILES,
        score(decay)
        | mask(lambda b, h, q, k: (k % 5 >= b) & (q - k < 100))
        | {"shared_prefix": jnp.int32(30), "chunk_size": 140, "softmax_aux": SLOPES},
    ),
    "tiles, groups of 3 heads": (V2, TpuPaged(block_q=80, block_kv=128), score(gated)),
    "written, scores of -inf and NaN": (V3, TILES, score(masking) | mask(same_document)),
}


def decoding(heads=(4, 2), **fields):
    """A call with three sequences of up to 384 tokens, one query row each."""
    sizes = PagedSizes(kv_lens=(300, 40, 130), q_lens=(1, 1, 1), dtype=jnp.bfloat16, h=heads[0], g=heads[1])
    return dataclasses.replace(lowered(V2, paged_inputs.v2_inputs, sizes), **fields)


def far(b, h, q, k):
    return (q - k < 40) & (k <= q + 3)


def test_windows_of_a_mask_function_are_windows():
    """Keys before a window are not copied; other terms stay a function."""
    record = with_windows_of_function(decoding(**mask(far), sliding_window=(50, None)))
    assert (record.sliding_window, record.mask_mod) == ((39, 3), None)
    record = with_windows_of_function(decoding(**mask(lambda b, h, q, k: far(b, h, q, k) & (k >= STARTS[b]))))
    assert record.sliding_window == (39, 3)
    assert record.mask_mod is not None
    earlier_keys = decoding(**mask(lambda b, h, q, k: k <= q - 5))
    assert with_windows_of_function(earlier_keys).mask_mod is earlier_keys.mask_mod
    assert with_windows_of_function(earlier_keys).sliding_window is None


def test_values_of_keys_alone_are_read_in_the_order_of_positions():
    assert (
        make_spec(decoding(**score(decay) | mask(lambda b, h, q, k: k > STARTS[b])), TILES_OF_ONE).heads_per_product > 1
    )
    assert make_spec(decoding(**score(by_key)), TILES_OF_ONE).heads_per_product == 1


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (lambda: decoding(**score(lambda s, b, h, q, k: s + BIASES[0, q - k])), "indexed by query and key together"),
        (lambda: decoding(**score(lambda s, b, h, q, k: s.astype(jnp.float16) * 2)), "values of float16"),
        (
            lambda: decoding((32, 1), **score(by_key)),
            "score_mod: got a value of head and key with 32 query heads per KV head, the kernel takes at most 16",
        ),
        (
            lambda: decoding(**score(by_key), shared_prefix=jnp.int32(20)),
            "shared_prefix: got values of sequence and key in score_mod, which keys of a prefix do not have",
        ),
    ],
)
def test_refused_functions_name_their_reason(record, sentence):
    (reason,) = refusal_reasons(record())
    assert sentence in reason


def test_too_many_values_of_keys_are_refused(monkeypatch):
    monkeypatch.setattr(paged_functions, "MAX_VALUES_BY_KEY", 900)
    (reason,) = refusal_reasons(decoding(**score(lambda s, b, h, q, k: s + BIASES[b, k] + BIASES[0, k])))
    assert reason.endswith(" values of keys, the kernel takes at most 900")


def test_many_values_of_keys_have_smaller_blocks():
    """Those of 12 tables by head and key would take 38 MB with blocks of 2048 keys."""
    tables = [jnp.full((128, 8), n, jnp.float32) for n in range(12)]
    cache = {"key_pages": jax.ShapeDtypeStruct((90, 32, 8, 2, 128), jnp.int8), "kv_layout": "pshcd", "kv_heads": None}
    cache |= {"value_pages": None, "block_tables": jax.ShapeDtypeStruct((3, 256), jnp.int32)}
    record = decoding(**cache, query=jax.ShapeDtypeStruct((3, 128, 128), jnp.bfloat16))
    blocks = []
    for function in (lambda s, b, h, q, k: s + tables[0][h, k], lambda s, b, h, q, k: s + sum(x[h, k] for x in tables)):
        blocks.append(heuristic(dataclasses.replace(record, **score(function)), DEVICE, "forward").block_kv)
    assert blocks == [2048, 256]


def case(name):
    """The record and the tiles of a case."""
    op, params, fields = CASES[name]
    q_lens = {8: (20, 1, 33), 80: (100, 30, 1)}.get(params.block_q, (1, 1, 1))
    heads = 6 if "groups of 3" in name else 4
    sizes = PagedSizes(kv_lens=(300, 40, 130), q_lens=q_lens, dtype=jnp.bfloat16, g=2, h=heads)
    make, options = (paged_inputs.v2_inputs, {}) if op == V2 else (paged_inputs.v3_inputs, {"softmax_scale": None})
    return dataclasses.replace(lowered(op, make, sizes, **options), **fields), params


def attend(record, params):
    """The outputs of the kernel, interpreted."""
    with interpreted():
        return jax.jit(lambda record: forward(record, params)[0], compiler_options=QUICKLY)(record)


@pytest.mark.parametrize("name", CASES)
def test_functions(name):
    """Several blocks of keys, and sequences without keys that they attend."""
    record, params = case(name)
    assert not list(refusal_reasons(record))
    for x, expected in zip(attend(record, params), reference(record)[0], strict=True):
        close(x, expected, record.query.dtype)


def test_differences_of_positions_in_float32_have_the_bits_of_converted_integers(monkeypatch):
    """Positions of more than half the limit are subtracted as integers."""
    record, params = case("tiles, prefix, sinks, chunks")
    spec = make_spec(record, tile_sizes_of(params))
    max_keys = spec.pages_per_sequence * spec.cache_layout.slots_per_page
    results, programs = [], []
    for limit in (pair_functions.MAX_EXACT_INDEX, 2 * max_keys, 2 * max_keys - 1):
        monkeypatch.setattr(pair_functions, "MAX_EXACT_INDEX", limit)
        jax.clear_caches()
        results.append(attend(record, params))
        with interpreted():
            programs.append(str(jax.make_jaxpr(lambda record: forward(record, params)[0])(record)))
    assert programs[0] == programs[1] != programs[2]
    for x, expected in zip(results[0], results[2], strict=True):
        np.testing.assert_array_equal(x, expected)
