"""Recurrent layers to copy: Mamba-2, GLA, KDA and gated DeltaNet in Flax NNX, trained to recall.

    python examples/layers.py --steps 300                   # all four, with a table of their losses
    python examples/layers.py --steps 300 --layers kda      # one of them

A layer takes tokens [B, T, width] and returns an array of the same shape and its state. A call with that state
continues the sequence, so training, prefill and decoding are one function:

    y, _     = layer(x)                         a whole sequence
    y, state = layer(x[:, :60])                 prefill
    y, state = layer(x[:, 60:61], state)        one token, at a cost that does not depend on their number

What they learn is multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): pairs of a key and a value,
then the keys again in another order, each to be answered with its value.

    k3 v1  k7 v4  k1 v1  k5 v2 | k5 k3 k1 k7   ->   v2 v1 v1 v4
"""

import argparse
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ejkernel.modules import (
    causal_conv1d,
    gated_delta_rule,
    gated_linear_attention,
    kda_decay,
    kernel_delta_attention,
    state_space_v2,
)


class State(NamedTuple):
    """The state of a layer after the tokens so far; its size does not depend on their number.

    Attributes:
        convolution: [B, channels, taps - 1], the newest inputs of the convolution; None before the first token.
        recurrence: [B, H, K, V] float32, the state of the recurrence; Mamba-2's is [B, H, V, K]. None means zeros.
    """

    convolution: jax.Array | None = None
    recurrence: jax.Array | None = None


EMPTY = State()


class ShortConvolution(nnx.Module):
    """A causal convolution of each channel, with SiLU: lets a value be written under the key of the token before."""

    def __init__(self, channels: int, rngs: nnx.Rngs, taps: int = 4) -> None:
        bound = taps**-0.5
        self.weight = nnx.Param(rngs.params.uniform((channels, taps), minval=-bound, maxval=bound))

    def __call__(self, x: jax.Array, state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """[B, T, channels] to the same, and the inputs that the next token needs."""
        return causal_conv1d(x, self.weight[...], initial_state=state, activation="silu", return_state=True)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[B, T, H * D] to [B, T, H, D]."""
    return x.reshape(*x.shape[:2], heads, -1)


def merge_heads(x: jax.Array) -> jax.Array:
    """[B, T, H, D] to [B, T, H * D]."""
    return x.reshape(*x.shape[:2], -1)


def log_uniform(rngs: nnx.Rngs, shape: tuple[int, ...], low: float, high: float) -> jax.Array:
    """Random numbers whose logarithms are uniformly distributed."""
    return jnp.exp(rngs.params.uniform(shape, minval=math.log(low), maxval=math.log(high)))


def step_bias(rngs: nnx.Rngs, shape: tuple[int, ...]) -> jax.Array:
    """Biases whose softplus, the step size, is between 0.001 and 0.1: the initialisation of Mamba."""
    steps = log_uniform(rngs, shape, 1e-3, 1e-1)
    return steps + jnp.log(-jnp.expm1(-steps))


class Mamba2(nnx.Module):
    """State space duality (Dao & Gu 2024, arXiv:2405.21060): one decay per head, B and C shared by all heads."""

    def __init__(self, width: int, heads: int, size: int, rngs: nnx.Rngs) -> None:
        self.inner, self.size, mixed = heads * size, size, heads * size + 2 * size
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.project = linear(width, self.inner + mixed + heads)  # gate | x, B, C | dt
        self.convolution = ShortConvolution(mixed, rngs)
        # Published models begin with decay rates up to 16; with slower decays, training needs fewer steps.
        self.A_log = nnx.Param(jnp.log(rngs.params.uniform((heads,), minval=1.0, maxval=2.0)))
        self.dt_bias = nnx.Param(step_bias(rngs, (heads,)))
        self.D = nnx.Param(jnp.ones(heads))
        self.norm = nnx.RMSNorm(self.inner, rngs=rngs)
        self.out = linear(self.inner, width)

    def __call__(self, x: jax.Array, state: State = EMPTY) -> tuple[jax.Array, State]:
        """[B, T, width] to the same, and the state after the last token."""
        heads = self.D.shape[0]
        gate, mixed, dt = jnp.split(self.project(x), [self.inner, 2 * self.inner + 2 * self.size], axis=-1)
        mixed, convolution = self.convolution(mixed, state.convolution)
        values, B, C = jnp.split(mixed, [self.inner, self.inner + self.size], axis=-1)
        y, recurrence, _ = state_space_v2(
            split_heads(values, heads),
            -jnp.exp(self.A_log[...]),
            B[:, :, None],  # one group, which all heads share
            C[:, :, None],
            self.D[...],
            jax.nn.softplus(dt + self.dt_bias[...]),
            gate=gate,  # the operation multiplies its output by silu(gate)
            initial_state=state.recurrence,
        )
        return self.out(self.norm(y)), State(convolution, recurrence)


class GatedLinearAttention(nnx.Module):
    """GLA (Yang et al. 2023, arXiv:2312.06635): a gate per key channel, by a low-rank projection."""

    def __init__(self, width: int, heads: int, size: int, rngs: nnx.Rngs) -> None:
        self.heads, inner = heads, heads * size
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.project = linear(width, 4 * inner)  # query, key, value | output gate
        self.convolution = ShortConvolution(3 * inner, rngs)
        self.gate = nnx.Sequential(linear(width, 16), nnx.Linear(16, inner, rngs=rngs))
        self.norm = nnx.RMSNorm(size, rngs=rngs)
        self.out = linear(inner, width)

    def __call__(self, x: jax.Array, state: State = EMPTY) -> tuple[jax.Array, State]:
        """[B, T, width] to the same, and the state after the last token."""
        mixed, gate = jnp.split(self.project(x), [self.out.in_features * 3], axis=-1)
        mixed, convolution = self.convolution(mixed, state.convolution)
        query, key, value = (split_heads(array, self.heads) for array in jnp.split(mixed, 3, axis=-1))
        decay = jax.nn.log_sigmoid(split_heads(self.gate(x), self.heads)) / 16  # begins near 0: a long memory
        y, recurrence = gated_linear_attention(
            query, key, value, decay, initial_state=state.recurrence, return_state=True
        )
        return self.out(merge_heads(self.norm(y)) * jax.nn.silu(gate)), State(convolution, recurrence)


class GatedDeltaNet(nnx.Module):
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464): a write replaces its key's value; a gate per head."""

    def __init__(self, width: int, heads: int, size: int, rngs: nnx.Rngs) -> None:
        self.heads, inner = heads, heads * size
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.project = linear(width, 4 * inner + 2 * heads)  # query, key, value | output gate | beta | dt
        self.convolution = ShortConvolution(3 * inner, rngs)
        self.A_log = nnx.Param(jnp.log(rngs.params.uniform((heads,), minval=1.0, maxval=16.0)))
        self.dt_bias = nnx.Param(step_bias(rngs, (heads,)))
        self.norm = nnx.RMSNorm(size, rngs=rngs)
        self.out = linear(inner, width)

    def __call__(self, x: jax.Array, state: State = EMPTY) -> tuple[jax.Array, State]:
        """[B, T, width] to the same, and the state after the last token."""
        inner = self.out.in_features
        ends = [3 * inner, 4 * inner, 4 * inner + self.heads]
        mixed, gate, beta, dt = jnp.split(self.project(x), ends, axis=-1)
        mixed, convolution = self.convolution(mixed, state.convolution)
        query, key, value = (split_heads(array, self.heads) for array in jnp.split(mixed, 3, axis=-1))
        y, recurrence = gated_delta_rule(
            query,  # the operation L2-normalises query and key
            key,
            value,
            jax.nn.sigmoid(beta),
            -jnp.exp(self.A_log[...]) * jax.nn.softplus(dt + self.dt_bias[...]),
            initial_state=state.recurrence,
            return_state=True,
        )
        return self.out(merge_heads(self.norm(y)) * jax.nn.silu(gate)), State(convolution, recurrence)


class KimiDeltaAttention(nnx.Module):
    """KDA (Kimi Team 2025, arXiv:2510.26692): the delta rule with a gate per key channel."""

    def __init__(self, width: int, heads: int, size: int, rngs: nnx.Rngs) -> None:
        self.heads, inner = heads, heads * size
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.project = linear(width, 3 * inner + heads)  # query, key, value | beta
        self.convolution = ShortConvolution(3 * inner, rngs)
        self.decay = nnx.Sequential(linear(width, size), linear(size, inner))
        self.A_log = nnx.Param(jnp.log(rngs.params.uniform((heads,), minval=1.0, maxval=16.0)))
        self.dt_bias = nnx.Param(step_bias(rngs, (heads, size)))
        self.gate = nnx.Sequential(linear(width, size), linear(size, inner))
        self.norm = nnx.RMSNorm(size, rngs=rngs)
        self.out = linear(inner, width)

    def __call__(self, x: jax.Array, state: State = EMPTY) -> tuple[jax.Array, State]:
        """[B, T, width] to the same, and the state after the last token."""
        mixed, beta = jnp.split(self.project(x), [3 * self.out.in_features], axis=-1)
        mixed, convolution = self.convolution(mixed, state.convolution)
        query, key, value = (split_heads(array, self.heads) for array in jnp.split(mixed, 3, axis=-1))
        decay = kda_decay(split_heads(self.decay(x), self.heads), self.A_log[...], self.dt_bias[...])
        y, recurrence = kernel_delta_attention(
            query,  # the operation L2-normalises query and key
            key,
            value,
            jax.nn.sigmoid(beta),
            decay,
            initial_state=state.recurrence,
            return_state=True,
        )
        return self.out(merge_heads(self.norm(y)) * jax.nn.sigmoid(self.gate(x))), State(convolution, recurrence)


LAYERS = {
    "mamba2": Mamba2,
    "gla": GatedLinearAttention,
    "gated_delta": GatedDeltaNet,
    "kda": KimiDeltaAttention,
}


class Model(nnx.Module):
    """Embedding, residual layers and a linear head; no positions, which recurrences do not need."""

    def __init__(self, layer: str, words: int, rngs: nnx.Rngs, width: int = 64, depth: int = 1) -> None:
        heads = 2
        self.embed = nnx.Embed(words, width, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(depth + 1)])
        self.layers = nnx.List([LAYERS[layer](width, heads, width // heads, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, words, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, states: tuple[State, ...] = ()) -> tuple[jax.Array, tuple[State, ...]]:
        """Tokens [B, T] to logits [B, T, words], and the states of all layers."""
        x, after = self.embed(tokens), []
        for n, layer in enumerate(self.layers):
            y, state = layer(self.norms[n](x), states[n] if states else EMPTY)
            x, after = x + y, [*after, state]
        return self.head(self.norms[-1](x)), tuple(after)


class Recall(NamedTuple):
    """The task.

    Attributes:
        pairs: Of a key and a value in a sequence, which is three times as long.
        keys: Different keys, of which a sequence has `pairs`.
        values: Different values, which may repeat.
    """

    pairs: int = 8
    keys: int = 16
    values: int = 16

    @property
    def words(self) -> int:
        """Keys come first in the vocabulary."""
        return self.keys + self.values

    def batch(self, key: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """Tokens [rows, 3 pairs], and the answers to the last third, [rows, pairs]."""
        draws = jax.random.split(key, 3)
        row = jnp.broadcast_to(jnp.arange(self.keys), (rows, self.keys))
        keys = jax.random.permutation(draws[0], row, axis=1, independent=True)[:, : self.pairs]
        values = jax.random.randint(draws[1], keys.shape, self.keys, self.words)
        row = jnp.broadcast_to(jnp.arange(self.pairs), keys.shape)
        order = jax.random.permutation(draws[2], row, axis=1, independent=True)
        asked, answers = (jnp.take_along_axis(x, order, axis=1) for x in (keys, values))
        told = jnp.stack([keys, values], axis=2).reshape(rows, -1)
        return jnp.concatenate([told, asked], axis=1), answers


def loss_of(model: Model, tokens: jax.Array, answers: jax.Array) -> jax.Array:
    """Mean cross-entropy of the answers; a guess among the values has log(values)."""
    logits = model(tokens)[0][:, -answers.shape[1] :]
    return optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array, answers: jax.Array) -> jax.Array:
    """One step of the optimizer, in place; returns the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens, answers)
    optimizer.update(model, gradients)
    return loss


def train(layer: str, task: Recall, steps: int, rows: int = 32, seed: int = 0) -> tuple[Model, list[float]]:
    """A trained model, and its loss at every step."""
    model = Model(layer, task.words, nnx.Rngs(seed))
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, max(1, steps // 10), steps, 1e-4)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)), wrt=nnx.Param)
    draw = jax.jit(task.batch, static_argnums=1)
    keys = jax.random.split(jax.random.key(seed), steps)
    return model, [float(train_step(model, optimizer, *draw(key, rows))) for key in keys]


@nnx.jit
def forward(model: Model, tokens: jax.Array, states: tuple[State, ...] = ()) -> tuple[jax.Array, tuple[State, ...]]:
    """The model, compiled."""
    return model(tokens, states)


def decode(model: Model, tokens: jax.Array, prompt: int) -> jax.Array:
    """The logits of all tokens: the first `prompt` in one call, then a token a call with the states of the last."""
    logits, states = forward(model, tokens[:, :prompt])
    made = [logits]
    for t in range(prompt, tokens.shape[1]):
        logits, states = forward(model, tokens[:, t : t + 1], states)
        made.append(logits)
    return jnp.concatenate(made, axis=1)


def evaluate(model: Model, task: Recall) -> tuple[float, float]:
    """The share of right answers to new sequences, read token by token, and how far logits are from a whole call's."""
    tokens, answers = task.batch(jax.random.key(1234), 64)
    logits = decode(model, tokens, prompt=2 * task.pairs)
    right = jnp.argmax(logits[:, -task.pairs :], axis=-1) == answers
    return float(right.mean()), float(jnp.abs(logits - forward(model, tokens)[0]).max())


def table(losses: dict[str, list[float]], every: int) -> str:
    """The mean loss of every so many steps, as Markdown."""
    steps = len(next(iter(losses.values())))
    rows = []
    for start in range(0, steps, every):
        parts = [curve[start : start + every] for curve in losses.values()]
        rows.append([str(min(start + every, steps)), *(f"{sum(part) / len(part):.4f}" for part in parts)])
    lines = [f"| {' | '.join(row)} |" for row in (["step", *losses], *rows)]
    return "\n".join([lines[0], "|---" * (len(losses) + 1) + "|", *lines[1:]])


def main(arguments: list[str] | None = None) -> int:
    """Trains layers; returns 1 if decoding differs from a call over whole sequences."""
    parser = argparse.ArgumentParser(description="Trains recurrent layers on multi-query associative recall.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", nargs="+", choices=tuple(LAYERS), default=tuple(LAYERS))
    parser.add_argument("--pairs", type=int, default=8, help="of a key and a value in a sequence")
    parser.add_argument("--every", type=int, default=10, help="steps a row of the table")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    # GPUs and TPUs round the factors of float32 products unless told otherwise.
    jax.config.update("jax_default_matmul_precision", "highest")
    task, losses, equal = Recall(options.pairs, 2 * options.pairs, 2 * options.pairs), {}, True
    for layer in options.layers:
        model, losses[layer] = train(layer, task, options.steps, seed=options.seed)
        right, difference = evaluate(model, task)
        equal &= difference < 1e-3
        print(f"{layer}: {right:.1%} of new answers right; decoding differs by {difference:.1e}", flush=True)
    print(f"\nloss; a guess has {math.log(task.values):.3f}\n\n{table(losses, options.every)}")
    return int(not equal)


if __name__ == "__main__":
    raise SystemExit(main())
