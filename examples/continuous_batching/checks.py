"""Compare the logits of served sequences with flash attention's, and with those of each sequence served alone."""

import jax.numpy as jnp
import numpy as np

from continuous_batching.model import Model, Weights, full_logits
from continuous_batching.server import Limits, Sequence, Server


def check(model: Model, weights: list[Weights], sequences: list[Sequence]) -> float:
    """The largest difference of a logit of any sequence from flash attention's over the whole sequence."""
    largest = 0.0
    for n, sequence in enumerate(sequences):
        # Padded, so that sequences of different lengths share a program; causal attention does not read the padding.
        padded = np.zeros(-(-len(sequence.tokens) // 64) * 64, np.int32)
        padded[: len(sequence.tokens)] = sequence.tokens
        logits = np.asarray(full_logits(model, weights, jnp.asarray(padded)))
        expected = logits[sequence.prompt - 1 : len(sequence.tokens) - 1]
        difference = float(np.abs(np.stack(sequence.logits) - expected).max())
        print(f"sequence {n}: {len(sequence.logits)} tokens, largest difference of a logit {difference:.1e}")
        largest = max(largest, difference)
    return largest


def check_alone(server: Server, sequences: list[Sequence]) -> int:
    """How many sequences have other bits alone: one at a time, with pages of half the size and fewer rows per step."""
    limits, num_different = server.limits, 0
    slots = max(1, limits.slots // 2)
    pages = -(-limits.pages_per_sequence * limits.slots // slots)
    alone = Server(server.model, Limits(pages, slots, 1, 24, pages), server.weights, keep_logits=True)
    for n, sequence in enumerate(sequences):
        again = alone.submit(sequence.tokens[: sequence.prompt], sequence.max_new_tokens)
        while not again.done:
            alone.step()
        same = np.stack(again.logits).tobytes() == np.stack(sequence.logits).tobytes()
        print(f"sequence {n}: {len(sequence.logits)} logits, {'the same bits' if same else 'OTHER BITS'} alone")
        num_different += not same
    return num_different
