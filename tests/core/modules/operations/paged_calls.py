"""A `paged_loop.Batch` as calls of the operations: sequences cut into pages that lie anywhere in a cache.

Slots that hold no token are NaN, and table entries past a sequence's length are 0 (another sequence's page), -1 or far
outside of the cache: an operation that reads what it should not, shows it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from paged_loop import Batch

import ejkernel.modules as ej
from ejkernel.modules import FwdParams
from ejkernel.modules.operations import configs

QUICK = {"xla_backend_optimization_level": "0"}
OPS = (
    "page_attention",
    "decode_attention",
    "ragged_decode_attention",
    "prefill_page_attention",
    "unified_attention",
    "chunked_prefill_paged_decode",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
)
DECODING = OPS[:3]
PACKED = OPS[4:]

CONFIGS = {
    "page_attention": configs.PageAttentionConfig,
    "decode_attention": configs.DecodeAttentionConfig,
    "prefill_page_attention": configs.PrefillPageAttentionConfig,
    "unified_attention": configs.UnifiedAttentionConfig,
    "chunked_prefill_paged_decode": configs.ChunkedPrefillPagedDecodeConfig,
    "ragged_page_attention_v2": configs.RaggedPageAttentionv2Config,
    "ragged_page_attention_v3": configs.RaggedPageAttentionv3Config,
}


def tiles(op: str, queries: int, keys: int, stack: int) -> Any:
    """A configuration with these tiles."""
    sizes = {"q_blocksize": queries, "kv_blocksize": keys, "seq_blocksize": stack}
    if op == "ragged_decode_attention":
        return configs.RaggedDecodeAttentionConfig(fwd_params=FwdParams(**sizes))
    return CONFIGS[op](**sizes)


@dataclasses.dataclass(frozen=True)
class Paged:
    """A batch in pages of `slots` tokens, with tables of `entries` pages.

    The first `prefix` tokens of all sequences lie in the pages of the first; other tables have no such pages.
    """

    batch: Batch
    slots: int = 4
    entries: int | None = None
    dtype: Any = jnp.float32
    written: bool = True
    prefix: int = 0

    @property
    def lens(self) -> np.ndarray:
        return np.array([len(key) for key in self.batch.keys], np.int32)

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.batch.queries)]).astype(np.int32)

    @property
    def pages(self) -> int:
        return int(sum(-(-self.lens // self.slots))) + 2

    def tables(self) -> np.ndarray:
        used = -(-self.lens // self.slots)
        entries = self.entries or max(1, *used)
        order = iter(np.random.default_rng(5).permutation(self.pages))
        tables = np.array([0, -1, self.pages + 3])[np.arange(len(used) * entries) % 3].reshape(-1, entries)
        for row, count in zip(tables, used, strict=True):
            row[:count] = [next(order) for _ in range(count)]
        tables[1:, : self.prefix // self.slots] = -1
        return tables.astype(np.int32)

    def cache(self, tokens: list[np.ndarray]) -> np.ndarray:
        """[P, S, Hk, n]; without the tokens of the queries where the call is to write them."""
        cache = np.full((self.pages, self.slots, *tokens[0].shape[1:]), np.nan)
        for n, (row, sequence, query) in enumerate(zip(self.tables(), tokens, self.batch.queries, strict=True)):
            first, end = self.prefix if n else 0, len(sequence) if self.written else len(sequence) - len(query)
            for position, token in enumerate(sequence[first:end], first):
                cache[row[position // self.slots], position % self.slots] = token
        return cache

    def news(self, tokens: list[np.ndarray]) -> np.ndarray:
        """The tokens of the query rows, [T, Hk, n]."""
        pairs = zip(tokens, self.batch.queries, strict=True)
        return np.concatenate([sequence[len(sequence) - len(query) :] for sequence, query in pairs])

    @property
    def queries(self) -> np.ndarray:
        return np.concatenate(self.batch.queries)


def combined(paged: Paged) -> np.ndarray:
    """[P, S, 2 * Hk, D]."""
    keys, values = paged.cache(paged.batch.keys), paged.cache(paged.batch.values)
    return np.stack((keys, values), axis=3).reshape(*keys.shape[:2], -1, keys.shape[3])


def arguments(op: str, paged: Paged) -> list[np.ndarray]:
    """Positional arguments without the optional ones."""
    return [cast(x, paged.dtype) for x in _MAKERS[op](paged)]


def cast(x: Any, dtype: Any) -> Any:
    """An array, of this dtype if it has floating numbers."""
    return jnp.asarray(x, dtype) if np.issubdtype(np.asarray(x).dtype, np.floating) else jnp.asarray(x)


def _page(paged: Paged) -> list[Any]:
    caches = [paged.cache(tokens) for tokens in (paged.batch.keys, paged.batch.values)]
    return [paged.queries, *caches, paged.lens, paged.tables()]


def _decode(paged: Paged) -> list[Any]:
    query, *caches, lens, tables = _page(paged)
    return [query, *(cache.reshape(-1, *cache.shape[2:]) for cache in caches), tables, lens]


def _dense(paged: Paged) -> list[Any]:
    longest = max(paged.lens) + 3
    rows = [
        np.stack([np.pad(x, ((0, longest - len(x)), (0, 0), (0, 0)), constant_values=np.nan) for x in tokens])
        for tokens in (paged.batch.keys, paged.batch.values)
    ]
    return [paged.queries, *rows, np.zeros_like(paged.lens), paged.lens]


def _prefill(paged: Paged) -> list[Any]:
    query, *caches, lens, tables = _page(paged)
    return [query, *(cache.transpose(2, 0, 1, 3) for cache in caches), lens, tables[0]]


def _unified(paged: Paged) -> list[Any]:
    return [*_page(paged), paged.starts]


def _chunked(paged: Paged) -> list[Any]:
    query, *rest = _unified(dataclasses.replace(paged, written=False))
    return [query, paged.news(paged.batch.keys), paged.news(paged.batch.values), *rest]


def _v2(paged: Paged) -> list[Any]:
    return [paged.queries, combined(paged), paged.lens, paged.tables(), paged.starts, np.int32(len(paged.lens))]


def _v3(paged: Paged) -> list[Any]:
    rows = combined(dataclasses.replace(paged, written=False))
    lanes = -(-rows.shape[3] // 128) * 128
    rows = np.pad(rows, ((0, 0), (0, 0), (0, 0), (0, lanes - rows.shape[3])), constant_values=np.nan)
    pack = max(1, 4 // jnp.dtype(paged.dtype).itemsize)
    cache = rows.reshape(*rows.shape[:2], -1, pack, lanes)
    distribution = np.array([0, 0, len(paged.lens)], np.int32)
    news = paged.news(paged.batch.keys), paged.news(paged.batch.values)
    return [paged.queries, *news, cache, paged.lens, paged.tables().reshape(-1), paged.starts, distribution]


_LAYOUTS = {"page_attention": "pshd", "prefill_page_attention": "hpsd"}


def layout(op: str) -> dict[str, str]:
    """The keyword that names the layout of the caches among `arguments`, whose shapes may allow several."""
    return {"kv_layout": _LAYOUTS[op]} if op in _LAYOUTS else {}


_MAKERS: dict[str, Callable[[Paged], list[Any]]] = {
    "page_attention": _page,
    "decode_attention": _decode,
    "ragged_decode_attention": _dense,
    "prefill_page_attention": _prefill,
    "unified_attention": _unified,
    "chunked_prefill_paged_decode": _chunked,
    "ragged_page_attention_v2": _v2,
    "ragged_page_attention_v3": _v3,
}


NAMES = {
    "scale": "softmax_scale",
    "window": "sliding_window",
    "cap": "logits_soft_cap",
    "causal": "causal",
    "chunk": "chunk_size",
    "prefix": "shared_prefix",
    "k_scale": "k_scale",
    "v_scale": "v_scale",
    "lse": "return_lse",
}
"""Option of `paged_loop.attend`, or of a call -> the argument of every operation that takes it."""

ARRAYS = {"sinks": "softmax_aux", "alibi": "alibi_slopes", "qq_bias": "qq_bias"}
"""The same for arrays."""


def keywords(op: str, paged: Paged, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The options of `paged_loop.attend` as optional positional arguments and keywords of an operation."""
    given = {NAMES[name]: value for name, value in options.items() if name in NAMES}
    given |= layout(op)
    window = given.get("sliding_window")
    if op == "ragged_decode_attention" and isinstance(window, int):
        given["sliding_window"] = (window - 1, 0)
    if op == "decode_attention":
        given["page_size"] = paged.slots
    if op == "ragged_page_attention_v3":
        given.setdefault("softmax_scale", None)
    extra = {name: cast(options[name], jnp.float32) for name in ARRAYS if name in options}
    slots = {"unified_attention": ("alibi", "qq_bias", "sinks"), "chunked_prefill_paged_decode": ("alibi", "sinks")}
    positional = () if op in ("page_attention", "decode_attention", "prefill_page_attention") else ("sinks",)
    positional = slots.get(op, positional)
    given |= {ARRAYS[name]: array for name, array in extra.items() if name not in positional}
    return [extra.get(name) for name in positional], given


def run(op: str, paged: Paged, *, cfg: Any = None, **options: Any) -> Any:
    """What the operation returns, on XLA."""
    optional, given = keywords(op, paged, options)
    call = jax.jit(lambda *x: getattr(ej, op)(*x, *optional, **given, platform="xla", cfg=cfg), compiler_options=QUICK)
    return call(*arguments(op, paged))


def output(op: str, paged: Paged, **options: Any) -> np.ndarray:
    """The output alone, [T, H, Dv]."""
    returned = run(op, paged, **options)
    return np.asarray(returned[0] if isinstance(returned, tuple) else returned)
