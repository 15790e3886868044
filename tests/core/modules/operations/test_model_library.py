"""What a model library needs of the surface: its imports and calls, and layers of published kinds."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import model_blocks
import numpy as np
import pytest
from suite.processes import flags_for_devices

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("devices", [1, 4])
def test_every_name_is_imported_and_called_in_the_form_that_models_use(devices):
    flags = f"{flags_for_devices(devices)} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags}
    script = [sys.executable, HERE / "model_library_process.py", str(devices)]
    found = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    assert len(found.stdout.split()) == 6


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_a_layer_of_a_published_kind_agrees_with_a_float64_loop(kind):
    w = model_blocks.weights(jax.random.key(0), kind)
    x = jax.random.normal(jax.random.key(1), (1, model_blocks.TOKENS, model_blocks.WIDTH), jnp.bfloat16)
    cotangent = jax.random.normal(jax.random.key(2), x.shape)

    @jax.jit
    def ours(x, w):
        return jax.value_and_grad(lambda x, w: jnp.sum(model_blocks.block(x, w) * cotangent), (0, 1))(x, w)

    output, gradients = jax.jit(model_blocks.block)(x, w), ours(x, w)[1]
    assert output.dtype == gradients[0].dtype == jnp.bfloat16
    assert {g.dtype for g in gradients[1].values()} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        x, cotangent, w = jax.tree.map(lambda a: jnp.asarray(np.float64(a)), (x, cotangent, w))
        want, pull = jax.vjp(model_blocks.loop, x, w)
        wanted = pull(cotangent)
        assert want.dtype == jnp.float64
        for got, expected in zip(jax.tree.leaves((output, gradients)), jax.tree.leaves((want, wanted)), strict=True):
            error = np.abs(np.float64(got) - np.float64(expected)).max()
            assert error <= 0.03 * np.abs(np.float64(expected)).max()
