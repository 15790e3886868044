"""Latent attention over pages: a loop in float64, `mla_decode` on the same tokens, and what is written where."""

import jax
import jax.numpy as jnp
import numpy as np
import paged_loop
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel.modules as ej
from ejkernel.modules.operations.multi_latent_ragged_page_attention import OP

NAMES = ("multi_latent_ragged_page_attention", "multi_latent_ragged_page_attention_v2")
R, ROPE, HEADS, SLOTS = 24, 8, 4, 4
LENS, ROWS = (17, 9, 0, 1), (5, 9, 0, 1)
LANES = 256  # the latent vector and the rotary part, each filled to 128


def batch(lens=LENS, rows=ROWS, seed=0):
    """Sequences whose one key head is [latent | rotary] and whose value is the latent vector."""
    made = paged_loop.make(lens, rows, heads=(HEADS, 1), d=R + ROPE, seed=seed)
    return paged_loop.Batch(queries=made.queries, keys=made.keys, values=[key[..., :R] for key in made.keys])


def arguments(given, dtype=jnp.float64, cached=True):
    """Arguments of a call that writes the newest tokens; pages without tokens are NaN, padding of rows is 0."""
    used = [-(-len(key) // SLOTS) for key in given.keys]
    pages = sum(used) + 2
    order = iter(np.random.default_rng(5).permutation(pages))
    tables = np.array([0, -1, pages + 3])[np.arange(len(used) * max(used)) % 3].reshape(len(used), -1)
    cache = np.full((pages, SLOTS, LANES), np.nan)
    for row, count, key, query in zip(tables, used, given.keys, given.queries, strict=True):
        row[:count] = [next(order) for _ in range(count)]
        for position in range(len(key) - len(query) if cached else 0):
            at = row[position // SLOTS], position % SLOTS
            cache[at] = 0
            cache[at][:R], cache[at][128 : 128 + ROPE] = key[position, 0, :R], key[position, 0, R:]
    pack = 4 // min(4, jnp.dtype(dtype).itemsize)
    query = np.concatenate(given.queries)
    new = np.concatenate([key[len(key) - len(q) :, 0] for key, q in zip(given.keys, given.queries, strict=True)])
    floats = (query[..., :R], query[..., R:], new[:, :R], new[:, R:], cache.reshape(pages, -1, pack, LANES))
    starts = np.cumsum([0, *map(len, given.queries)])
    ints = ([len(key) for key in given.keys], tables.reshape(-1), starts, [0, 0, len(used)])
    return [*(jnp.asarray(x, dtype) for x in floats), *(jnp.asarray(x, jnp.int32) for x in ints)]


@pytest.mark.parametrize("name", NAMES)
def test_output_is_that_of_the_formula(name):
    options = {"sliding_window": 7, "logits_soft_cap": 1.5, "softmax_scale": 0.4}
    with jax.enable_x64(True):
        for given, wanted in (({}, {}), (options, {"window": 7, "cap": 1.5, "scale": 0.4})):
            output, _ = getattr(ej, name)(*arguments(batch()), **given)
            assert output.dtype == np.float64
            np.testing.assert_allclose(output, paged_loop.packed(batch(), **wanted), rtol=1e-11, atol=1e-12)
            record, _ = OP.bind(arguments(batch()), given)
            np.testing.assert_allclose(jax.jit(OP.reference)(record)[0], output, rtol=1e-11, atol=1e-12)


def test_output_is_that_of_mla_decode():
    lens, size = (17, 9, 1), 6
    given = batch(lens, (1, 1, 1))
    rng = np.random.default_rng(1)
    w_kc, w_vc = rng.normal(size=(2, R, HEADS, size)).astype(np.float32)
    query = rng.normal(size=(3, HEADS, size + ROPE)).astype(np.float32)
    _, _, *rest = arguments(given, jnp.float32)
    nope = jnp.einsum("bhn,rhn->bhr", query[..., :size], w_kc)
    latent, _ = ej.multi_latent_ragged_page_attention(
        nope, query[..., size:], *rest, softmax_scale=(size + ROPE) ** -0.5
    )
    dense = np.stack([np.pad(key[:, 0], ((0, 17 - len(key)), (0, 0))) for key in given.keys]).astype(np.float32)
    want = ej.mla_decode(query, dense, None, w_kc, w_vc, np.array(lens, np.int32))
    np.testing.assert_allclose(jnp.einsum("bhr,rhv->bhv", latent, w_vc), want, rtol=1e-4, atol=1e-5)


def test_only_rows_of_new_tokens_are_written():
    given = arguments(batch(), jnp.float32)
    _, cache = ej.multi_latent_ragged_page_attention(*given)
    before, after = (np.asarray(x).reshape(-1, SLOTS, LANES) for x in (given[4], cache))
    tables, written = np.asarray(given[6]).reshape(len(LENS), -1), np.zeros(before.shape[:2], bool)
    for table, key, query in zip(tables, batch().keys, batch().queries, strict=True):
        for position in range(len(key) - len(query), len(key)):
            at = table[position // SLOTS], position % SLOTS
            written[at] = True
            np.testing.assert_array_equal(after[at][:R], key[position, 0, :R].astype(np.float32))
            np.testing.assert_array_equal(after[at][128 : 128 + ROPE], key[position, 0, R:].astype(np.float32))
            assert not after[at][R:128].any()
            assert not after[at][128 + ROPE :].any()
    np.testing.assert_array_equal(after[~written], before[~written])
    assert written.sum() == sum(ROWS)


@pytest.mark.parametrize("name", NAMES)
def test_donated_caches_are_updated_in_place(name):
    given = [jnp.nan_to_num(x) for x in arguments(batch(), jnp.float32)]
    given[4] = jnp.tile(given[4], (2000, 1, 1, 1))
    compiled = jax.jit(getattr(ej, name), donate_argnums=4).lower(*given).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == given[4].nbytes
    assert memory.temp_size_in_bytes < given[4].nbytes / 8
    pointer = given[4].unsafe_buffer_pointer()
    assert compiled(*given)[1].unsafe_buffer_pointer() == pointer


def test_heads_can_be_split():
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    given, heads = arguments(batch(), jnp.float32), P(None, "tp")
    placed = {"mesh": mesh, "in_specs": (heads, heads, *(P(),) * 7), "out_specs": (heads, P())}
    output, _ = jax.jit(lambda *x: ej.multi_latent_ragged_page_attention(*x, **placed))(*given)
    np.testing.assert_allclose(output, paged_loop.packed(batch()), rtol=2e-5, atol=2e-6)


def test_other_lengths_and_tables_compile_nothing_new():
    call = jax.jit(ej.multi_latent_ragged_page_attention)
    for lens, rows in ((LENS, ROWS), ((12, 17, 3, 0), (4, 8, 3, 0))):
        given = arguments(batch(lens, rows), jnp.float32)
        given[4] = jnp.pad(given[4], ((0, 16 - len(given[4])), *((0, 0),) * 3))
        np.testing.assert_allclose(call(*given)[0], paged_loop.packed(batch(lens, rows)), rtol=2e-5, atol=2e-6)
    assert call._cache_size() == 1


@pytest.mark.parametrize(
    ("position", "change", "says"),
    [
        (1, lambda x: x[:, :2], r"queries_pe: got shape \(15, 2, 8\), wants \[T=15, H=4, Dr\]"),
        (2, lambda x: x[:, :-1], r"keys_values: got shape \(15, 23\), wants \[T=15, R=24\]"),
        (4, lambda x: x[..., :128], r"kv_cache: got shape .*, wants \[P, S / 1, 1, 256\] for float32, R=24 and Dr=8"),
        (4, lambda x: x.astype(jnp.bfloat16), "keys_values: got dtype float32"),
        (6, lambda x: x[:-1], r"block_tables: got shape .*, wants \[N, K\] or \[N \* K\] for N=4 sequences"),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(position, change, says):
    given = arguments(batch(), jnp.float32)
    given[position] = change(given[position])
    with pytest.raises(ValueError, match=says):
        ej.multi_latent_ragged_page_attention(*given)
