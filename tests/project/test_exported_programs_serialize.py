"""`jax.export` programs of operations can be written and read: what JAX needs for it comes with the distribution."""

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement

from ejkernel.modules import (
    flash_attention,
    fused_cross_entropy,
    fused_kl_divergence,
    gated_linear_attention,
    grouped_matmul,
)

CORE = Path(__file__).parents[2] / "packages/ejkernel-core/pyproject.toml"
TOKENS = (1, 8, 2, 8)
CALLS = {
    "attention": (lambda x: flash_attention(x, x, x, causal=True), [TOKENS]),
    "recurrence": (lambda x: gated_linear_attention(x, x, x), [TOKENS]),
    "loss": (lambda x: fused_cross_entropy(x, jnp.array([1, 2], jnp.int32)), [(2, 8)]),
    "divergence": (lambda x, y: fused_kl_divergence(x, y), [(2, 8), (2, 8)]),
    "experts": (lambda x, w: grouped_matmul(x, w, jnp.array([3, 5], jnp.int32)), [(8, 4), (2, 4, 4)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_exported_call_survives_serialisation(name):
    function, shapes = CALLS[name]
    arrays = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    written = jax.export.export(jax.jit(function))(*arrays).serialize()
    read = jax.export.deserialize(written).call(*arrays)
    for got, want in zip(jax.tree.leaves(read), jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_flatbuffers_is_a_requirement_of_core():
    wanted = {Requirement(line).name for line in tomllib.loads(CORE.read_text())["project"]["dependencies"]}
    assert "flatbuffers" in wanted
