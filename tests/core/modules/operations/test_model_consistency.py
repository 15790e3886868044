"""One model, trained with flash attention and served through every operation with a cache: the same logits.

Two layers, so that what an operation gets wrong in the first one moves the queries, keys and values of the second.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import pytest
from paged_calls import DECODING, PACKED, Paged
from paged_loop import Batch

from ejkernel.modules import flash_attention

LAYERS, WORDS, WIDTH, HEADS, KV_HEADS, SIZE = 2, 11, 24, 4, 2, 16
TOKENS = [np.arange(17) * 7 % WORDS, np.arange(6) * 3 % WORDS]
DECODED = 2  # the last tokens of each sequence come one by one

OPTIONS = {
    "plain": {},
    "window, sinks, soft cap": {"window": 5, "sinks": np.array([0.5, -1.0, 2.0, 0.0]), "cap": 1.5},
}

Sequences = list[np.ndarray]
Attend = Callable[[int, Sequences, Sequences, Sequences], Sequences]


def weights():
    shapes = {"query": (WIDTH, HEADS, SIZE), "key": (WIDTH, KV_HEADS, SIZE), "value": (WIDTH, KV_HEADS, SIZE)}
    draw = np.random.default_rng(7).normal
    layers = [{name: draw(size=shape) / WIDTH**0.5 for name, shape in shapes.items()} for _ in range(LAYERS)]
    outs = [draw(size=(HEADS, SIZE, WIDTH)) / SIZE**0.5 for _ in range(LAYERS)]
    return draw(size=(WORDS, WIDTH)), [{**layer, "out": out} for layer, out in zip(layers, outs, strict=True)]


EMBEDDING, BLOCKS = weights()


def logits(tokens: Sequences, attend: Attend) -> Sequences:
    """[tokens, WORDS] of every sequence."""
    streams = [EMBEDDING[sequence] for sequence in tokens]
    for number, block in enumerate(BLOCKS):
        parts = [[np.tensordot(x, block[name], 1) for x in streams] for name in ("query", "key", "value")]
        mixed = attend(number, *parts)
        streams = [x + np.tensordot(y, block["out"], 2) for x, y in zip(streams, mixed, strict=True)]
    return [x @ EMBEDDING.T for x in streams]


def trained(window=None, sinks=None, cap=None) -> Sequences:
    aux = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    band = None if window is None else (window - 1, 0)

    @jax.jit
    def attention(*qkv):
        given = {"causal": True, "sliding_window": band, "logits_soft_cap": cap}
        return flash_attention(*(x[None] for x in qkv), None, None, None, aux, **given)[0]

    def attend(number, *parts):
        return [np.asarray(attention(*(jnp.asarray(x, jnp.float32) for x in qkv))) for qkv in zip(*parts, strict=True)]

    return logits(TOKENS, attend)


@dataclasses.dataclass
class Server:
    """The keys and values of all tokens so far, by layer."""

    options: dict
    caches: list = dataclasses.field(default_factory=lambda: [[[], []] for _ in range(LAYERS)])

    def run(self, op: str, tokens: Sequences) -> Sequences:
        """The logits of new tokens, with attention by an operation."""
        return logits(tokens, lambda number, *parts: self.attend(op, number, *parts))

    def attend(self, op, number, queries, keys, values):
        cache = self.caches[number]
        for side, new in zip(cache, (keys, values), strict=True):
            old = side or [x[:0] for x in new]
            side[:] = [np.concatenate(pair) for pair in zip(old, new, strict=True)]
        batch = Batch(queries=queries, keys=list(cache[0]), values=list(cache[1]))
        if op != "prefill_page_attention":
            rows = paged_calls.output(op, Paged(batch), **self.options)
            return np.split(rows, np.cumsum([len(x) for x in queries])[:-1])
        alone = [Batch(queries=[q], keys=[k], values=[v]) for q, k, v in zip(queries, *cache, strict=True)]
        return [paged_calls.output(op, Paged(one), **self.options) for one in alone]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("op", [*DECODING, "prefill_page_attention", *PACKED])
def test_a_model_gives_the_same_logits_in_training_prefill_and_decoding(op, name):
    options, want = OPTIONS[name], trained(**OPTIONS[name])
    server = Server(options)
    found = [server.run("unified_attention" if op in DECODING else op, [x[:-DECODED] for x in TOKENS])]
    for n in range(-DECODED, 0):
        found.append(server.run(op, [x[n : n + 1 or None] for x in TOKENS]))
    got = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-4)


def test_the_options_change_the_logits():
    plain, other = (trained(**options) for options in OPTIONS.values())
    assert all(np.abs(one - two).max() > 0.1 for one, two in zip(plain, other, strict=True))
