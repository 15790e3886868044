"""The features of serving, and calls of the operations over pages with any of them."""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
from paged_calls import DECODING, Paged
from pairwise import pairwise

import ejkernel.modules as ej
from ejkernel.ops.plugins import registry

RNG = np.random.default_rng(7)
LATENT = ("multi_latent_ragged_page_attention", "multi_latent_ragged_page_attention_v2")
PREFIX = 6
"""One page of 4 tokens and half of another."""

FEATURES = {
    "scales": {"k_scale": 0.5, "v_scale": 3.0},
    "prefix": {"prefix": PREFIX},
    "trees": {"qq_bias": np.where(RNG.random((4, 5, 5)) < 0.3, -np.inf, RNG.integers(-8, 8, (4, 5, 5)) / 4)},
    "alibi": {"alibi": np.array([0.5, 0.25, -0.5, 0.125])},
    "chunks": {"chunk": 9},
    "sinks": {"sinks": np.array([0.5, -1.25, 0.125, 2.0])},
    "cap": {"cap": 1.5},
    "window": {"window": 7},
}
ARGUMENTS = {**paged_calls.NAMES, **paged_calls.ARRAYS}


def features(op: str) -> list[str]:
    """Those that an operation has."""
    parameters = registry().ops[op].signature.parameters
    return [name for name, options in FEATURES.items() if all(ARGUMENTS[one] in parameters for one in options)]


def combinations(op: str) -> list[dict]:
    """Options of the loop that cover all pairs of features; `packed` says that each tree has its sequence's size."""
    choices = {name: (False, True) for name in features(op)}
    if "trees" in choices and op != "prefill_page_attention":
        choices["trees"] = (False, True, "packed")
    made = []
    for row in pairwise(choices):
        options = {key: value for name, on in row.items() if on for key, value in FEATURES[name].items()}
        if sum(map(bool, row.values())) > 1:
            made.append(options | ({"packed": True} if row.get("trees") == "packed" else {}))
    return made


def batch_for(op: str) -> paged_loop.Batch:
    """Sequences that begin alike, one of them idle; those of latent caches have one KV head, whose keys hold values."""
    lens, q_lens = (29, 13, 0, 11), (5, 3, 0, 5)
    if op in DECODING:
        lens, q_lens = (29, 13, 9, 11), (1, 1, 1, 1)
    if op == "prefill_page_attention":
        lens, q_lens = (29,), (5,)
    batch = paged_loop.make(lens, q_lens, heads=(4, 1) if op in LATENT else (4, 2), d=8, seed=zlib.crc32(op.encode()))
    keys, values = ([_begins(x, all_[0]) for x in all_] for all_ in (batch.keys, batch.values))
    return dataclasses.replace(batch, keys=keys, values=[x[..., :5] for x in keys] if op in LATENT else values)


def _begins(tokens: np.ndarray, first: np.ndarray) -> np.ndarray:
    count = min(PREFIX, len(tokens))
    return np.concatenate([first[:count], tokens[count:]])


def latent_arguments(paged: Paged) -> list:
    """Arguments of the operations on latent caches: 5 of the 8 numbers of a key are the latent vector."""
    paged = dataclasses.replace(paged, written=False)
    rows = paged.cache(paged.batch.keys)[:, :, 0]
    cache = np.zeros((*rows.shape[:2], 1, 256))
    cache[:, :, 0, :5], cache[:, :, 0, 128:131] = rows[..., :5], rows[..., 5:]
    query, new = paged.queries, paged.news(paged.batch.keys)[:, 0]
    ends = np.array([0, 0, len(paged.lens)], np.int32)
    arrays = [query[..., :5], query[..., 5:], new[:, :5], new[:, 5:], cache, paged.lens, paged.tables().reshape(-1)]
    return [paged_calls.cast(x, paged.dtype) for x in (*arrays, paged.starts, ends)]


def call(op: str, paged: Paged, platform: str = "xla", **options):
    """A function of the arguments of an operation, and these."""
    if options.pop("packed", False):
        tables = zip(options["qq_bias"], paged.batch.queries, strict=True)
        options["qq_bias"] = np.concatenate([table[: len(q), : len(q)].ravel() for table, q in tables])
    if op in LATENT:
        given = {ARGUMENTS[name]: jnp.asarray(x) if name in paged_calls.ARRAYS else x for name, x in options.items()}
        return lambda *x: getattr(ej, op)(*x, **given, platform=platform), latent_arguments(paged)
    optional, given = paged_calls.keywords(op, paged, options)
    if platform == "xla":
        given["cfg"] = paged_calls.tiles(op, 3, 5, 2)
    return lambda *x: getattr(ej, op)(*x, *optional, **given, platform=platform), paged_calls.arguments(op, paged)


def loop_options(op: str, options: dict) -> dict:
    """Options as the loop takes them."""
    options = {name: value for name, value in options.items() if name not in ("prefix", "packed")}
    if op == "prefill_page_attention" and "qq_bias" in options:
        options["qq_bias"] = options["qq_bias"][0]
    return options


def check_pairs(op: str, dtype: Any, platform: str, **tolerance: float) -> None:
    """Holds the output and lse of every pair of features of an operation against the loop's."""
    batch = batch_for(op)
    for options in combinations(op):
        given = dict(options)
        if op == "prefill_page_attention":
            given = loop_options(op, given)
        if op != "decode_attention":
            given["lse"] = True
        run, arrays = call(op, Paged(batch, dtype=dtype, prefix=options.get("prefix", 0)), platform, **given)
        output, *rest = jax.jit(run, compiler_options=paged_calls.QUICK)(*arrays)
        results = paged_loop.attend(batch, **loop_options(op, options))
        want, lse = (np.concatenate(x) for x in zip(*results, strict=True))
        message = f"{op}: {', '.join(options)}"
        np.testing.assert_allclose(output, want, **tolerance, err_msg=message)
        if op != "decode_attention":
            np.testing.assert_allclose(rest[0], lse, **tolerance, err_msg=message)
