"""`examples/serve.py`: its numbers, and what its scheduler does when pages run out."""

import importlib.util
import random
import sys
from pathlib import Path

import jax
import pytest

from ejkernel.ops import batch_invariant

FILE = Path(__file__).parents[2] / "examples" / "serve.py"


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("serve_example", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    precision = jax.config.jax_default_matmul_precision
    yield module
    jax.config.update("jax_default_matmul_precision", precision)  # the example sets it
    del sys.modules[spec.name]


def test_every_logit_is_flash_attentions_with_and_without_preemption(serve, capsys):
    assert serve.main(["--check", "--requests", "6", "--generate", "12", "--pages", "18"]) == 0
    said = capsys.readouterr().out
    assert "72 tokens in" in said
    assert ", 0 preemptions" not in said
    assert said.count("largest difference of a logit") == 6


def test_shared_prefixes_trees_and_8_bit_caches_serve_together(serve, capsys):
    options = ["--check", "--requests", "4", "--generate", "12", "--share", "--draft", "--pages", "20"]
    assert serve.main(options) == 0
    said = capsys.readouterr().out
    assert "48 tokens in" in said
    assert ", 0 preemptions" not in said
    assert "; 0 guesses were right" not in said
    assert serve.main([*options, "--cache", "float8_e4m3fn"]) == 0


def test_logits_of_a_preempted_sequence_have_the_bits_that_they_have_alone(serve):
    model = serve.Model(layers=1, invariant=True)
    with batch_invariant():
        server = serve.Server(model, serve.Limits(7, 8, 3, 16, 5), model.weights(jax.random.key(0)), keep_logits=True)
        sequences = [server.submit([1 + n, *range(10 + 5 * n)], 8) for n in range(3)]
        while server.waiting or server.running:
            server.step()
        assert server.preemptions > 0
        assert serve.check_alone(server, sequences) == 0
        sequences[1].logits[3] = sequences[1].logits[3] * (1 + 1e-6)
        assert serve.check_alone(server, sequences[1:]) == 1


def test_a_wrong_logit_fails_the_check(serve, monkeypatch):
    monkeypatch.setattr(serve, "rotate", lambda x, positions: x * (1 + 0.1 * x.shape[0] / 64))
    assert serve.main(["--check", "--requests", "2", "--generate", "3"]) == 1


def test_the_tokenizer_returns_the_text(serve):
    tokenizer = serve.ByteTokenizer()
    for text in ("", "plain", "grüße, 世界"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.size for i in ids)


@pytest.fixture
def scheduler(serve, monkeypatch):
    """A server whose model is not run: every sequence's next token is 0."""
    monkeypatch.setattr(
        serve, "step", lambda model, weights, caches, tokens, *rest: (jax.numpy.zeros((4, 1, 3)), caches)
    )
    return serve.Server(serve.Model(layers=0), serve.Limits(12, 4, 4, 16, 8), [], False)


def test_pages_are_nobodys_or_one_sequences(scheduler):
    rng = random.Random(0)
    sequences = [scheduler.submit([1] * rng.randint(1, 20), rng.randint(1, 10)) for _ in range(12)]
    longest = 0
    while scheduler.waiting or scheduler.running:
        scheduler.step()
        held = [page for sequence in sequences for page in sequence.pages]
        assert sorted(held + scheduler.free) == list(range(12))
        assert len(scheduler.running) <= 4
        longest = max(longest, len(scheduler.running))
        assert all(sequence in scheduler.running for sequence in sequences if sequence.pages)
        assert scheduler.steps < 500
    assert all(sequence.done for sequence in sequences)
    assert scheduler.preemptions > 0
    assert longest > 1


def test_steps_have_two_shapes(scheduler):
    shapes = set()
    arrays = scheduler._arrays

    def noted(plan):
        made = arrays(plan)
        shapes.add(made[0].shape)
        return made

    scheduler._arrays = noted
    for _ in range(5):
        scheduler.submit([1] * 19, 6)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    assert shapes == {(4,), (16,)}


def test_a_request_that_never_fits_is_refused(scheduler):
    with pytest.raises(ValueError, match="need 9 pages: too many"):
        scheduler.submit([1] * 30, 4)
