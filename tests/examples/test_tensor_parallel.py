"""`examples/tensor_parallel.py`: eight devices train to the losses and weights of one."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

FILE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("tensor_parallel_example", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.needs("4 devices")
def test_losses_over_devices_are_those_of_one(example):
    mesh = jax.make_mesh((8,), ("tp",), (AxisType.Auto,))
    sizes = example.Sizes(vocabulary=16, layers=1, batch=2, length=16)
    parallel, plain = (example.train(sizes, steps=10, mesh=over) for over in (mesh, None))
    np.testing.assert_allclose(parallel, plain, rtol=1e-4)
    assert np.mean(parallel[-3:]) < np.mean(parallel[:3])


@pytest.mark.needs("4 devices")
def test_no_device_has_all_logits_nor_all_features(example):
    mesh = jax.make_mesh((8,), ("tp",), (AxisType.Auto,))
    sizes = example.Sizes(vocabulary=40, layers=1, batch=4, length=12)
    weights, batch = example.init(jax.random.key(0), sizes), example.batch_of(jax.random.key(1), sizes)
    gradient = jax.jit(jax.grad(example.make_loss(sizes, mesh)))
    program = gradient.lower(weights, *batch).compile().as_text()
    tokens = sizes.batch * sizes.length
    for features in (sizes.vocabulary, sizes.inner, 3 * sizes.heads * sizes.head_dim):
        assert f"f32[{tokens},{features}]" not in program, features
