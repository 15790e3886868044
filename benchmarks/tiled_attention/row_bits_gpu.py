"""No times: the bits of rows of Hopper's dense attention in a `batch_invariant` block, and controls that must differ.

    python benchmarks/tiled_attention/row_bits_gpu.py [--seconds N] [--kinds START]

Rows of a batch are compared with those of other calls: rows alone, in reverse and twice, longer rows, chunks of a
prompt with positions, one query, and other tiles of queries. The controls are the kernels outside of the block, and
blocks of other numbers of keys. Documents of packed rows are compared with the same documents at other offsets, with
other neighbours, alone, with their tokens among those of others, and as rows without segment ids. A line says how many
of the compared numbers differ: none where bits must be equal, some in the controls. The last line says whether all are
as expected, and the exit status is 1 if not. Only kinds whose names begin with `--kinds` run, and none begins after
`--seconds`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import TiledAttention, reference
from ejkernel.ops.device import current_device
from ejkernel_pallas.gpu.hopper.tile_scheduler import num_multiprocessors
from ejkernel_pallas.gpu.tiled_attention import batch_invariant, config
from ejkernel_pallas.gpu.tiled_attention.forward import forward

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("call", "change", "outputs and lse that differ", "expected", "seconds so far")
BATCH, TOKENS, HEADS, KV_HEADS = 5, 1100, 4, 2
Change = tuple[str, TiledAttention, Any, Callable[[np.ndarray], np.ndarray], bool]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of call.

    Attributes:
        name: For the table.
        size: Head dimension.
        dtype: Dtype.
        options: Fields of the record.
        changes: The changes that are compared; None for all that do not leave the block.
        unordered: Whether positions of keys are out of order.
        documents: Lengths of the documents of a packed row, which add up to `TOKENS`; empty without segments.
        keys: Keys of a row, enough for the kernel outside of the block to split them.
    """

    name: str
    size: int
    dtype: Any
    options: dict[str, Any]
    changes: tuple[str, ...] | None = None
    unordered: bool = False
    documents: tuple[int, ...] = ()
    keys: int = TOKENS


DOCUMENTS = (300, 1, 7, 129, 400, 64, 199)
SOME = ("one row alone", "a chunk of 65", "the last query")
CONTROLS = ("control: one row outside", "control: a chunk outside")
KINDS = (
    Kind("128 causal", 128, jnp.bfloat16, {"causal": True}),
    Kind("128 full", 128, jnp.bfloat16, {}, (*SOME, CONTROLS[0]), keys=6016),
    Kind(
        "64 window, cap, sinks",
        64,
        jnp.bfloat16,
        {"sliding_window": (500, 0), "logits_soft_cap": 2.0, "softmax_aux": jnp.linspace(-1, 1, HEADS)},
        (*SOME, "other tiles of queries", CONTROLS[1]),
    ),
    Kind("128 causal, unordered keys", 128, jnp.bfloat16, {"causal": True}, SOME[:2], unordered=True),
    Kind("256 causal", 256, jnp.float16, {"causal": True}, SOME),
    Kind("64 cap", 64, jnp.float16, {"logits_soft_cap": 2.0}, SOME[:2]),
    Kind("192 and 128 causal", 192, jnp.bfloat16, {"causal": True}, SOME[1:]),
    Kind("128 packed, causal", 128, jnp.bfloat16, {"causal": True}, documents=DOCUMENTS),
    Kind("128 packed, full", 128, jnp.bfloat16, {}, documents=DOCUMENTS),
    Kind("64 packed, cap", 64, jnp.float16, {"causal": True, "logits_soft_cap": 2.0}, documents=DOCUMENTS),
    Kind(
        "64 packed, window, sinks",
        64,
        jnp.bfloat16,
        {"sliding_window": (200, 0), "softmax_aux": jnp.linspace(-1, 1, HEADS)},
        documents=DOCUMENTS,
    ),
    Kind("256 packed, causal", 256, jnp.bfloat16, {"causal": True}, documents=DOCUMENTS),
    Kind("192 and 128 packed, causal", 192, jnp.bfloat16, {"causal": True}, documents=DOCUMENTS),
)


def make_record(kind: Kind) -> TiledAttention:
    """Returns the batch."""
    rng, value_size = np.random.default_rng(0), config.VALUE_HEAD_DIMS[kind.size][0]
    shapes = (TOKENS, HEADS, kind.size), (kind.keys, KV_HEADS, kind.size), (kind.keys, KV_HEADS, value_size)
    query, key, value = (jnp.asarray(rng.normal(size=(BATCH, *x)), kind.dtype) for x in shapes)
    record = TiledAttention(query=query, key=key, value=value, softmax_scale=kind.size**-0.5, **kind.options)
    if not kind.unordered:
        return record
    positions = np.stack([rng.permutation(TOKENS) for _ in range(BATCH)])
    return dataclasses.replace(record, kv_positions=jnp.asarray(positions, jnp.int32))


def merged(kind: Kind, order: list[int], is_mixed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of documents in `order`, and the document of each; each document's in order if mixed."""
    starts = np.concatenate([[0], np.cumsum(kind.documents)])
    index = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in order])
    ids = np.repeat(np.arange(len(order)), [kind.documents[n] for n in order])
    if not is_mixed:
        return index, ids
    rng = np.random.default_rng(1)
    mixed = np.argsort(np.concatenate([np.sort(rng.random(kind.documents[n])) for n in order]))
    return index[mixed], ids[mixed]


def pack(
    record: TiledAttention,
    tokens: tuple[np.ndarray, np.ndarray],
    padding: int = 0,
    has_ids: bool = True,
) -> TiledAttention:
    """Returns one row with tokens of the batch's first row, by `merged`, after `padding` tokens."""
    index, ids = tokens
    arrays = {name: getattr(record, name)[:1, index] for name in ("query", "key", "value")}
    arrays = {
        name: jnp.pad(x, ((0, 0), (padding, 0), (0, 0), (0, 0)), constant_values=jnp.nan) for name, x in arrays.items()
    }
    ids = jnp.asarray(np.concatenate([np.full(padding, -1), ids]), jnp.int32)[None]
    packed = dataclasses.replace(record, **arrays)
    return dataclasses.replace(packed, q_segment_ids=ids, kv_segment_ids=ids) if has_ids else packed


def packed_changes(kind: Kind, record: TiledAttention, params: Any) -> Iterator[Change]:
    """Yields the same as `changes_of` of rows with other documents; bits of the packed row are compared."""
    count = len(kind.documents)

    def change(
        name: str,
        order: list[int],
        padding: int = 0,
        has_ids: bool = True,
        is_mixed: bool = False,
        params: Any = params,
    ) -> Change:
        tokens = merged(kind, order, is_mixed)
        call = pack(record, tokens, padding, has_ids)
        select = lambda x: np.concatenate([np.zeros_like(x[:, :padding]), x[:, tokens[0]]], axis=1)  # noqa: E731
        return name, call, params, select, not name.startswith("control")

    for n in (3, 4, 6):
        yield change(f"document {n} alone", [n])
    yield change("document 4 alone, without ids", [4], has_ids=False)
    if "sliding_window" not in kind.options:
        yield change("tokens of documents mixed", list(range(count)), is_mixed=True)
    yield change("in reverse", list(range(count))[::-1])
    yield change("after 13 tokens of padding", list(range(count)), padding=13)
    yield change("without the first two", list(range(2, count)))
    yield change("document 4 after 8 tokens", [1, 2, 4])
    other_tiles = dataclasses.replace(params, block_q=64 if params.block_q == 128 else 128)
    yield change("other tiles of queries", list(range(count))[1:], params=other_tiles)
    outside = dataclasses.replace(params, batch_invariant=False)
    yield change("control: document 4 alone outside", [4], params=outside)
    smaller = dataclasses.replace(params, block_kv=64 if params.block_kv == 128 else 128)
    if kind.size == 128:
        yield change("control: blocks of 64 keys", list(range(count)), params=smaller)


def rows(record: TiledAttention, index: list[int]) -> TiledAttention:
    """Returns a call of some rows of the batch."""
    arrays = {"query": record.query, "key": record.key, "value": record.value, "kv_positions": record.kv_positions}
    chosen = {name: x[np.array(index)] for name, x in arrays.items() if x is not None}
    return dataclasses.replace(record, **chosen)


def chunk(record: TiledAttention, first: int, end: int) -> TiledAttention:
    """Returns a call of the queries from `first` to before `end`."""
    part = dataclasses.replace(record, query=record.query[:, first:end])
    if not record.causal and record.sliding_window is None:
        return part
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    keys = positions if record.kv_positions is None else record.kv_positions
    return dataclasses.replace(part, q_positions=positions[:, first:end], kv_positions=keys)


def longer(record: TiledAttention) -> TiledAttention:
    """Returns a call whose rows have 300 tokens more."""
    more = {
        name: jnp.pad(getattr(record, name), ((0, 0), (0, 300), (0, 0), (0, 0)), constant_values=1)
        for name in ("query", "key", "value")
    }
    return dataclasses.replace(record, **more)


def prefix(record: TiledAttention, end: int) -> TiledAttention:
    """Returns a call of the first tokens, without positions."""
    return dataclasses.replace(record, **{x: getattr(record, x)[:, :end] for x in ("query", "key", "value")})


def changes_of(record: TiledAttention, params: Any) -> Iterator[Change]:
    """Yields what is changed, the call, its configuration, the rows of the whole call, and whether bits must be
    equal.
    """
    tokens = {"a chunk of 65": (700, 765), "the last query": (TOKENS - 1, TOKENS), "a chunk of 400": (333, 733)}
    yield "one row alone", rows(record, [3]), params, lambda x: x[3:4], True
    for name, (first, end) in tokens.items():
        yield name, chunk(record, first, end), params, lambda x, a=first, b=end: x[:, a:b], True
    yield "all queries, with positions", chunk(record, 0, TOKENS), params, lambda x: x, True
    yield "rows in reverse, twice", rows(record, [4, 3, 2, 1, 0] * 2), params, lambda x: x[[4, 3, 2, 1, 0] * 2], True
    yield "rows of 300 tokens more", longer(record), params, lambda x: x, True
    yield "the first 301 tokens", prefix(record, 301), params, lambda x: x[:, :301], True
    other_tiles = dataclasses.replace(params, block_q=64 if params.block_q == 128 else 128)
    yield "other tiles of queries", chunk(record, 333, 733), other_tiles, lambda x: x[:, 333:733], True
    outside = dataclasses.replace(params, batch_invariant=False)
    yield CONTROLS[0], rows(record, [3]), outside, lambda x: x[3:4], False
    yield CONTROLS[1], chunk(record, 700, 765), outside, lambda x: x[:, 700:765], False
    smaller = dataclasses.replace(params, block_kv=64)
    yield "control: blocks of 64 keys", rows(record, [3]), smaller, lambda x: x[3:4], False


def outputs(record: TiledAttention, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns output and lse, both [B, T, H, ...]."""

    def run(record: TiledAttention) -> tuple[jax.Array, jax.Array]:
        output, residuals = forward(record, params)
        return output.astype(jnp.float32), residuals.lse.swapaxes(1, 2)

    output, lse = jax.jit(run)(record)
    return np.asarray(output), np.asarray(lse)


def check_values(record: TiledAttention, found: tuple[np.ndarray, np.ndarray], first: int) -> None:
    """Compares a chunk of one row, or all of a packed one, with the reference."""
    is_packed = record.q_segment_ids is not None
    part = record if is_packed else rows(chunk(record, first, first + 8), [2])
    expected = jax.jit(lambda record: reference(record)[0])(part)
    output = found[0] if is_packed else found[0][2:3, first : first + 8]
    np.testing.assert_allclose(output, np.asarray(expected, np.float32), atol=2e-2)


def lines(kinds: tuple[Kind, ...], wrong: list[str], seconds: float) -> Iterator[tuple[str, ...]]:
    """Yields the lines of the table; appends what is not as expected to `wrong`."""
    begin = time.monotonic()
    for kind in kinds:
        if time.monotonic() - begin > seconds:
            wrong.append(f"{kind.name} and what follows: no time")
            return
        record = make_record(kind)
        params = batch_invariant(record, current_device(), "forward")
        changes = changes_of(record, params)
        if kind.documents:
            changes = packed_changes(kind, record, params)
            record = pack(record, merged(kind, list(range(len(kind.documents))), is_mixed=False))
        whole = {True: outputs(record, params)}
        check_values(record, whole[True], 640)
        for name, changed, changed_params, select, is_equal in changes:
            if (name in CONTROLS) if kind.changes is None else (name not in kind.changes):
                continue
            in_block = changed_params.batch_invariant
            if in_block not in whole:
                whole[in_block] = outputs(record, changed_params)
            found, expected = outputs(changed, changed_params), [select(x) for x in whole[in_block]]
            if changed.q_segment_ids is not None:  # lse of padding is minus infinity, or the sink
                output, lse = found
                found = output, np.where(np.asarray(changed.q_segment_ids)[..., None] < 0, np.float32(0), lse)
            found = tuple(x[:, : y.shape[1]] for x, y in zip(found, expected, strict=True))
            pairs = [(x.view(np.int32), y.view(np.int32)) for x, y in zip(found, expected, strict=True)]
            counts = [int((x != y).sum()) for x, y in pairs]
            if (sum(counts) == 0) != is_equal:
                wrong.append(f"{kind.name}, {name}")
            shown = ", ".join(f"{n} of {x.size}" for n, (x, _) in zip(counts, pairs, strict=True))
            yield kind.name, name, shown, "none" if is_equal else "some", f"{time.monotonic() - begin:.0f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--kinds", default="", help="the start of the names of the kinds to run")
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    wrong: list[str] = []
    kinds = tuple(kind for kind in KINDS if kind.name.startswith(options.kinds))
    print(f"{num_multiprocessors()} multiprocessors")
    shared.report.print_rows_as_measured(COLUMNS, lines(kinds, wrong, options.seconds))
    print("all as expected" if not wrong else f"not as expected: {'; '.join(wrong)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
