"""A layer of DeepSeek's sparse attention, trained first dense and then sparse, with the recall of its indexer.

    python examples/sparse_attention.py                     # the three stages, with a table

The task needs one token of many: a row lists 24 key-value pairs, one per token, and then asks for the values of 8 of
these keys. The token of a pair is the sum of two embeddings, so one layer of attention can answer by reading the token
of the same key.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ejkernel.modules import (
    flash_mla,
    lightning_indexer,
    lightning_indexer_dense_loss,
    lightning_indexer_loss,
    token_sparse_attention,
)

PAIRS, QUESTIONS, KEYS, VALUES = 24, 8, 32, 8
WIDTH, HEADS, LATENT, NOPE, OUT = 32, 2, 16, 16, 16
INDEX_HEADS, INDEX_SIZE, TOP_K = 4, 16, 3
SCALE = NOPE**-0.5

Weights = dict[str, jax.Array]


class Rows(NamedTuple):
    """Rows of the task: keys and values of all tokens [B, T]; the answers and their positions [B, QUESTIONS]."""

    keys: jax.Array
    values: jax.Array
    answers: jax.Array
    answer_positions: jax.Array


def draw(key: jax.Array, rows: int) -> Rows:
    """Random rows of pairs with different keys; a question is a token with the value VALUES."""
    key_order, value_key, question_order = jax.random.split(key, 3)
    all_keys = jnp.broadcast_to(jnp.arange(KEYS), (rows, KEYS))
    keys = jax.random.permutation(key_order, all_keys, axis=1, independent=True)[:, :PAIRS]
    values = jax.random.randint(value_key, keys.shape, 0, VALUES)
    positions = jnp.broadcast_to(jnp.arange(PAIRS), keys.shape)
    answer_positions = jax.random.permutation(question_order, positions, axis=1, independent=True)[:, :QUESTIONS]
    asked_keys, answers = (jnp.take_along_axis(x, answer_positions, axis=1) for x in (keys, values))
    questions = jnp.full_like(asked_keys, VALUES)
    return Rows(
        jnp.concatenate([keys, asked_keys], 1), jnp.concatenate([values, questions], 1), answers, answer_positions
    )


def initialise(key: jax.Array) -> tuple[Weights, Weights]:
    """The weights of the model, and those of its indexer."""
    model = {
        "keys": (KEYS, WIDTH),
        "values": (VALUES + 1, WIDTH),
        "query": (WIDTH, HEADS, NOPE),
        "latent": (WIDTH, LATENT),
        "w_kc": (LATENT, HEADS, NOPE),
        "w_vc": (LATENT, HEADS, OUT),
        "out": (HEADS * OUT, WIDTH),
        "head": (WIDTH, VALUES),
    }
    indexer = {
        "query": (WIDTH, INDEX_HEADS, INDEX_SIZE),
        "key": (WIDTH, INDEX_SIZE),
        "weights": (WIDTH, INDEX_HEADS),
    }
    keys = iter(jax.random.split(key, len(model) + len(indexer)))

    def normal(shapes: dict[str, tuple[int, ...]]) -> Weights:
        scales = {name: 1.0 if name in ("keys", "values") else shape[0] ** -0.5 for name, shape in shapes.items()}
        return {name: scales[name] * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}

    return normal(model), normal(indexer)


def project(model: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries [B, T, H, NOPE] and latent vectors [B, T, LATENT]. A model with positions adds rotary parts to both."""
    return jnp.einsum("btw,whn->bthn", x, model["query"]), x @ model["latent"]


def absorb(model: Weights, query: jax.Array) -> jax.Array:
    """Queries in the space of the latent vectors, [B, T, H, LATENT]."""
    return jnp.einsum("bthn,rhn->bthr", query, model["w_kc"])


def index(indexer: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and weights of the indexer. Gradients stop at its input: its loss trains only the indexer."""
    x = jax.lax.stop_gradient(x)
    weights = x @ indexer["weights"] * INDEX_HEADS**-0.5
    return jnp.einsum("btw,whe->bthe", x, indexer["query"]), x @ indexer["key"], weights


def embed(model: Weights, rows: Rows) -> jax.Array:
    """Tokens [B, T, WIDTH]."""
    return model["keys"][rows.keys] + model["values"][rows.values]


def loss_and_accuracy(model: Weights, x: jax.Array, attended: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The mean cross-entropy of the answers and the accuracy, from the output of attention."""
    y = x + attended.reshape(*x.shape[:2], -1) @ model["out"]
    logits = y[:, -QUESTIONS:] @ model["head"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, rows.answers).mean()
    return loss, jnp.mean(jnp.argmax(logits, axis=-1) == rows.answers)


def dense_loss(model: Weights, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The first stage: dense latent attention, without the indexer."""
    x = embed(model, rows)
    query, latent = project(model, x)
    attended = flash_mla(query, latent, model["w_kc"], model["w_vc"], causal=True, softmax_scale=SCALE)
    return loss_and_accuracy(model, x, attended, rows)


def warm_up_loss(indexer: Weights, model: Weights, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The second stage: the indexer learns attention's distribution over all tokens; the model is frozen."""
    x = embed(model, rows)
    query, latent = project(model, x)
    losses = lightning_indexer_dense_loss(
        absorb(model, query), latent[:, :, None], *index(indexer, x), softmax_scale=SCALE
    )
    return losses.mean(), recall(indexer, model, rows)


def sparse_loss(weights: tuple[Weights, Weights], rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The third stage: attention to the selected tokens, and the indexer's loss over them."""
    model, indexer = weights
    x = embed(model, rows)
    query, latent = project(model, x)
    absorbed, keys = absorb(model, query), latent[:, :, None]  # one KV head
    indices, scores = lightning_indexer(*index(indexer, x), top_k=TOP_K)
    attended = token_sparse_attention(absorbed, keys, None, indices, value_size=LATENT, softmax_scale=SCALE)
    loss, accuracy = loss_and_accuracy(model, x, jnp.einsum("bthr,rhv->bthv", attended, model["w_vc"]), rows)
    losses = lightning_indexer_loss(absorbed, keys, indices, scores, softmax_scale=SCALE)
    return loss + losses.mean(), accuracy


def recall(indexer: Weights, model: Weights, rows: Rows) -> jax.Array:
    """The share of questions for which the indexer selects the token with the answer."""
    indices, _ = lightning_indexer(*index(indexer, embed(model, rows)), top_k=TOP_K)
    return jnp.mean(jnp.any(indices[:, -QUESTIONS:] == rows.answer_positions[..., None], axis=-1))


def train(loss: Any, weights: Any, steps: int, rate: float, *constants: Any, rows: int = 16, seed: int = 0) -> Any:
    """The weights after `steps` steps of Adam on `loss(weights, *constants, rows)`, in one compiled loop."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps, 0.1))

    def step(state: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        weights, momenta = state
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(weights, *constants, draw(key, rows))
        updates, momenta = optimizer.update(gradients, momenta)
        return (optax.apply_updates(weights, updates), momenta), value

    keys = jax.random.split(jax.random.key(seed), steps)
    (weights, _), _ = jax.jit(lambda state: jax.lax.scan(step, state, keys))((weights, optimizer.init(weights)))
    return weights


@jax.jit
def measure(model: Weights, indexer: Weights) -> tuple[jax.Array, jax.Array, jax.Array]:
    """On new rows: the accuracy with dense attention, the recall of the indexer, the accuracy with sparse attention."""
    rows = draw(jax.random.key(99), 64)
    sparse = sparse_loss((model, indexer), rows)[1]
    return dense_loss(model, rows)[1], recall(indexer, model, rows), sparse


def main(arguments: list[str] | None = None) -> int:
    """Trains the three stages; returns 1 if the accuracy of the sparse model is below 0.9."""
    parser = argparse.ArgumentParser(description="Trains sparse attention: dense, warm-up of the indexer, sparse.")
    parser.add_argument("--steps", type=int, default=300, help="training steps per stage")
    options = parser.parse_args(arguments)
    model, indexer = initialise(jax.random.key(1))
    model = train(dense_loss, model, options.steps, 1e-2)
    results = {"dense": measure(model, indexer)}
    indexer = train(warm_up_loss, indexer, options.steps, 1e-2, model)
    results["warm-up of the indexer"] = measure(model, indexer)
    model, indexer = train(sparse_loss, (model, indexer), options.steps, 2e-3)
    results["sparse"] = measure(model, indexer)
    print("| after the stage | answers, dense | recall of the indexer | answers, sparse |\n|---|---|---|---|")
    for stage, shares in results.items():
        print(f"| {stage} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    return int(results["sparse"][2] < 0.9)


if __name__ == "__main__":
    raise SystemExit(main())
