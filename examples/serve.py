"""Serves a small decoder with continuous batching: paged attention, prefill in chunks, preemption.

    python examples/serve.py                    # 8 requests, a small model with random weights
    python examples/serve.py --check            # and compare every logit with flash attention over whole sequences
    python examples/serve.py --check --cache float8_e4m3fn --share --draft     # 8-bit caches, a shared prefix, trees
    python examples/serve.py --invariant        # the logits' bits of each sequence, served alone and in the batch
    python examples/serve.py --model large --dtype bfloat16 --requests 256 --pages 16384     # on a GPU

One step serves everything: a batch of query rows, in which a sequence that decodes has one row and a prompt has a chunk
of rows. It is compiled for two numbers of rows, so nothing is compiled again while requests come and go.

    waiting --admit--> prefill, in chunks --> decode, one token per step --> done
       ^                    |                    |
       +-- preempted: its pages are freed <------+   when no page is free

With --share, the common beginning of all requests is computed once, and all block tables begin with its pages. With
--draft, a sequence that decodes also has two drafts of its next token, both children of its newest token: a tree, which
one step verifies. With --invariant, everything runs in a `batch_invariant` block: each logit has the same bits in any
batch, after preemption, with pages of another size, and alone.

The decoder is in `continuous_batching/model.py`, the scheduler and page allocator in `continuous_batching/server.py`.
"""

import argparse
import contextlib
import dataclasses
import time

import jax
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from continuous_batching.checks import check, check_alone
from continuous_batching.model import MODELS, ByteTokenizer
from continuous_batching.server import Limits, Server
from ejkernel.ops import batch_invariant


def serve(server: Server, total: int) -> float:
    """Runs until all sequences are done, with a progress display; returns seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    start = time.perf_counter()
    with Progress(*columns) as progress:
        task = progress.add_task("tokens", total=total, state="")
        while server.waiting or server.running:
            generated = server.step()
            used = 1 - len(server.free_pages) / server.limits.pages
            state = f"{len(server.running)} running, {len(server.waiting)} waiting, {used:.0%} of the pages"
            progress.update(task, advance=generated, state=f"{state}, {server.preemptions} preempted")
    return time.perf_counter() - start


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Serves a small decoder with continuous batching.")
    parser.add_argument("--model", choices=tuple(MODELS), default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--generate", type=int, default=24, help="tokens per request")
    parser.add_argument("--pages", type=int, default=24, help="pages of the cache; with few, sequences are preempted")
    parser.add_argument("--slots", type=int, default=16, help="tokens per page")
    parser.add_argument("--sequences", type=int, default=8, help="sequences per step")
    parser.add_argument("--rows", type=int, default=64, help="query rows per step")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest sequence")
    parser.add_argument("--cache", default="", help="dtype of the caches, such as float8_e4m3fn")
    parser.add_argument("--share", action="store_true", help="compute the common beginning of all prompts once")
    parser.add_argument("--draft", action="store_true", help="verify two drafts of the next token in each step")
    parser.add_argument(
        "--invariant", action="store_true", help="compare the bits of every logit with those of each sequence alone"
    )
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
    pages_per_sequence = -(-options.longest // options.slots)
    limits = Limits(options.pages, options.slots, options.sequences, options.rows, pages_per_sequence)
    server = Server(model, limits, weights, options.check or options.invariant, options.draft)
    prefix = "Answer in the words of the question. " if options.share else ""
    prompts = [f"{prefix}Request {n}: " + "all work and no play. " * (1 + n % 5) for n in range(options.requests)]
    if options.share:
        server.share(tokenizer.encode(prefix))
    sequences = [server.submit(tokenizer.encode(prompt), options.generate) for prompt in prompts]
    seconds = serve(server, options.generate * len(sequences))
    generated = sum(len(sequence.tokens) - sequence.prompt for sequence in sequences)
    print(
        f"{generated} tokens in {seconds:.2f} s, {generated / seconds:.0f} tokens/s, compilation included; "
        f"{server.steps} steps, {server.preemptions} preemptions"
        + (f"; {server.accepted_drafts} drafts were accepted" if options.draft else "")
    )
    first = sequences[0]
    print(f"output of the first request, from random weights: {tokenizer.decode(first.tokens[first.prompt :])!r}")
    if options.invariant and check_alone(server, sequences):
        return 1
    if not options.check:
        return 0
    exact = options.dtype == "float32" and not options.cache
    largest, allowed = check(model, weights, sequences), 1e-3 if exact else 0.5 if options.cache else 0.25
    print(f"largest difference {largest:.1e}, allowed {allowed}: {'equal' if largest <= allowed else 'DIFFERENT'}")
    return 0 if largest <= allowed else 1


if __name__ == "__main__":
    raise SystemExit(main())
