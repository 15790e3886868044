"""Calls drawn by chance, each beside what an independent float64 loop says of it.

A kind draws a *setting*, all that a compiled program depends on, and then any number of *draws* for it: values,
lengths, masks and tables. What no call may read is poisoned: padding and slots without tokens are NaN, entries of
tables that count for nothing are garbage.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import linear_recurrence_loop
import naive
import numpy as np
import paged_calls
import paged_loop
from causal_convolution_loop import causal_conv1d as convolution_loop
from grouped_matmul_loop import grouped_matmul as experts_loop
from paged_calls import DECODING, OPS
from segment_pooling_loop import mean_pooling as pooling_loop
from selective_scan_loop import state_space_v1 as scan_loop

import ejkernel.modules as ej
from ejkernel.modules.operations import configs
from ejkernel.types import MaskInfo

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call: its arrays, and the results that the loop has for them."""

    arrays: Arrays
    expected: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A program and the calls drawn for it.

    Attributes:
        about: What to print where a call is wrong.
        run: Arrays by name -> results, plain enough to compile.
        draws: Generator -> a call.
        differentiable: Names of the arrays whose gradients a directional difference of the loop is compared with.
        loop: Arrays -> results in float64, for that difference; None where gradients are not compared.
    """

    about: str
    run: Callable[[dict[str, jax.Array]], tuple[jax.Array, ...]]
    draws: Callable[[np.random.Generator], Draw]
    differentiable: tuple[str, ...] = ()
    loop: Callable[[Arrays], tuple[np.ndarray, ...]] | None = None


def some(rng: np.random.Generator, chance: float) -> bool:
    return bool(rng.random() < chance)


def window(rng: np.random.Generator, most: int) -> Any:
    sides = [None if some(rng, 0.2) else int(rng.integers(0, most)) for _ in range(2)]
    return int(rng.integers(1, most)) if some(rng, 0.3) else tuple(sides)


def ids(rng: np.random.Generator, rows: int, tokens: int) -> np.ndarray:
    """Segments in order with padding behind them, or in none."""
    made = rng.integers(-1, 3, size=(rows, tokens))
    return np.where(made < 0, -1, np.sort(np.maximum(made, 0), axis=1)) if some(rng, 0.5) else made


def cumulative(rng: np.random.Generator, sequences: int, total: int) -> np.ndarray:
    """Boundaries of sequences, of which some are empty, and tokens of none behind the last."""
    return np.sort([0, *rng.integers(0, total + 1, size=sequences)]).astype(np.int32)


# --- attention over dense arrays -------------------------------------------------------------------------------------


def dense(rng: np.random.Generator) -> Setting:
    """`flash_attention`, and the others that have its arguments."""
    b, t, s = int(rng.integers(1, 3)), int(rng.integers(1, 15)), int(rng.integers(1, 18))
    g, shared, d, v = (int(rng.integers(1, most)) for most in (3, 4, 10, 10))
    packed, lse, options = some(rng, 0.2), some(rng, 0.5), _dense_options(rng)
    if packed:
        b, s = (1, t) if some(rng, 0.5) else (1, s)
    extras = {name for name in ("bias", "mask", "segments", "positions", "softmax_aux") if some(rng, 0.3)}
    sizes = (b, t, s, g * shared, g, d, v)
    extras = (extras - {"positions"}) | {"packed"} if packed else extras
    pairs = tuple(1 if some(rng, 0.3) else n for n in (b, g * shared, t, s))
    tiles = {"q_blocksize": int(rng.integers(1, 9)), "kv_blocksize": int(rng.integers(1, 9))}
    passes = {"fwd_params": configs.FwdParams(**tiles), "bwd_params": configs.BwdParams(**tiles)}
    cfg = configs.FlashAttentionConfig(**passes)

    def draw(rng: np.random.Generator) -> Draw:
        arrays = _dense_arrays(rng, sizes, extras, pairs)
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        call = naive.Call(**arrays, **options)
        return (naive.attention(call), *((naive.lse(call),) if lse else ()))

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        info = {name: arrays[name] for name in ("q_positions", "kv_positions") if name in arrays}
        taken = {"_attention_mask": "mask", "_q_segment_ids": "q_segment_ids", "_kv_segment_ids": "kv_segment_ids"}
        info |= {field: arrays[name] for field, name in taken.items() if name in arrays}
        direct = ("query", "key", "value", "bias", "softmax_aux", "cum_seqlens_q", "cum_seqlens_k")
        given = {name: arrays[name] for name in direct if name in arrays}
        mask_info = MaskInfo(**info) if info else None
        found = ej.flash_attention(**given, mask_info=mask_info, return_lse=lse, cfg=cfg, **options, platform="xla")
        return found if lse else (found,)

    floating = ("query", "key", "value", *sorted(extras & {"bias"}))
    differentiable = () if "segments" in extras else floating
    return Setting(f"{sorted(extras)} {options} {sizes} {pairs} {tiles}", run, draw, differentiable, loop)


def _dense_options(rng: np.random.Generator) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": some(rng, 0.5)}
    if some(rng, 0.4):
        options["sliding_window"] = window(rng, 9)
    if some(rng, 0.3):
        options["logits_soft_cap"] = float(rng.uniform(0.5, 3))
    if some(rng, 0.3):
        options["softmax_scale"] = float(rng.uniform(0.1, 1))
    if some(rng, 0.2):
        options |= {"dropout_prob": float(rng.uniform(0.1, 0.7)), "dropout_seed": int(rng.integers(2**31))}
    return options


def _dense_arrays(rng: np.random.Generator, sizes: tuple[int, ...], extras: set[str], pairs: tuple[int, ...]) -> Arrays:
    b, t, s, h, g, d, v = sizes
    shapes = {"query": (b, t, h, d), "key": (b, s, g, d), "value": (b, s, g, v)}
    arrays: Arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if "bias" in extras:
        arrays["bias"] = rng.normal(size=pairs)
    if "softmax_aux" in extras:
        arrays["softmax_aux"] = rng.normal(size=h).astype(np.float32)
    if "mask" in extras:
        arrays["mask"] = rng.random((b, pairs[1], t, s)) < 0.7
    if "positions" in extras:
        arrays |= {"q_positions": rng.integers(0, s, (b, t)), "kv_positions": rng.integers(0, s, (b, s))}
    if "packed" in extras:
        arrays["cum_seqlens_q"] = cumulative(rng, 3, t)
        arrays["cum_seqlens_k"] = arrays["cum_seqlens_q"] if s == t else cumulative(rng, 3, s)
    if "segments" in extras:
        arrays |= {"q_segment_ids": ids(rng, b, t), "kv_segment_ids": ids(rng, b, s)}
        for name, side in (("query", "q"), ("key", "kv"), ("value", "kv")):
            arrays[name][arrays[f"{side}_segment_ids"] < 0] = np.nan
    return arrays


# --- attention over pages --------------------------------------------------------------------------------------------


def paged(rng: np.random.Generator) -> Setting:
    """All operations over pages; the draws of a setting are the same sequences in another order, with other numbers."""
    op = str(rng.choice(OPS))
    count = 1 if op == "prefill_page_attention" else int(rng.integers(1, 6))
    lens = rng.integers(0, 40, size=count)
    q_lens = np.array([min(int(n), int(rng.choice([0, 1, 1, n]))) for n in lens])
    if op in DECODING:
        q_lens = np.ones_like(lens)
        lens = np.maximum(lens, 1)
    if op == "prefill_page_attention" or not q_lens.any():
        lens[0] = max(1, lens[0])
        q_lens[0] = max(1, min(q_lens[0], lens[0]))
    g, shared, d = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 9))
    v = d if op in ("ragged_page_attention_v2", "ragged_page_attention_v3") else int(rng.integers(1, 9))
    slots, options = int(rng.integers(1, 9)), {}
    if some(rng, 0.4):
        options["window"] = int(rng.integers(1, 20))
    if some(rng, 0.3):
        options["cap"] = float(rng.uniform(0.5, 3))
    if some(rng, 0.3):
        options["scale"] = float(rng.uniform(0.1, 1))
    if some(rng, 0.4):
        options["sinks"] = rng.normal(size=g * shared).astype(np.float32).astype(np.float64)
    if some(rng, 0.3) and op in ("unified_attention", "chunked_prefill_paged_decode"):
        options["alibi"] = rng.normal(size=g * shared).astype(np.float32).astype(np.float64)
    cfg = paged_calls.tiles(op, *(int(rng.integers(1, most)) for most in (7, 12, 4)))
    entries = int(max(1, *(-(-lens // slots)))) + int(rng.integers(0, 3))
    dtype = jnp.float64

    def draw(rng: np.random.Generator) -> Draw:
        order = rng.permutation(count)
        seed = int(rng.integers(2**31))
        batch = paged_loop.make(lens[order], q_lens[order], heads=(g * shared, g), d=d, v=v, seed=seed)
        cut = paged_calls.Paged(batch, slots=slots, entries=entries, dtype=dtype)
        arrays = {f"{n}": np.asarray(x) for n, x in enumerate(paged_calls.arguments(op, cut))}
        return Draw(arrays, (paged_loop.packed(batch, **options),))

    positional, keywords = paged_calls.keywords(op, paged_calls.Paged(paged_loop.make([1], [1]), slots=slots), options)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        given = [arrays[f"{n}"] for n in range(len(arrays))]
        found = getattr(ej, op)(*given, *positional, **keywords, platform="xla", cfg=cfg)
        return (found[0] if isinstance(found, tuple) else found,)

    return Setting(f"{op} {lens} {q_lens} {options} {(g, shared, d, v, slots, entries)} {cfg}", run, draw)


# --- recurrences -----------------------------------------------------------------------------------------------------


def _sizes(rng: np.random.Generator) -> tuple[int, ...]:
    b, t, g, shared = (int(rng.integers(1, most)) for most in (3, 40, 3, 3))
    k, v = (int(rng.integers(1, 7)) for _ in range(2))
    return b, t, g * shared, g, k, v


def gated(rng: np.random.Generator) -> Setting:
    """`gla_attention` and `recurrent_attention`: gates of heads or channels, states, packing, both directions."""
    b, t, h, g, k, v = _sizes(rng)
    packed, states = some(rng, 0.3), some(rng, 0.5)
    b, sequences = (1, 3) if packed else (b, b)
    options: dict[str, Any] = {"reverse": True} if some(rng, 0.2) else {}
    gates = [name for name in ("g", "gk", "gv") if some(rng, 0.5)]
    width = {"g": (b, t, h), "gk": (b, t, h, k), "gv": (b, t, h, v)}
    cfg = configs.RecurrentAttentionConfig(block_q=int(2 ** rng.integers(0, 6)))

    def draw(rng: np.random.Generator) -> Draw:
        shapes = {"query": (b, t, h, k), "key": (b, t, g, k), "value": (b, t, g, v)}
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        arrays |= {name: -np.square(rng.normal(size=width[name])) for name in gates}
        if states:
            arrays["initial_state"] = rng.normal(size=(sequences, h, k, v))
        if packed:
            arrays["cu_seqlens"] = np.append(cumulative(rng, sequences - 1, t), t).astype(np.int32)
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        return linear_recurrence_loop.recurrent(**arrays, **options)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return ej.recurrent_attention(**arrays, **options, return_state=True, platform="xla", cfg=cfg)

    names = ("query", "key", "value", *gates, *(("initial_state",) if states else ()))
    return Setting(f"{gates} {packed} {options} {(b, t, h, g, k, v)} {cfg}", run, draw, names, loop)


def delta(rng: np.random.Generator) -> Setting:
    """`gated_delta_rule` and `kernel_delta_attention`: decay of heads or channels, segments, states."""
    b, t, h, g, k, v = _sizes(rng)
    decay = rng.choice(["none", "head", "channel"])
    segments, states = some(rng, 0.4), some(rng, 0.5)
    cfg = configs.GatedDeltaRuleConfig(chunk_size=int(2 ** rng.integers(1, 6)))
    options = {"use_qk_l2norm": True}

    def draw(rng: np.random.Generator) -> Draw:
        shapes = {"query": (b, t, h, k), "key": (b, t, g, k), "value": (b, t, g, v)}
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        arrays["beta"] = rng.random((b, t, h))
        if decay != "none":
            arrays["decay"] = -np.square(rng.normal(size=(b, t, h) if decay == "head" else (b, t, h, k)))
        if segments:
            arrays["seg_ids"] = ids(rng, b, t).astype(np.int32)
        if states:
            arrays["initial_state"] = rng.normal(size=(b, h, k, v))
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        return linear_recurrence_loop.delta(**arrays, **options)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return ej.gated_delta_rule(**arrays, **options, return_state=True, platform="xla", cfg=cfg)

    names = ("query", "key", "value", "beta", *(("decay",) if decay != "none" else ()))
    return Setting(f"{decay} {segments} {states} {(b, t, h, g, k, v)} {cfg}", run, draw, names, loop)


def ragged(rng: np.random.Generator) -> Setting:
    """`ragged_gated_delta_rule`: requests in any order, some empty, some whose slot is none."""
    _, t, h, g, k, v = _sizes(rng)
    slots, requests = int(rng.integers(2, 6)), int(rng.integers(1, 5))
    cfg = configs.RaggedGatedDeltaRuleConfig(chunk_size=int(2 ** rng.integers(1, 6)))

    def draw(rng: np.random.Generator) -> Draw:
        shapes = {"query": (t, h, k), "key": (t, g, k), "value": (t, g, v), "recurrent_state": (slots, h, k, v)}
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        arrays |= {"beta": rng.random((t, h)), "decay": -np.square(rng.normal(size=(t, h)))}
        arrays["query_start_loc"] = cumulative(rng, requests, t)
        indices = rng.permutation(slots + 2)[:requests] - 1  # -1 and one beyond the last are no slots
        arrays["state_indices"] = np.resize(indices, requests).astype(np.int32)
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        names = ("query", "key", "value", "beta", "decay", "recurrent_state", "query_start_loc", "state_indices")
        return linear_recurrence_loop.ragged_delta(*(arrays[name] for name in names))

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return ej.ragged_gated_delta_rule(**arrays, platform="xla", cfg=cfg)

    return Setting(f"{(t, h, g, k, v, slots, requests)} {cfg}", run, draw)


def _apart(
    loop: Callable[..., tuple[np.ndarray, ...]], arrays: Arrays, tokens: tuple[str, ...], state: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    """A packed call of a loop, sequence by sequence; [T, ...] of the outputs and a state of every sequence."""
    cut, bounds = {name: arrays[name] for name in tokens}, arrays["cu_seqlens"]
    rest = {name: x for name, x in arrays.items() if name not in (*tokens, "initial_state", "cu_seqlens")}
    outputs, states = [], []
    for n in range(len(bounds) - 1):
        before = arrays["initial_state"][n : n + 1] if "initial_state" in arrays else np.zeros((1, *state))
        if bounds[n] == bounds[n + 1]:
            states.append(before)
            continue
        part = {name: x[:, bounds[n] : bounds[n + 1]] for name, x in cut.items()}
        output, after = loop(**part, **rest, initial_state=before)
        outputs.append(output)
        states.append(after)
    return np.concatenate(outputs, axis=1), np.concatenate(states)


def _bounds(rng: np.random.Generator, sequences: int, tokens: int) -> np.ndarray:
    return np.append(cumulative(rng, sequences - 1, tokens), tokens).astype(np.int32)


def mamba(rng: np.random.Generator) -> Setting:
    """`state_space_v2`."""
    b, t, h, g, e, p = _sizes(rng)
    cfg, states = configs.StateSpaceV2Config(chunk_size=int(2 ** rng.integers(1, 6))), some(rng, 0.5)
    packed = some(rng, 0.4)
    b, sequences = (1, 3) if packed else (b, b)

    def draw(rng: np.random.Generator) -> Draw:
        arrays = {"x": rng.normal(size=(b, t, h, p)), "A": -np.square(rng.normal(size=h)), "D": rng.normal(size=h)}
        arrays |= {name: rng.normal(size=(b, t, g, e)) for name in "BC"} | {"dt": rng.random((b, t, h))}
        if states:
            arrays["initial_state"] = rng.normal(size=(sequences, h, p, e))
        if packed:
            arrays["cu_seqlens"] = _bounds(rng, sequences, t)
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        if packed:
            return _apart(linear_recurrence_loop.state_space, arrays, ("x", "B", "C", "dt"), (h, p, e))
        return linear_recurrence_loop.state_space(**arrays)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return ej.state_space_v2(**arrays, platform="xla", cfg=cfg)[:2]

    return Setting(f"{packed} {(b, t, h, g, e, p)} {cfg}", run, draw, ("x", "A", "B", "C", "D", "dt"), loop)


def scan(rng: np.random.Generator) -> Setting:
    """`state_space_v1`."""
    b, t, i, e = (int(rng.integers(1, most)) for most in (3, 30, 9, 5))
    states, gate, packed = some(rng, 0.5), some(rng, 0.5), some(rng, 0.4)
    b, sequences = (1, 3) if packed else (b, b)
    tokens = ("hidden_states", "B", "C", "dt", *(("gate",) if gate else ()))

    def draw(rng: np.random.Generator) -> Draw:
        arrays = {"hidden_states": rng.normal(size=(b, t, i)), "A": -np.exp(rng.normal(size=(i, e)))}
        arrays |= {name: rng.normal(size=(b, t, e)) for name in "BC"}
        arrays |= {"D": rng.normal(size=i), "dt": rng.random((b, t, i))}
        if gate:
            arrays["gate"] = rng.normal(size=(b, t, i))
        if states:
            arrays["initial_state"] = rng.normal(size=(sequences, i, e))
        if packed:
            arrays["cu_seqlens"] = _bounds(rng, sequences, t)
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        return _apart(scan_loop, arrays, tokens, (i, e)) if packed else scan_loop(**arrays)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return ej.state_space_v1(**arrays, platform="xla")[:2]

    return Setting(
        f"{packed} {(b, t, i, e)} {gate} {states}", run, draw, ("hidden_states", "A", "B", "C", "D", "dt"), loop
    )


# --- and the others --------------------------------------------------------------------------------------------------


def convolution(rng: np.random.Generator) -> Setting:
    """`causal_conv1d`."""
    b, t, c, w = (int(rng.integers(low, most)) for low, most in ((1, 3), (1, 20), (1, 6), (2, 6)))
    packed, states, bias = (some(rng, 0.5) for _ in range(3))
    b, sequences = (1, 3) if packed else (b, b)
    options = {"activation": "silu"} if some(rng, 0.5) else {}

    def draw(rng: np.random.Generator) -> Draw:
        arrays = {"x": rng.normal(size=(b, t, c)), "weight": rng.normal(size=(c, w))}
        arrays |= {"bias": rng.normal(size=c)} if bias else {}
        arrays |= {"initial_state": rng.normal(size=(sequences, c, w - 1))} if states else {}
        if packed:
            arrays["cu_seqlens"] = np.append(cumulative(rng, sequences - 1, t), t).astype(np.int32)
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        return convolution_loop(**arrays, **options)[:1]

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        found = ej.causal_conv1d(**arrays, **options, platform="xla")
        return (found[0] if isinstance(found, tuple) else found,)

    return Setting(f"{(b, t, c, w)} {packed} {states} {bias} {options}", run, draw, ("x", "weight"), loop)


def experts(rng: np.random.Generator) -> Setting:
    """`grouped_matmul`: empty groups, and rows of none behind the last, which are NaN."""
    m, k, n, e = (int(rng.integers(1, most)) for most in (40, 9, 9, 6))
    transposed, offset = some(rng, 0.3), int(rng.integers(0, e)) if some(rng, 0.3) else 0

    def draw(rng: np.random.Generator) -> Draw:
        sizes = np.diff(cumulative(rng, e, m)).astype(np.int32)
        matrices = rng.normal(size=(max(1, e - offset), n, k) if transposed else (max(1, e - offset), k, n))
        arrays = {"lhs": rng.normal(size=(m, k)), "rhs": matrices, "group_sizes": sizes}
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        sizes = [int(size) for size in arrays["group_sizes"]]
        return (experts_loop(arrays["lhs"], arrays["rhs"], sizes, offset, transpose_rhs=transposed),)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return (ej.grouped_matmul(**arrays, group_offset=offset, transpose_rhs=transposed, platform="xla"),)

    return Setting(f"{(m, k, n, e)} {transposed} {offset}", run, draw, ("lhs", "rhs"), loop)


def pooling(rng: np.random.Generator) -> Setting:
    """`mean_pooling` of whole rows, in chunks or not."""
    b, t, c = (int(rng.integers(1, most)) for most in (4, 20, 6))
    size = int(rng.integers(1, 8)) if some(rng, 0.5) else None

    def draw(rng: np.random.Generator) -> Draw:
        arrays = {"x": rng.normal(size=(b, t, c))}
        return Draw(arrays, loop(arrays))

    def loop(arrays: Arrays) -> tuple[np.ndarray, ...]:
        return (pooling_loop(arrays["x"], None, size),)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return (ej.mean_pooling(arrays["x"], chunk_size=size, platform="xla"),)

    return Setting(f"{(b, t, c)} {size}", run, draw, ("x",), loop)


KINDS: dict[str, Callable[[np.random.Generator], Setting]] = {
    made.__name__: made for made in (dense, paged, gated, delta, ragged, mamba, scan, convolution, experts, pooling)
}


def settings(kind: str, seed: int, count: int) -> Iterator[tuple[int, Setting]]:
    """The first `count` settings of a kind, each from a seed of its own: any of them can be made again alone."""
    for number in range(count):
        yield number, KINDS[kind](np.random.default_rng([seed, *kind.encode(), number]))
