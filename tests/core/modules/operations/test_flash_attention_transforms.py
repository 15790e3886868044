"""`flash_attention` under JAX's transformations, and what makes it compile again."""

import flash_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from jax import export

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

B, T, H, D = 2, 12, 2, 4
QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, B, T, H, D))
IDS = jnp.asarray([[0] * 7 + [1] * 5, [0] * 10 + [-1] * 2], jnp.int32)
QUICK = flash_calls.QUICK
TILES = flash_calls.tiles(8, 8)
EVERYTHING = {"causal": True, "sliding_window": (9, 0), "logits_soft_cap": 4.0, "dropout_prob": 0.2, "cfg": TILES}


def everything(query, key, value, bias, sinks, ids, seed):
    """A call with every kind of argument."""
    info = MaskInfo.from_segments(ids)
    return flash_attention(query, key, value, bias, None, None, sinks, mask_info=info, dropout_seed=seed, **EVERYTHING)


BIAS, SINKS = jax.random.normal(jax.random.key(1), (B, H, T, T)), jnp.array([0.2, -0.4])
ARGUMENTS = (QUERY, KEY, VALUE, BIAS, SINKS, IDS, jnp.uint32(3))


def loss(*arguments):
    return jnp.sum(everything(*arguments) ** 2)


GRADIENT = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), compiler_options=QUICK)


@pytest.fixture(scope="module")
def gradients():
    return GRADIENT(*ARGUMENTS)


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6), got, want)


def test_eager_and_jitted_calls_agree(gradients):
    close(jax.grad(loss, argnums=(0, 1, 2, 3, 4))(*ARGUMENTS), gradients)


def test_checkpointed_gradients_are_the_same(gradients):
    saved = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2, 3, 4)), compiler_options=QUICK)
    close(saved(*ARGUMENTS), gradients)


# Each mapped argument gets a leading axis of three; the others are shared.
@pytest.mark.parametrize(
    "mapped",
    [(0,), (1, 2, 3, 4), (5, 6), (0, 1, 2, 3, 4, 5, 6)],
    ids=["query", "other floats", "segments and seed", "all"],
)
def test_vmap_is_a_loop(mapped):
    def three(argument):
        return jnp.stack([argument, jnp.roll(argument, 1), argument + 1])  # the last: other ids, another seed

    in_axes = tuple(0 if n in mapped else None for n in range(len(ARGUMENTS)))
    stacked = [three(x) if n in mapped else x for n, x in enumerate(ARGUMENTS)]
    got = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), in_axes), compiler_options=QUICK)(*stacked)
    for n in range(3):
        want = GRADIENT(*(x[n] if i in mapped else x for i, x in enumerate(stacked)))
        close(jax.tree.map(lambda x, n=n: x[n], got), want)


def test_vmap_along_other_axes_and_over_masks():
    def masked(query, mask):
        return flash_attention(query, KEY, VALUE, mask_info=MaskInfo(_attention_mask=mask))

    masks = jax.random.bernoulli(jax.random.key(2), 0.5, (3, B, 1, T, T))
    queries = jnp.stack([QUERY, QUERY + 1, QUERY * 2], axis=3)
    got = jax.jit(jax.vmap(masked, (3, 0), 2), compiler_options=QUICK)(queries, masks)
    for n in range(3):
        close(got[:, :, n], masked(queries[:, :, :, n], masks[n]))


def test_vmap_over_cumulative_lengths():
    def padded(cum):
        return flash_attention(QUERY, KEY, VALUE, None, cum)

    cum = jnp.array([[0, 5, 17], [0, 12, 24], [0, 1, 1]])
    close(jax.jit(jax.vmap(padded), compiler_options=QUICK)(cum), jnp.stack([padded(c) for c in cum]))


def test_scan_over_layers_is_a_loop():
    weights = jax.random.normal(jax.random.key(3), (3, D, D)) / 2

    def layer(x, weight):
        return x + flash_attention(x @ weight, x, x, causal=True, cfg=TILES), None

    def scanned(weights):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), QUERY, weights)[0] ** 2)

    def looped(weights):
        x = QUERY
        for weight in weights:
            x = layer(x, weight)[0]
        return jnp.sum(x**2)

    got, want = (jax.jit(jax.value_and_grad(f), compiler_options=QUICK)(weights) for f in (scanned, looped))
    close(got, want)


def test_exported_gradients_run(gradients):
    exported = export.export(GRADIENT, platforms=["cpu"])(*ARGUMENTS)
    assert exported.platforms == ("cpu",)
    close(exported.call(*ARGUMENTS), gradients)


def test_exported_gradients_survive_serialisation(gradients):
    exported = export.export(GRADIENT, platforms=["cpu"])(*ARGUMENTS)
    close(export.deserialize(exported.serialize()).call(*ARGUMENTS), gradients)


def test_the_listener_hears_compilations():
    with transformed.compilations() as compiled:
        jax.jit(lambda x: x * 17.25 - 3)(jnp.zeros(5)).block_until_ready()
    assert compiled


def variants(name):
    """Arguments that differ in values only."""
    lengths = [jnp.array([0, n, 12], jnp.int32) for n in (5, 0, 8)]
    row = QUERY[:1], KEY[:1], VALUE[:1]
    masks = [jax.random.bernoulli(jax.random.key(n), 0.5, (B, 1, T, T)) for n in range(3)]
    infos = [
        MaskInfo(_attention_mask=mask, _q_segment_ids=ids, _kv_segment_ids=ids)
        for mask, ids in zip(masks, (IDS, IDS + 1, jnp.roll(IDS, 3)), strict=True)
    ]
    dropout = [{"dropout_prob": 0.1, "dropout_seed": seed} for seed in (1, -7, 2**31)]
    return {
        "packed lengths": [((*row, None, cum), {"causal": True}) for cum in lengths],
        "packed key lengths": [((*row, None, lengths[0], cum), {"causal": True}) for cum in lengths],
        "padded lengths and seed": [((QUERY, KEY, VALUE, None, c), d) for c, d in zip(lengths, dropout, strict=True)],
        "mask and segment ids": [((QUERY, KEY, VALUE), {"mask_info": info}) for info in infos],
    }[name]


@pytest.mark.parametrize(
    "name", ["packed lengths", "packed key lengths", "padded lengths and seed", "mask and segment ids"]
)
def test_nothing_compiles_again_when_only_values_change(name):
    calls = variants(name)

    def both(arguments, options):
        def loss(query):
            output = flash_attention(query, *arguments[1:], **options)
            return jnp.sum(output), output

        (_, output), gradient = jax.value_and_grad(loss, has_aux=True)(arguments[0])
        return output, gradient

    both(*calls[0])
    with transformed.compilations() as compiled:
        outputs = [both(*call) for call in calls[1:]]
    assert not compiled
    assert not np.allclose(*(output for output, _ in outputs))  # the values did matter


def test_a_traced_call_is_traced_once_for_all_values():
    traces = []

    @jax.jit
    def step(query, cum, seed):
        traces.append(1)
        return flash_attention(query, query, query, None, cum, causal=True, dropout_prob=0.1, dropout_seed=seed)

    for n in (3, 0, 12):
        step(QUERY[:1], jnp.array([0, n, 12], jnp.int32), jnp.uint32(n))
    assert len(traces) == step._cache_size() == 1
