"""Continuous batching: a scheduler with a page allocator, chunked prefill, preemption, a shared prefix and drafts."""

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from continuous_batching.model import Model, Weights, step


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request, the tokens generated for it, and its pages.

    Attributes:
        tokens: The prompt and the generated tokens.
        prompt: How many of `tokens` are the prompt.
        max_new_tokens: How many tokens to generate.
        cached: How many tokens have their keys and values in the pages.
        pages: Indices of its pages, in the order of its tokens.
        keep_pages: Whether its pages stay allocated after its last token, for other sequences to read.
        logits: The logits [vocabulary] of each generated token, if the server keeps them.
    """

    tokens: list[int]
    prompt: int
    max_new_tokens: int
    cached: int = 0
    pages: list[int] = dataclasses.field(default_factory=list[int])
    keep_pages: bool = False
    logits: list[np.ndarray] = dataclasses.field(default_factory=list[np.ndarray])

    @property
    def uncached(self) -> int:
        """Tokens that are not in its pages yet: 1 while it decodes, more while its prompt is prefilled."""
        return len(self.tokens) - self.cached

    @property
    def done(self) -> bool:
        """Whether all of its tokens are generated."""
        return len(self.tokens) == self.prompt + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of the cache and of a step.

    Attributes:
        pages: Pages of the cache.
        slots: Tokens per page.
        sequences: Sequences per step.
        rows: Query rows per step: one per sequence that decodes; the others are for prompts.
        pages_per_sequence: Pages of the longest sequence, the width of the block tables.
    """

    pages: int
    slots: int
    sequences: int
    rows: int
    pages_per_sequence: int


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A sequence in a step: how many of its uncached tokens are computed, and drafts of the token after them."""

    sequence: Sequence
    rows: int
    drafts: list[int]

    @property
    def length(self) -> int:
        """Tokens in its pages after the step, drafts included."""
        return self.sequence.cached + self.rows + len(self.drafts)


class Server:
    """A continuous-batching loop: each step has the running sequences, and new ones while rows and pages are left."""

    def __init__(
        self, model: Model, limits: Limits, weights: list[Weights], keep_logits: bool, draft: bool = False
    ) -> None:
        self.model, self.limits, self.weights = model, limits, weights
        self.keep_logits, self.draft, self.accepted_drafts = keep_logits, draft, 0
        self.prefix: list[int] | None = None
        self.prefix_pages: list[int] = []
        self.caches = model.caches(limits.pages, limits.slots)
        self.free_pages = list(range(limits.pages))
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.preemptions = self.steps = 0

    def share(self, tokens: list[int]) -> None:
        """Computes the beginning of all later requests once, and keeps those of its tokens that fill whole pages."""
        count = len(tokens) // self.limits.slots * self.limits.slots
        if not count:
            return
        self.prefix = []
        sequence = self.submit(tokens[:count], 1)
        sequence.keep_pages = True
        while not sequence.done:
            self.step()
        self.prefix, self.prefix_pages = tokens[:count], sequence.pages[: count // self.limits.slots]

    def submit(self, tokens: list[int], max_new_tokens: int) -> Sequence:
        """Puts a request into the queue.

        Raises:
            ValueError: It needs more pages than the cache or a block table has, or does not begin with the shared
                prefix.
        """
        prefix = self.prefix or []
        if tokens[: len(prefix)] != prefix or len(tokens) == len(prefix):
            raise ValueError(f"tokens: got {tokens}, wants the shared prefix {prefix} and tokens after it")
        length, limits = len(tokens) + max_new_tokens, self.limits
        pages, available = -(-length // limits.slots), min(limits.pages_per_sequence, limits.pages)
        if pages > available:
            raise ValueError(
                f"tokens: got {len(tokens)}, and {max_new_tokens} to generate, which need {pages} pages of "
                f"{limits.slots}, wants at most {available} pages"
            )
        self.waiting.append(Sequence(list(tokens), len(tokens), max_new_tokens, len(prefix), list(self.prefix_pages)))
        return self.waiting[-1]

    def step(self) -> int:
        """Runs one step; returns how many tokens it generated."""
        batch = self._add_drafts(self._schedule())
        logits, self.caches = step(self.model, self.weights, self.caches, *self._arrays(batch))
        sampled, self.steps = np.asarray(jnp.argmax(logits, axis=-1)), self.steps + 1
        kept_logits = np.asarray(logits) if self.keep_logits else None
        generated = 0
        for n, (scheduled, sequence) in enumerate((entry, entry.sequence) for entry in batch):
            sequence.cached += scheduled.rows
            row = 0 if sequence.uncached == 0 else None  # with all tokens cached, the last row predicts the next one
            while row is not None and not sequence.done:
                token = int(sampled[n, row])
                sequence.tokens.append(token)
                generated += 1
                if kept_logits is not None:
                    sequence.logits.append(kept_logits[n, row])
                # An accepted draft has logits of its own. The first draft is already in its slot of the cache.
                accepted = row == 0 and token in scheduled.drafts
                row = 1 + scheduled.drafts.index(token) if accepted else None
                sequence.cached += row == 1
                self.accepted_drafts += accepted
            if sequence.done:
                self._release(sequence)
        return generated

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """The sequences of a step, each with how many of its uncached tokens are computed."""
        batch: list[tuple[Sequence, int]] = []
        free_rows = self.limits.rows
        # Decoding sequences come first, so that a long prompt does not delay them.
        for sequence in sorted(self.running, key=lambda sequence: sequence.uncached > 1):
            rows = min(sequence.uncached, free_rows)
            if rows and sequence in self.running and self._reserve(sequence, sequence.cached + rows):
                batch.append((sequence, rows))
                free_rows -= rows
        while self.waiting and free_rows and len(self.running) < self.limits.sequences:
            sequence = self.waiting[0]
            rows = min(sequence.uncached, free_rows)
            # A new sequence is admitted only if pages are free: it never preempts a running one.
            if self._missing_pages(sequence, sequence.cached + rows) > len(self.free_pages):
                break
            self.running.append(self.waiting.popleft())
            self._reserve(sequence, sequence.cached + rows)
            batch.append((sequence, rows))
            free_rows -= rows
        return [(sequence, rows) for sequence, rows in batch if sequence in self.running]

    def _add_drafts(self, batch: list[tuple[Sequence, int]]) -> list[Scheduled]:
        """The sequences of a step, with two drafts each where rows and pages are left."""
        free_rows, limits = self.limits.rows - sum(rows for _, rows in batch), self.limits
        scheduled: list[Scheduled] = []
        for sequence, rows in batch:
            remaining = sequence.prompt + sequence.max_new_tokens - len(sequence.tokens)
            drafts: list[int] = []
            if self.draft and rows == sequence.uncached <= 2 <= min(free_rows, remaining):
                end = sequence.cached + rows + 2
                fits_table = end <= limits.pages_per_sequence * limits.slots
                if fits_table and self._missing_pages(sequence, end) <= len(self.free_pages):
                    self._reserve(sequence, end)
                    drafts, free_rows = self._propose(sequence), free_rows - 2
            scheduled.append(Scheduled(sequence, rows, drafts))
        return scheduled

    def _propose(self, sequence: Sequence) -> list[int]:
        """Two drafts of the next token: those that followed the newest token before, or else arbitrary ones."""
        newest, before = sequence.tokens[-1], sequence.tokens[:-1]
        followed = [before[n + 1] for n in range(len(before) - 2, -1, -1) if before[n] == newest]
        return list(dict.fromkeys([*followed, newest, (newest + 1) % self.model.vocabulary]))[:2]

    def _missing_pages(self, sequence: Sequence, length: int) -> int:
        """How many pages a sequence needs in addition to its own to hold `length` tokens."""
        return -(-length // self.limits.slots) - len(sequence.pages)

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Allocates pages for `length` tokens; while too few are free, preempts the newest running sequence.

        Returns:
            False if the sequence itself was preempted.
        """
        while self._missing_pages(sequence, length) > len(self.free_pages):
            newest = self.running[-1]
            self._release(newest)
            newest.cached, self.preemptions = len(self.prefix or []), self.preemptions + 1
            self.waiting.appendleft(newest)
            if newest is sequence:
                return False
        sequence.pages += [self.free_pages.pop() for _ in range(self._missing_pages(sequence, length))]
        return True

    def _release(self, sequence: Sequence) -> None:
        """Removes a sequence from the running ones, and frees its pages but those of the shared prefix."""
        self.running.remove(sequence)
        if not sequence.keep_pages:
            self.free_pages += sequence.pages[len(self.prefix_pages) :]
            sequence.pages = list(self.prefix_pages)

    def _arrays(self, batch: list[Scheduled]) -> tuple[Any, ...]:
        """The arguments of `step`: tokens, positions and batch, with shapes of one of two compiled programs.

        A step in which every sequence decodes runs the second program, which has fewer rows.
        """
        limits, rows_per_sequence = self.limits, 4 if self.draft else 1
        decode_rows = min(limits.rows, limits.sequences * rows_per_sequence)
        all_decode = sum(entry.rows + len(entry.drafts) for entry in batch) <= decode_rows
        tokens, positions = np.zeros((2, decode_rows if all_decode else limits.rows), np.int32)
        lengths, starts = np.zeros(limits.sequences, np.int32), np.zeros(limits.sequences + 1, np.int32)
        tables = np.full((limits.sequences, limits.pages_per_sequence), -1, np.int32)
        logit_rows = np.zeros((limits.sequences, 3 if self.draft else 1), np.int32)
        qq_bias = np.zeros((limits.sequences, rows_per_sequence, rows_per_sequence), np.float32)
        start = 0
        for n, entry in enumerate(batch):
            first, end, drafts = entry.sequence.cached, entry.sequence.cached + entry.rows, len(entry.drafts)
            rows = slice(start, start + entry.rows + drafts)
            tokens[rows] = entry.sequence.tokens[first:end] + entry.drafts
            positions[rows] = [*range(first, end), *[end] * drafts]  # siblings have the same position
            lengths[n], tables[n, : len(entry.sequence.pages)] = entry.length, entry.sequence.pages
            logit_rows[n] = start + entry.rows - 1
            if drafts:
                logit_rows[n] += np.arange(3)
                qq_bias[n, entry.rows + 1, entry.rows] = -np.inf  # the second draft does not attend to the first
            start += entry.rows + drafts
            starts[n + 1 :] = start
        options: dict[str, Any] = {"qq_bias": qq_bias if self.draft else None}
        options["shared_prefix"] = None if self.prefix is None else np.int32(len(self.prefix))
        return tokens, positions, ((lengths, tables, starts), options, logit_rows)
