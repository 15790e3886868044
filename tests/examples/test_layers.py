"""`examples/layers.py`: its layers learn to recall, and decode what a call over whole sequences gives."""

import importlib.util
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "examples" / "layers.py"
LAYERS = ("mamba2", "gla", "gated_delta", "kda")


@pytest.fixture(scope="module")
def layers():
    spec = importlib.util.spec_from_file_location("layers_example", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_all_layers_are_tested(layers):
    assert tuple(layers.LAYERS) == LAYERS


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_learns_to_recall(layers, name):
    """A guess among 8 values has a loss of 2.08, and training begins near 3; 100 steps leave less than 1.4."""
    _, losses = layers.train(name, layers.Recall(4, 8, 8), steps=100, rows=32)
    assert losses[0] > math.log(8)
    assert np.mean(losses[-10:]) < 1.4


@pytest.mark.parametrize("name", LAYERS)
def test_prefill_and_steps_equal_the_whole_sequence(layers, name):
    model, task = layers.Model(name, 12, layers.nnx.Rngs(0), width=16), layers.Recall(3, 6, 6)
    _, difference = layers.evaluate(model, task)
    assert difference < 1e-4
    # Shapes that `evaluate` has compiled: a prompt of 6 tokens, one more token, all 9.
    tokens = task.batch(jax.random.key(0), 64)[0]
    whole, behind = layers.forward(model, tokens)
    _, state = layers.forward(model, tokens[:, :6])
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(behind)]
    without = layers.forward(model, tokens[:, 6:7], jax.tree.map(jnp.zeros_like, state))[0]
    assert float(jnp.abs(without - whole[:, 6:7]).max()) > 0.1


def test_every_question_has_an_answer_among_the_pairs(layers):
    task = layers.Recall(4, 8, 8)
    tokens, answers = task.batch(jax.random.key(0), 16)
    pairs, asked = tokens[:, :8].reshape(16, 4, 2), tokens[:, 8:]
    for row in range(16):
        told = dict(np.asarray(pairs[row]).tolist())
        assert len(told) == 4
        assert [told[int(key)] for key in asked[row]] == answers[row].tolist()
        assert sorted(told) == sorted(asked[row].tolist())
    assert int(jnp.max(pairs[..., 0])) < 8 <= int(jnp.min(answers))


def test_the_command_prints_a_table_and_fails_when_decoding_is_wrong(layers, capsys, monkeypatch):
    precision = jax.config.jax_default_matmul_precision
    monkeypatch.setattr(layers, "train", lambda layer, task, steps, seed: (None, [2.0, 1.0, 0.5]))
    try:
        for difference, status in ((1e-6, 0), (0.1, 1), (math.nan, 1)):
            monkeypatch.setattr(layers, "evaluate", lambda model, task, found=difference: (0.5, found))
            assert layers.main(["--steps", "3", "--layers", "gla", "kda", "--every", "2"]) == status
            assert capsys.readouterr().out.endswith("| 2 | 1.5000 | 1.5000 |\n| 3 | 0.5000 | 0.5000 |\n")
    finally:
        jax.config.update("jax_default_matmul_precision", precision)  # the example sets it
