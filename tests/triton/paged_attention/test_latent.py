"""`mla_decode` in Triton reads dense latent caches as they lie: what XLA leaves around the kernels copies none."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from triton_chips import H200

from ejkernel.modules.operations.mla_decode import MLADecodeArguments, finish, lower
from ejkernel.ops.device import target_device
from ejkernel_triton.paged_attention import forward as paged_forward
from ejkernel_triton.paged_attention import plan
from ejkernel_triton.paged_attention.latent import config as latent_config
from ejkernel_triton.paged_attention.latent.forward import forward

INSTRUCTION = re.compile(r" = \w+\[([\d,]+)\]\S* ([a-z-]+)\(")
"""Of a compiled module: the shape of an array that it makes, and the operation."""


def launch(kernel, inputs, outputs, **options):
    """A callback that takes the arrays of a launch stands for it, so that XLA's own passes run around it."""
    given = [inputs[0] if x is None else x for x in inputs]
    shapes = [given[x] if isinstance(x, int) else x for x in outputs]
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes)
    return tuple(jax.pure_callback(lambda *arrays: None, shapes, *given))


@pytest.mark.parametrize("sizes", [(576,), (512, 64)], ids=str)
def test_dense_caches_are_read_without_a_copy(sizes, monkeypatch):
    batch, length = 2, 16384
    shapes = {
        "query": (batch, 16, 16 + 64),
        "latent_cache": (batch, length, sizes[0]),
        "rope_cache": (batch, length, *sizes[1:]),
        "w_kc": (512, 1, 16),
        "w_vc": (512, 1, 16),
    }
    arrays = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items() if len(shape) == 3}
    given = MLADecodeArguments(**{"rope_cache": None, **arrays}, lengths=jnp.full((batch,), length - 3))

    def step(given):
        record = lower(given)
        output, _ = forward(record, latent_config.heuristic(record, H200, "forward"))
        return finish(given, output)

    monkeypatch.setattr(paged_forward, "launch", launch)
    monkeypatch.setattr(plan, "launch", launch)
    with target_device(H200):
        lowered = jax.jit(step).lower(given)
    made, smallest = lowered.compile().as_text(), given.latent_cache.size * sizes[-1] // sizes[0]
    found = {what for size, what in INSTRUCTION.findall(made) if math.prod(map(int, size.split(","))) >= smallest}
    assert "callback" in made
    assert found <= {"parameter", "bitcast", "get-tuple-element"}, found  # the last are the kernel's own outputs
