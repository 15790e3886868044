"""`examples/sparse_attention.py`: its task, and that its stages agree where every token is selected."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "examples" / "sparse_attention.py"


@pytest.fixture(scope="module")
def example():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("example_sparse_attention", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_selecting_every_token_answers_as_dense_attention(example, monkeypatch):
    """And then recall is 1; the tokens with the answers have the asked keys."""
    rows = example.draw(jax.random.key(0), 4)
    asked = rows.keys[:, example.PAIRS :]
    np.testing.assert_array_equal(jnp.take_along_axis(rows.keys, rows.answer_positions, axis=1), asked)
    np.testing.assert_array_equal(jnp.take_along_axis(rows.values, rows.answer_positions, axis=1), rows.answers)
    monkeypatch.setattr(example, "TOP_K", example.PAIRS + example.QUESTIONS)
    model, indexer = example.initialise(jax.random.key(1))
    dense, _ = jax.jit(example.dense_loss)(model, rows)
    sparse, _ = jax.jit(example.sparse_loss)((model, indexer), rows)
    warm_up, recall = jax.jit(example.warm_up_loss)(indexer, model, rows)
    assert recall == 1
    np.testing.assert_allclose(sparse, dense + warm_up, rtol=1e-4)
