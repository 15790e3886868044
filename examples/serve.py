"""Serves a small decoder with continuous batching: paged attention, prefill in chunks, preemption.

    python examples/serve.py                    # 8 requests, a small model with random weights
    python examples/serve.py --check            # and compare every logit with flash attention over whole sequences
    python examples/serve.py --check --cache float8_e4m3fn --share --draft     # 8-bit caches, a shared prefix, trees
    python examples/serve.py --invariant        # the logits' bits of each sequence, served alone and in the batch
    python examples/serve.py --model large --dtype bfloat16 --requests 256 --pages 16384     # on a GPU

One compiled step serves everything: a batch of query rows, in which a sequence that decodes has one row and a prompt
has a chunk. Its shapes never change, so nothing is compiled again while requests come and go.

    waiting --admit--> prefill, chunk by chunk --> decode, one token a step --> done
       ^                    |                         |
       +------ preempted: pages given back <----------+   when no page is free

With --share, what all requests begin with is computed once and lies in pages that all tables begin with. With --draft,
a sequence that decodes has two guesses of its next token as well, both children of the newest one: a tree, which the
step checks at once. With --invariant, everything runs in a `batch_invariant` block: each logit has the same bits
in any batch, after preemption, with pages of another size, and alone.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ejkernel.modules import chunked_prefill_paged_decode, flash_attention, grouped_matmul
from ejkernel.ops import batch_invariant

Weights = dict[str, Any]
Cache = tuple[jax.Array, jax.Array]


class ByteTokenizer:
    """Text as the bytes of its UTF-8, with one token more for the beginning of a text."""

    begin = 256
    size = 257

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [self.begin, *text.encode()]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 show as replacement characters."""
        return bytes(i for i in ids if i < self.begin).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder with RMS norms, rotary positions, grouped queries and gated feed-forward layers."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 128
    vocabulary: int = ByteTokenizer.size
    dtype: str = "float32"
    cache: str = ""
    invariant: bool = False

    @property
    def scale(self) -> float | None:
        """What keys and values are divided by in caches of 8 bits; a server measures it."""
        return 1 / 16 if self.cache else None

    def weights(self, key: jax.Array) -> list[Weights]:
        """Random weights of all layers and, last, of the embedding."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "query": (self.width, q),
            "key": (self.width, kv),
            "value": (self.width, kv),
            "output": (q, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        layers = [self._normal(k, shapes) for k in jax.random.split(key, self.layers)]
        return [*layers, self._normal(key, {"embedding": (self.vocabulary, self.width)})]

    def _normal(self, key: jax.Array, shapes: dict[str, tuple[int, int]]) -> Weights:
        # Scaled by the numbers that are summed up: rows of a layer's matrices, columns of the embedding's.
        keys = jax.random.split(key, len(shapes))
        return {
            name: (jax.random.normal(k, shape) * shape[int(name == "embedding")] ** -0.5).astype(self.dtype)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def caches(self, pages: int, slots: int) -> list[Cache]:
        """Empty key and value caches [pages, slots, KV heads, head size] of all layers."""
        shape = (pages, slots, self.kv_heads, self.head_dim)
        dtype = self.cache or self.dtype
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(self.layers)]


MODELS = {
    "small": Model(),
    "large": Model(layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, hidden=8192),
}


def product(model: Model, x: jax.Array, weights: jax.Array, transpose: bool = False) -> jax.Array:
    """Rows x [T, n] times a matrix [n, m], or [m, n] to transpose, in float32.

    XLA's product with one row differs in bits from one with many, and on a GPU every number of rows may differ. A
    grouped matmul with one group, in a `batch_invariant` block, does not.
    """
    if not model.invariant:
        return jnp.dot(x, weights.T if transpose else weights, preferred_element_type=jnp.float32)
    rows = jnp.full(1, x.shape[0], jnp.int32)
    return grouped_matmul(x, weights[None], rows, transpose_rhs=transpose, preferred_element_type=jnp.float32)


def norm(model: Model, x: jax.Array) -> jax.Array:
    """x at a root mean square of 1."""
    wide = x.astype(jnp.float32)
    square = wide * wide
    if model.invariant:  # XLA adds up a row in an order that depends on how many rows there are; a product does not
        mean = product(model, square, jnp.full((x.shape[1], 8), 1 / x.shape[1]))[:, :1]
    else:
        mean = jnp.mean(square, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): x [T, H, D], halves rotated by angles of the position."""
    half = x.shape[-1] // 2
    angles = positions[:, None].astype(jnp.float32) * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1).astype(x.dtype)


def layer(model: Model, weights: Weights, x: jax.Array, positions: jax.Array, attend: Any) -> tuple[jax.Array, Any]:
    """One layer on rows [T, width]; `attend(query, key, value)` returns the attention's output and anything else."""
    rows, normal = x.shape[0], norm(model, x)
    query, key, value = (
        product(model, normal, weights[name]).astype(x.dtype).reshape(rows, -1, model.head_dim)
        for name in ("query", "key", "value")
    )
    attended, rest = attend(rotate(query, positions), rotate(key, positions), value)
    x = x + product(model, attended.reshape(rows, -1), weights["output"]).astype(x.dtype)
    normal = norm(model, x)
    gate, up = (product(model, normal, weights[name]).astype(x.dtype) for name in ("gate", "up"))
    return x + product(model, jax.nn.silu(gate) * up, weights["down"]).astype(x.dtype), rest


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(
    model: Model, weights: list[Weights], caches: list[Cache], tokens: jax.Array, positions: jax.Array, batch: Any
) -> tuple[jax.Array, list[Cache]]:
    """One step of the server: all rows through all layers, their keys and values into the pages.

    Args:
        model: The sizes.
        weights: The weights.
        caches: The caches, which are updated in place.
        tokens: [T] token of each row; rows behind the last sequence's are of no sequence.
        positions: [T] its position in its sequence.
        batch: Lengths [N], block tables [N, K] and starts [N + 1], as `chunked_prefill_paged_decode` takes them; its
            further arguments; and the rows whose logits are asked for, [N, R].

    Returns:
        Logits [N, R, vocabulary], and the caches.
    """
    *layers, last = weights
    (where, options, ends), scale = batch, model.scale
    x = last["embedding"][tokens]
    written: list[Cache] = []
    for own, cache in zip(layers, caches, strict=True):

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, cache: Cache = cache) -> tuple[jax.Array, Cache]:
            key, value = ((x / scale if scale else x).astype(cache[0].dtype) for x in (key, value))
            scales = {"k_scale": scale, "v_scale": scale}
            output, *pages = chunked_prefill_paged_decode(query, key, value, *cache, *where, **options, **scales)
            return output, (pages[0], pages[1])

        x, pages = layer(model, own, x, positions, attend)
        written.append(pages)
    logits = logits_of(model, x[ends.reshape(-1)], last)
    return logits.reshape(*ends.shape, -1), written


def logits_of(model: Model, x: jax.Array, weights: Weights) -> jax.Array:
    """Logits of rows, float32."""
    return product(model, norm(model, x), weights["embedding"], transpose=True)


@functools.partial(jax.jit, static_argnums=0)
def whole(model: Model, weights: list[Weights], tokens: jax.Array) -> jax.Array:
    """Logits [T, vocabulary] of a whole sequence by flash attention: what the server's have to be."""
    *layers, last = weights
    x, positions = last["embedding"][tokens], jnp.arange(tokens.shape[0])

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        return flash_attention(query[None], key[None], value[None], causal=True)[0], None

    for own in layers:
        x, _ = layer(model, own, x, positions, attend)
    return logits_of(model, x, last)


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request and what has been made of it.

    Attributes:
        tokens: Its prompt and the tokens that were generated.
        prompt: How many of them are the prompt.
        wanted: How many tokens to generate.
        cached: How many tokens are in its pages.
        pages: Its pages, in order.
        stays: Whether its pages stay in use after its end.
        logits: Those that every generated token was chosen by, if they are kept.
    """

    tokens: list[int]
    prompt: int
    wanted: int
    cached: int = 0
    pages: list[int] = dataclasses.field(default_factory=list[int])
    stays: bool = False
    logits: list[np.ndarray] = dataclasses.field(default_factory=list[np.ndarray])

    @property
    def missing(self) -> int:
        """Tokens that are not in its pages: 1 in decoding, more in prefill."""
        return len(self.tokens) - self.cached

    @property
    def done(self) -> bool:
        """Whether all tokens that were asked for are there."""
        return len(self.tokens) == self.prompt + self.wanted


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step can hold.

    Attributes:
        pages: Pages of the cache.
        slots: Tokens of a page.
        sequences: Sequences in a step.
        rows: Query rows in a step: those that decode have one each, the rest is for prompts.
        table: Pages of the longest sequence.
    """

    pages: int
    slots: int
    sequences: int
    rows: int
    table: int


@dataclasses.dataclass(frozen=True)
class Planned:
    """A sequence in a step: how many of its missing tokens are computed, and guesses of the one after them."""

    sequence: Sequence
    rows: int
    drafts: list[int]

    @property
    def length(self) -> int:
        """Tokens in its pages, guesses included."""
        return self.sequence.cached + self.rows + len(self.drafts)


class Server:
    """A continuous-batching loop: a step takes the sequences that run, and as many new ones as there is room for."""

    def __init__(
        self, model: Model, limits: Limits, weights: list[Weights], keep_logits: bool, draft: bool = False
    ) -> None:
        self.model, self.limits, self.weights = model, limits, weights
        self.keep_logits, self.draft, self.accepted = keep_logits, draft, 0
        self.prefix: list[int] | None = None
        self.shared: list[int] = []
        self.caches = model.caches(limits.pages, limits.slots)
        self.free = list(range(limits.pages))
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.preemptions = self.steps = 0

    def share(self, tokens: list[int]) -> None:
        """Computes what all requests from now on begin with, as far as it fills pages, and keeps it."""
        self.prefix = []
        count = len(tokens) // self.limits.slots * self.limits.slots
        sequence = self.submit(tokens[:count], 1)
        sequence.stays = True
        while not sequence.done:
            self.step()
        self.prefix, self.shared = tokens[:count], sequence.pages[: count // self.limits.slots]

    def submit(self, tokens: list[int], wanted: int) -> Sequence:
        """Puts a request into the queue.

        Raises:
            ValueError: It could never have as many pages as it needs, or does not begin as all do.
        """
        begins = self.prefix or []
        if tokens[: len(begins)] != begins or len(tokens) == len(begins):
            raise ValueError("tokens: got others than those that all requests begin with, wants more after these")
        needed = -(-(len(tokens) + wanted) // self.limits.slots)
        if needed > min(self.limits.table, self.limits.pages):
            raise ValueError(f"tokens: got {len(tokens)} and {wanted} to generate, which need {needed} pages: too many")
        self.waiting.append(Sequence(list(tokens), len(tokens), wanted, len(begins), list(self.shared)))
        return self.waiting[-1]

    def step(self) -> int:
        """Runs one step; returns how many tokens it generated."""
        plan = self._with_drafts(self._plan())
        logits, self.caches = step(self.model, self.weights, self.caches, *self._arrays(plan))
        chosen, self.steps = np.asarray(jnp.argmax(logits, axis=-1)), self.steps + 1
        kept = np.asarray(logits) if self.keep_logits else None
        made = 0
        for n, (planned, sequence) in enumerate((one, one.sequence) for one in plan):
            sequence.cached += planned.rows
            row = 0 if sequence.missing == 0 else None  # all tokens are in: the last row's logits say the next
            while row is not None and not sequence.done:
                token = int(chosen[n, row])
                sequence.tokens.append(token)
                made += 1
                if kept is not None:
                    sequence.logits.append(kept[n, row])
                # A guess that was right has logits of its own. The first lies where its token belongs in the cache.
                guessed = row == 0 and token in planned.drafts
                row = 1 + planned.drafts.index(token) if guessed else None
                sequence.cached += row == 1
                self.accepted += guessed
            if sequence.done:
                self._release(sequence)
        return made

    def _plan(self) -> list[tuple[Sequence, int]]:
        """The sequences of a step, each with how many of its missing tokens are computed."""
        plan: list[tuple[Sequence, int]] = []
        room = self.limits.rows
        # Those that decode come first: a long prompt must not hold them up.
        for sequence in sorted(self.running, key=lambda sequence: sequence.missing > 1):
            rows = min(sequence.missing, room)
            if rows and sequence in self.running and self._reserve(sequence, sequence.cached + rows):
                plan.append((sequence, rows))
                room -= rows
        while self.waiting and room and len(self.running) < self.limits.sequences:
            sequence = self.waiting[0]
            rows = min(sequence.missing, room)
            # A new sequence takes only what is free: it preempts nobody.
            if self._needed(sequence, sequence.cached + rows) > len(self.free):
                break
            self.running.append(self.waiting.popleft())
            self._reserve(sequence, sequence.cached + rows)
            plan.append((sequence, rows))
            room -= rows
        return [(sequence, rows) for sequence, rows in plan if sequence in self.running]

    def _with_drafts(self, plan: list[tuple[Sequence, int]]) -> list[Planned]:
        """The sequences of a step, with guesses where there is room for them."""
        room = self.limits.rows - sum(rows for _, rows in plan)
        planned: list[Planned] = []
        for sequence, rows in plan:
            left = sequence.prompt + sequence.wanted - len(sequence.tokens)
            drafts: list[int] = []
            if self.draft and rows == sequence.missing <= 2 <= min(room, left):
                end = sequence.cached + rows + 2
                if self._needed(sequence, end) <= len(self.free) and end <= self.limits.table * self.limits.slots:
                    self._reserve(sequence, end)
                    drafts, room = self._guesses(sequence), room - 2
            planned.append(Planned(sequence, rows, drafts))
        return planned

    def _guesses(self, sequence: Sequence) -> list[int]:
        """Two tokens that may come next: those that the newest token was last followed by, or any others."""
        newest, before = sequence.tokens[-1], sequence.tokens[:-1]
        followed = [before[n + 1] for n in range(len(before) - 2, -1, -1) if before[n] == newest]
        return list(dict.fromkeys([*followed, newest, (newest + 1) % self.model.vocabulary]))[:2]

    def _needed(self, sequence: Sequence, length: int) -> int:
        """Pages that a sequence lacks for so many tokens."""
        return -(-length // self.limits.slots) - len(sequence.pages)

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Gives a sequence the pages for so many tokens; where none is free, the newest sequence gives up its own."""
        while self._needed(sequence, length) > len(self.free):
            newest = self.running[-1]
            self._release(newest)
            newest.cached, self.preemptions = len(self.prefix or []), self.preemptions + 1
            self.waiting.appendleft(newest)
            if newest is sequence:
                return False
        sequence.pages += [self.free.pop() for _ in range(self._needed(sequence, length))]
        return True

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if not sequence.stays:
            self.free += sequence.pages[len(self.shared) :]
            sequence.pages = list(self.shared)

    def _arrays(self, plan: list[Planned]) -> tuple[Any, ...]:
        """Tokens, positions and batch of a step, of shapes that never change.

        A step in which all decode has rows for nothing else: the second of the two programs.
        """
        limits, most = self.limits, 4 if self.draft else 1
        narrow = min(limits.rows, limits.sequences * most)
        decoding = sum(one.rows + len(one.drafts) for one in plan) <= narrow
        tokens, positions = np.zeros((2, narrow if decoding else limits.rows), np.int32)
        lengths, starts = np.zeros(limits.sequences, np.int32), np.zeros(limits.sequences + 1, np.int32)
        tables = np.full((limits.sequences, limits.table), -1, np.int32)
        ends = np.zeros((limits.sequences, 3 if self.draft else 1), np.int32)
        trees = np.zeros((limits.sequences, most, most), np.float32)
        at = 0
        for n, one in enumerate(plan):
            first, end, drafts = one.sequence.cached, one.sequence.cached + one.rows, len(one.drafts)
            rows = slice(at, at + one.rows + drafts)
            tokens[rows] = one.sequence.tokens[first:end] + one.drafts
            positions[rows] = [*range(first, end), *[end] * drafts]  # guesses are of one position
            lengths[n], tables[n, : len(one.sequence.pages)] = one.length, one.sequence.pages
            ends[n] = at + one.rows - 1
            if drafts:
                ends[n] += np.arange(3)
                trees[n, one.rows + 1, one.rows] = -np.inf  # the second does not see the first
            at += one.rows + drafts
            starts[n + 1 :] = at
        options = {"qq_bias": trees if self.draft else None}
        options["shared_prefix"] = None if self.prefix is None else np.int32(len(self.prefix))
        return tokens, positions, ((lengths, tables, starts), options, ends)


def check(model: Model, weights: list[Weights], sequences: list[Sequence]) -> float:
    """The largest difference of a logit of any sequence from flash attention's over the whole sequence."""
    worst = 0.0
    for n, sequence in enumerate(sequences):
        # Filled up, so that sequences of different lengths share a program; causal attention does not look there.
        filled = np.zeros(-(-len(sequence.tokens) // 64) * 64, np.int32)
        filled[: len(sequence.tokens)] = sequence.tokens
        want = np.asarray(whole(model, weights, jnp.asarray(filled)))[sequence.prompt - 1 : len(sequence.tokens) - 1]
        difference = float(np.abs(np.stack(sequence.logits) - want).max())
        print(f"sequence {n}: {len(sequence.logits)} tokens, largest difference of a logit {difference:.1e}")
        worst = max(worst, difference)
    return worst


def check_alone(server: Server, sequences: list[Sequence]) -> int:
    """How many sequences have other bits alone: one at a time, with pages of half the size and fewer rows a step."""
    limits, wrong = server.limits, 0
    slots = max(1, limits.slots // 2)
    table = -(-limits.table * limits.slots // slots)
    alone = Server(server.model, Limits(table, slots, 1, 24, table), server.weights, keep_logits=True)
    for n, sequence in enumerate(sequences):
        again = alone.submit(sequence.tokens[: sequence.prompt], sequence.wanted)
        while not again.done:
            alone.step()
        same = np.stack(again.logits).tobytes() == np.stack(sequence.logits).tobytes()
        print(f"sequence {n}: {len(sequence.logits)} logits, {'the same bits' if same else 'OTHER BITS'} alone")
        wrong += not same
    return wrong


def serve(server: Server, total: int) -> float:
    """Runs until nothing is left to do, with a progress display; returns seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    start = time.perf_counter()
    with Progress(*columns) as progress:
        task = progress.add_task("tokens", total=total, state="")
        while server.waiting or server.running:
            made = server.step()
            used = 1 - len(server.free) / server.limits.pages
            state = f"{len(server.running)} running, {len(server.waiting)} waiting, {used:.0%} of the pages"
            progress.update(task, advance=made, state=f"{state}, {server.preemptions} preempted")
    return time.perf_counter() - start


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Serves a small decoder with continuous batching.")
    parser.add_argument("--model", choices=tuple(MODELS), default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--generate", type=int, default=24, help="tokens a request")
    parser.add_argument("--pages", type=int, default=24, help="pages of the cache; few make preemption")
    parser.add_argument("--slots", type=int, default=16, help="tokens a page")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in a step")
    parser.add_argument("--rows", type=int, default=64, help="query rows in a step")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest sequence")
    parser.add_argument("--cache", default="", help="dtype of the caches, such as float8_e4m3fn")
    parser.add_argument("--share", action="store_true", help="compute once what all prompts begin with")
    parser.add_argument("--draft", action="store_true", help="check two guesses of the next token in each step")
    parser.add_argument("--invariant", action="store_true", help="compare the bits of every logit with a server of one")
    parser.add_argument("--check", action="store_true", help="compare every logit with flash attention")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Serves random requests; returns 1 if a check fails."""
    options = parse(arguments)
    with batch_invariant() if options.invariant else contextlib.nullcontext():
        return run(options)


def run(options: argparse.Namespace) -> int:
    """Serves random requests as the command line says; returns 1 if a check fails."""
    tokenizer = ByteTokenizer()
    if options.dtype == "float32":
        # GPUs and TPUs round the factors of float32 products unless told otherwise, each program in its own way.
        jax.config.update("jax_default_matmul_precision", "highest")
    model = dataclasses.replace(
        MODELS[options.model], dtype=options.dtype, cache=options.cache, invariant=options.invariant
    )
    weights = model.weights(jax.random.key(0))
    table = -(-options.longest // options.slots)
    limits = Limits(options.pages, options.slots, options.sequences, options.rows, table)
    server = Server(model, limits, weights, options.check or options.invariant, options.draft)
    begin = "Answer in the words of the question. " if options.share else ""
    prompts = [f"{begin}Request {n}: " + "all work and no play. " * (1 + n % 5) for n in range(options.requests)]
    if options.share:
        server.share(tokenizer.encode(begin))
    sequences = [server.submit(tokenizer.encode(prompt), options.generate) for prompt in prompts]
    seconds = serve(server, options.generate * len(sequences))
    generated = sum(len(sequence.tokens) - sequence.prompt for sequence in sequences)
    print(
        f"{generated} tokens in {seconds:.2f} s, {generated / seconds:.0f} tokens/s, compilation included; "
        f"{server.steps} steps, {server.preemptions} preemptions"
        + (f"; {server.accepted} guesses were right" if options.draft else "")
    )
    print(f"the first, of random weights: {tokenizer.decode(sequences[0].tokens[sequences[0].prompt :])!r}")
    if options.invariant and check_alone(server, sequences):
        return 1
    if not options.check:
        return 0
    exact = options.dtype == "float32" and not options.cache
    worst, allowed = check(model, weights, sequences), 1e-3 if exact else 0.5 if options.cache else 0.25
    print(f"largest difference {worst:.1e}, allowed {allowed}: {'equal' if worst <= allowed else 'DIFFERENT'}")
    return 0 if worst <= allowed else 1


if __name__ == "__main__":
    raise SystemExit(main())
