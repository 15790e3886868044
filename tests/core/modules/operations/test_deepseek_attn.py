"""`deepseek_attn`: latent attention to the tokens that its indexer selects."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import latent_attention_loop
import numpy as np
import pytest
from lightning_indexer_loop import lightning_indexer as indexer_loop

import ejkernel
from ejkernel.modules import deepseek_attn, flash_mla
from ejkernel.modules.operations.configs import DeepSeekAttentionConfig
from ejkernel.modules.operations.deepseek_attn import OP
from ejkernel.ops.plugins import registry

CASES = {case.name: case for case in OP.cases if "ci" in case.tags}
INDEXER = ("query_index", "key_index", "index_weights")


def arguments(name):
    """The arguments of a case, by name."""
    args = CASES[name].make(jax.random.key(0))
    return {f.name: x for f in dataclasses.fields(args) if (x := getattr(args, f.name)) is not None}


@pytest.mark.parametrize("name", ["rotary", "no rotary, not causal"])
def test_attends_to_the_tokens_that_the_indexer_selects(name):
    """In float64, with a mask of the selected pairs; with fewer keys than are selected in the first rows."""
    given = arguments(name)
    arrays = {name: np.asarray(x, np.float64) for name, x in given.items() if hasattr(x, "shape")}
    indices, _ = indexer_loop(
        *(arrays[name] for name in INDEXER), given["index_topk"], given["index_softmax_scale"], given["causal"]
    )
    tokens = indices.shape[1]
    mask = (indices[..., None] == np.arange(tokens)).any(axis=2)[:, None]
    options = {"mask": mask, "softmax_scale": (16 + (8 if "b_k" in given else 0)) ** -0.5}
    latent = {name: x for name, x in arrays.items() if name not in INDEXER}
    want = latent_attention_loop.attention(latent_attention_loop.Latent(**latent, options=options))
    np.testing.assert_allclose(deepseek_attn(**given), want, rtol=2e-5, atol=2e-5)


def test_selecting_all_tokens_matches_flash_mla_and_its_gradients():
    """The indexer's arrays are constants; the other gradients are those of dense attention."""
    given = {name: x for name, x in arguments("rotary").items() if hasattr(x, "shape")}
    latent = {name: x for name, x in given.items() if name not in INDEXER}

    def sparse(arrays):
        return jnp.sum(deepseek_attn(**arrays, index_topk=23) ** 2)

    def dense(arrays):
        return jnp.sum(flash_mla(**arrays, causal=True) ** 2)

    got, want = jax.grad(sparse)(given), jax.grad(dense)(latent)
    assert not any(np.any(got.pop(name)) for name in INDEXER)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("has_indexer", [True, False])
def test_the_platform_is_that_of_the_indexer_where_it_has_one(has_indexer, monkeypatch):
    """Else dispatch chooses the indexer; `explain` says which runs."""
    for name in ("deepseek_attn", "lightning_indexer")[: 2 if has_indexer else 1]:
        known = registry().implementations[name]
        (xla,) = (one for one in known if one.name == "xla")
        other = dataclasses.replace(xla, name="acme", platform="acme")
        monkeypatch.setitem(registry().implementations, name, (*known, other))
    module = importlib.import_module("ejkernel.modules.operations.deepseek_attn")
    platforms, indexer = [], module.lightning_indexer

    def call(*arrays, platform, **options):
        platforms.append(platform)
        return indexer(*arrays, platform=platform, **options)

    monkeypatch.setattr(module, "lightning_indexer", call)
    given = arguments("rotary")
    decision = ejkernel.explain(deepseek_attn, **given, platform="acme")
    assert decision.forward.implementation.name == "acme"
    reason = "acme" if has_indexer else "xla, as no implementation of platform 'acme' serves it"
    assert f"within the call, lightning_indexer runs on {reason}" in decision.forward.notes
    got = deepseek_attn(**given, platform="acme")
    assert set(platforms) == {"acme" if has_indexer else "auto"}
    np.testing.assert_array_equal(got, deepseek_attn(**given, platform="xla"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"query_index": jnp.ones((2, 23, 3, 16))},
            r"index_weights: got shape \(2, 23, 4\), wants \[B=2, T=23, Hi=3\]",
        ),
        ({"key_index": jnp.ones((2, 23, 16), jnp.bfloat16)}, "key_index: got dtype bfloat16, wants query_index's"),
        ({"b_q": jnp.ones((2, 23, 8))}, "query: got a head size of 24, wants w_kc's Dn = 16"),
        ({"index_topk": 0}, "index_topk: got int 0, wants an int of at least 1"),
        ({"cfg": DeepSeekAttentionConfig(index_topk=5)}, "cfg: got index_topk=5, wants the call's 6"),
    ],
)
def test_a_wrong_call_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        deepseek_attn(**arguments("rotary") | change)
