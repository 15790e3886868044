"""`examples/serve.py`: its numbers, and what its scheduler does when pages run out."""

import importlib
import random
import sys
from pathlib import Path

import jax
import pytest

from ejkernel.ops import batch_invariant

EXAMPLES = Path(__file__).parents[2] / "examples"
MODULES = ("serve", *(f"continuous_batching.{name}" for name in ("model", "server", "checks")))


@pytest.fixture(scope="module")
def modules():
    """The modules of the example by the last part of their names, imported as `python examples/serve.py` does."""
    precision = jax.config.jax_default_matmul_precision
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}
    jax.config.update("jax_default_matmul_precision", precision)  # the example sets it
    for name in (*MODULES, "continuous_batching"):
        del sys.modules[name]


@pytest.fixture
def serve(modules):
    return modules["serve"]


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
    assert "; 0 drafts were accepted" not in said
    assert serve.main([*options, "--cache", "float8_e4m3fn"]) == 0


def test_logits_of_a_preempted_sequence_have_the_bits_that_they_have_alone(modules):
    model = modules["model"].Model(layers=1, invariant=True)
    limits = modules["server"].Limits(pages=7, slots=8, sequences=3, rows=16, pages_per_sequence=5)
    with batch_invariant():
        server = modules["server"].Server(model, limits, model.weights(jax.random.key(0)), keep_logits=True)
        sequences = [server.submit([1 + n, *range(10 + 5 * n)], 8) for n in range(3)]
        while server.waiting or server.running:
            server.step()
        assert server.preemptions > 0
        assert modules["checks"].check_alone(server, sequences) == 0
        sequences[1].logits[3] = sequences[1].logits[3] * (1 + 1e-6)
        assert modules["checks"].check_alone(server, sequences[1:]) == 1


def test_a_wrong_logit_fails_the_check(modules, monkeypatch):
    monkeypatch.setattr(modules["model"], "rotate", lambda x, positions: x * (1 + 0.1 * x.shape[0] / 64))
    assert modules["serve"].main(["--check", "--requests", "2", "--generate", "3"]) == 1


def test_the_tokenizer_returns_the_text(modules):
    tokenizer = modules["model"].ByteTokenizer()
    for text in ("", "plain", "grüße, 世界"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.size for i in ids)


@pytest.fixture
def server(modules, monkeypatch):
    """A server whose model is not run: every sequence's next token is 0."""
    monkeypatch.setattr(
        modules["server"], "step", lambda model, weights, caches, tokens, *rest: (jax.numpy.zeros((4, 1, 3)), caches)
    )
    limits = modules["server"].Limits(pages=12, slots=4, sequences=4, rows=16, pages_per_sequence=8)
    return modules["server"].Server(modules["model"].Model(layers=0), limits, [], keep_logits=False)


def test_every_page_is_free_or_belongs_to_one_sequence(server):
    rng = random.Random(0)
    sequences = [server.submit([1] * rng.randint(1, 20), rng.randint(1, 10)) for _ in range(12)]
    longest = 0
    while server.waiting or server.running:
        server.step()
        held = [page for sequence in sequences for page in sequence.pages]
        assert sorted(held + server.free_pages) == list(range(12))
        assert len(server.running) <= 4
        longest = max(longest, len(server.running))
        assert all(sequence in server.running for sequence in sequences if sequence.pages)
        assert server.steps < 500
    assert all(sequence.done for sequence in sequences)
    assert server.preemptions > 0
    assert longest > 1


def test_steps_have_two_shapes(server):
    shapes = set()
    arrays = server._arrays

    def recorded_arrays(batch):
        tokens, *others = arrays(batch)
        shapes.add(tokens.shape)
        return tokens, *others

    server._arrays = recorded_arrays
    for _ in range(5):
        server.submit([1] * 19, 6)
    while server.waiting or server.running:
        server.step()
    assert shapes == {(4,), (16,)}


def test_a_request_that_never_fits_is_refused(server):
    with pytest.raises(ValueError, match="need 9 pages of 4, wants at most 8 pages"):
        server.submit([1] * 30, 4)


def test_a_prefix_shorter_than_a_page_is_not_shared(server):
    """`--share --slots 64` ended with an error: the prefix has 38 tokens."""
    server.share([1, 2, 3])
    assert server.steps == 0
    server.submit([2], 1)


def test_a_request_without_the_shared_prefix_is_refused(server):
    server.share([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match=r"tokens: got \[1, 2, 3, 5\], wants the shared prefix \[1, 2, 3, 4\]"):
        server.submit([1, 2, 3, 5], 1)
