"""ejkernel's TPU kernels as workloads that a profile can build by name, in the shapes of `_tpu_peers.py`."""

import dataclasses
import functools
import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl  # noqa: TID251 - a step reads a table
from jax.sharding import PartitionSpec

from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.modules import (
    all_gather_matmul,
    causal_conv1d,
    flash_attention,
    fused_cross_entropy,
    gated_delta_rule,
    gated_grouped_matmul,
    gated_linear_attention,
    grouped_matmul,
    kernel_delta_attention,
    lightning_attention,
    lightning_indexer,
    mla_decode,
    multi_latent_ragged_page_attention,
    native_sparse_attention,
    quantized_matmul,
    ragged_gated_delta_rule,
    ragged_page_attention_v2,
    ragged_page_attention_v2_turboquant,
    reduce_scatter_matmul,
    ring_attention,
    rwkv7,
    state_space_v1,
    token_sparse_attention,
)
from ejkernel.planning.quantized_formats import make_format
from ejkernel.types import MaskInfo
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, launch
from ejkernel_pallas.tpu.profile import Workload
from ejkernel_pallas.tpu.token_sparse_attention import config as whole_tiles_config
from ejkernel_pallas.tpu.token_sparse_attention import forward as whole_tiles
from ejkernel_pallas.tpu.token_sparse_attention_union import config as union_config
from ejkernel_pallas.tpu.token_sparse_attention_union import forward as union

HEADS, LENGTH, SIZE = 8, 4096, 128
FORWARD = 4 * HEADS * LENGTH**2 * SIZE / 2


def attention(gradient: bool = False, has_slopes: bool = False) -> Workload:
    """Flash attention, causal, with the tiles that the chip gets by default; with the gradients of its sum, and with a
    slope per head by `score_mod`.
    """
    slopes = jnp.exp2(-8.0 * (jnp.arange(HEADS) + 1) / HEADS)

    def decay(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (k - q)

    def forward(query: Any, key: Any, value: Any) -> Any:
        options = {"score_mod": decay} if has_slopes else {}
        return flash_attention(query, key, value, causal=True, platform="pallas", **options)

    def both(*arrays: Any) -> Any:
        return jax.grad(lambda arrays: forward(*arrays).astype(jnp.float32).sum())(arrays)

    array = jax.ShapeDtypeStruct((1, LENGTH, HEADS, SIZE), jnp.bfloat16)
    args, size = (array, array, array), HEADS * LENGTH * SIZE * 2
    if gradient:
        return Workload(function=both, args=args, flops=3.5 * FORWARD, min_hbm_bytes=12 * size)
    return Workload(function=forward, args=args, flops=FORWARD, min_hbm_bytes=4 * size)


def masked_attention(mask: str, by_function: bool) -> Workload:
    """Flash attention of a window of 1024 keys, or of causal documents of 300 to 1100 tokens, by the argument for it or
    by `mask_mod`.
    """
    ends = np.cumsum([700, 300, 1100, 500, 900, 596])
    documents = np.searchsorted(ends, np.arange(LENGTH), side="right").astype(np.int32)[None]

    def by_argument(query: Any, key: Any, value: Any, ids: Any) -> Any:
        if mask == "causal":
            return flash_attention(query, key, value, causal=True, platform="pallas")
        if mask == "window":
            return flash_attention(query, key, value, sliding_window=(1023, 0), platform="pallas")
        info = MaskInfo.from_segments(ids, ids)
        return flash_attention(query, key, value, mask_info=info, causal=True, platform="pallas")

    def by_mask_mod(query: Any, key: Any, value: Any, ids: Any) -> Any:
        def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            if mask == "documents":
                return (ids[b, q] == ids[b, k]) & (k <= q)
            return (k <= q) & (q - k < (1024 if mask == "window" else LENGTH))

        return flash_attention(query, key, value, mask_mod=mask_mod, platform="pallas")

    lengths = np.diff(ends, prepend=0) if mask == "documents" else np.array([LENGTH])
    reach = 1024 if mask == "window" else LENGTH
    pairs = sum(np.minimum(np.arange(n) + 1, reach).sum() for n in lengths)
    array = jax.ShapeDtypeStruct((1, LENGTH, HEADS, SIZE), jnp.bfloat16)
    return Workload(
        function=by_mask_mod if by_function else by_argument,
        args=(array, array, array, documents),
        flops=4 * HEADS * SIZE * float(pairs),
        min_hbm_bytes=4 * HEADS * LENGTH * SIZE * 2,
    )


def selected_blocks(dense: bool = False, gradient: bool = False) -> Workload:
    """The selected branch of native sparse attention as in its paper: 16 query heads of one KV head, 16 blocks of 64
    keys per query, its own and random ones before; or dense causal attention of the same arrays.
    """
    tokens, heads, block, listed = 16384, 16, 64, 16

    def forward(query: Any, key: Any, value: Any, indices: Any) -> Any:
        if dense:
            return flash_attention(query, key, value, causal=True, platform="pallas")
        return native_sparse_attention(
            query, key, value, block_indices=indices, block_counts=listed, block_size=block, platform="pallas"
        )

    def both(*args: Any) -> Any:
        return jax.grad(lambda arrays: forward(*arrays, args[3]).astype(jnp.float32).sum())(args[:3])

    own = np.arange(tokens)[:, None] // block
    order = np.random.default_rng(0).random((tokens, tokens // block))
    order = np.where(np.arange(tokens // block) < own, order, np.where(np.arange(tokens // block) == own, -1, 2))
    indices = np.argsort(order, axis=1)[:, :listed]
    indices = np.where(indices <= own, indices, -1).astype(np.int32)[None, :, None]
    query, key = (jax.ShapeDtypeStruct((1, tokens, n, SIZE), jnp.bfloat16) for n in (heads, 1))
    pairs = tokens**2 / 2 if dense else np.minimum((indices >= 0).sum() * block, tokens**2 / 2)
    factor = 3.5 if gradient else 1
    size = 2 * tokens * SIZE * (2 * heads + 2) * (2.5 if gradient else 1)
    function = both if gradient else forward
    return Workload(
        function=function, args=(query, key, key, indices), flops=4 * factor * pairs * heads * SIZE, min_hbm_bytes=size
    )


def ring(devices: int, kv_heads: int = HEADS, gradient: bool = False) -> Workload:
    """Ring attention, causal, 4096 tokens a device; with the gradients of its sum."""
    spec = PartitionSpec(None, "sp")
    spread: dict[str, Any] = {"in_specs": (spec,) * 3, "out_specs": spec, "axis_name": "sp"}

    def forward(query: Any, key: Any, value: Any) -> Any:
        mesh: Any = jax.sharding.get_abstract_mesh()
        return ring_attention(query, key, value, causal=True, mesh=mesh, platform="pallas", **spread)

    def both(*arrays: Any) -> Any:
        return jax.grad(lambda arrays: forward(*arrays).astype(jnp.float32).sum())(arrays)

    query, key = (jax.ShapeDtypeStruct((1, LENGTH * devices, n, SIZE), jnp.bfloat16) for n in (HEADS, kv_heads))
    function, products, passes = (both, 3.5, 3) if gradient else (forward, 1, 1)
    return Workload(
        function=function,
        args=(query, key, key),
        flops=products * FORWARD * devices,  # of one device: the square of the whole length, shared among them
        min_hbm_bytes=passes * 4 * LENGTH * SIZE * (HEADS + kv_heads),
        mesh_axes={"sp": devices},
        partition_specs=(spec, spec, spec),
    )


def collective(kind: str, devices: int = 4, tokens: int = 4096, width: int = 4096, features: int = 14336) -> Workload:
    """A product of a feed-forward over devices; its sizes are those of Llama 3 8B."""
    rows, columns = PartitionSpec("tp"), PartitionSpec(None, "tp")

    def gather(x: Any, y: Any) -> Any:
        mesh: Any = jax.sharding.get_abstract_mesh()
        return all_gather_matmul(x, y, "tp", mesh=mesh, platform="pallas")

    def scatter(x: Any, y: Any) -> Any:
        mesh: Any = jax.sharding.get_abstract_mesh()
        return reduce_scatter_matmul(x, y, "tp", mesh=mesh, platform="pallas")

    def gradient(y: Any, x: Any) -> Any:
        return jax.grad(lambda y: gather(x, y).astype(jnp.float32).sum())(y)

    function, shapes, specs = {
        "all-gather": (gather, ((tokens, width), (width, features)), (rows, columns)),
        "reduce-scatter": (scatter, ((tokens, features), (width, features)), (columns, columns)),
        "gradient of the weight": (gradient, ((width, features), (tokens, width)), (columns, rows)),
    }[kind]
    elements = (tokens * width + width * features + tokens * features) // devices
    return Workload(
        function=function,
        args=tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
        flops=2 * tokens * width * features / devices,
        min_hbm_bytes=2 * elements,
        mesh_axes={"tp": devices},
        partition_specs=specs,
    )


def convolution(gradient: bool = False) -> Workload:
    """The short convolution of 8192 tokens and 4096 channels with SiLU; with the gradients of its sum."""
    tokens, channels, width = 8192, 4096, 4
    x = jax.ShapeDtypeStruct((1, tokens, channels), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((channels, width), jnp.float32)
    bias = jax.ShapeDtypeStruct((channels,), jnp.float32)

    def forward(x: Any, weight: Any, bias: Any) -> Any:
        return causal_conv1d(x, weight, bias, activation="silu", platform="pallas")

    args, operations, size = (x, weight, bias), 2.0 * width * tokens * channels, 2 * tokens * channels
    made = _with_gradient(forward, args, operations, size, gradient)
    # Nothing of the forward pass is kept for its gradients, so XLA leaves it out.
    return dataclasses.replace(made, flops=2 * operations, min_hbm_bytes=3 * size) if gradient else made


def convolution_steps(tokens: int = 1, sequences: int = 64) -> Workload:
    """Decode steps of the convolution in slots: 4096 channels, 4 weights, `tokens` tokens of each sequence."""
    channels, width, slots, total = 4096, 4, 2 * sequences, tokens * sequences
    x = jax.ShapeDtypeStruct((1, total, channels), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((channels, width), jnp.float32)
    bias = jax.ShapeDtypeStruct((channels,), jnp.float32)
    held = jax.ShapeDtypeStruct((slots, channels, width - 1), jnp.bfloat16)
    starts = (np.arange(sequences + 1) * tokens).astype(np.int32)
    indices = np.random.default_rng(0).permutation(slots)[:sequences].astype(np.int32)

    def function(*args: Any) -> Any:
        *fields, indices = args
        options: Any = {"state_indices": indices, "activation": "silu", "return_state": True, "platform": "pallas"}
        return causal_conv1d(*fields, **options)

    size = 2 * 2 * channels * (total + sequences * (width - 1))
    args = (x, weight, bias, held, starts, indices)
    return Workload(function=function, args=args, flops=2.0 * total * channels * width, min_hbm_bytes=size)


def scan(gradient: bool = False) -> Workload:
    """The selective scan of 8192 tokens, 2048 channels and 16 numbers a state; with the gradients of its sum."""
    tokens, channels, size = 8192, 2048, 16
    wide = jax.ShapeDtypeStruct((1, tokens, channels), jnp.bfloat16)
    narrow = jax.ShapeDtypeStruct((1, tokens, size), jnp.bfloat16)
    decay = jax.ShapeDtypeStruct((channels, size), jnp.float32)
    skip = jax.ShapeDtypeStruct((channels,), jnp.float32)

    def forward(x: Any, decay: Any, write: Any, read: Any, skip: Any, step: Any) -> Any:
        return state_space_v1(x, decay, write, read, skip, step, platform="pallas")[0]

    operations = 6.0 * tokens * channels * size
    return _with_gradient(
        forward, (wide, decay, narrow, narrow, skip, wide), operations, 2 * tokens * channels, gradient
    )


def _with_gradient(forward: Any, args: tuple[Any, ...], flops: float, output: int, gradient: bool) -> Workload:
    """A workload of a function, or of the gradients of its sum, whose forward pass then runs too."""
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in args)
    if not gradient:
        return Workload(function=forward, args=args, flops=flops, min_hbm_bytes=size + output)

    def both(*arrays: Any) -> Any:
        return jax.grad(lambda arrays: forward(*arrays).astype(jnp.float32).sum())(arrays)

    return Workload(function=both, args=args, flops=3 * flops, min_hbm_bytes=3 * size + 2 * output)


def recurrence(kind: str, gradient: bool = False) -> Workload:
    """A linear recurrence over 8192 tokens of 16 heads with 128 by 128 states; with the gradients of its sum.

    RWKV-7 has 32 heads with 64 by 64 states, as its model of 1.5 billion parameters. Useful operations are those of the
    formula: each token reads the state and writes to it, RWKV-7's twice.
    """
    tokens, (heads, size) = 8192, (32, 64) if kind == "RWKV-7" else (16, SIZE)
    wide = jax.ShapeDtypeStruct((1, tokens, heads, size), jnp.bfloat16)
    by_head = jax.ShapeDtypeStruct((1, tokens, heads), jnp.float32)
    by_channel = jax.ShapeDtypeStruct((1, tokens, heads, size), jnp.float32)

    def lightning(query: Any, key: Any, value: Any) -> Any:
        return lightning_attention(query, key, value, layer_idx=0, num_layers=24, platform="pallas")

    def gated(query: Any, key: Any, value: Any, g: Any) -> Any:
        return gated_linear_attention(query, key, value, g, platform="pallas")

    def delta(query: Any, key: Any, value: Any, beta: Any, decay: Any) -> Any:
        rule = kernel_delta_attention if decay.ndim == 4 else gated_delta_rule
        return rule(query, key, value, beta, decay, platform="pallas")

    def low_rank(r: Any, k: Any, v: Any, w: Any, a: Any, b: Any) -> Any:
        return rwkv7(r, w, k, v, a, b, platform="pallas")

    rules: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "lightning": (lightning, ()),
        "a gate a head": (gated, (by_head,)),
        "a gate a channel": (gated, (by_channel,)),
        "gated delta rule": (delta, (by_head, by_head)),
        "KDA": (delta, (by_head, by_channel)),
        "RWKV-7": (low_rank, (by_channel, wide, wide)),
    }
    rule, gates = rules[kind]
    args = (wide, wide, wide, *gates)

    def forward(*arrays: Any) -> Any:
        return jax.tree.leaves(rule(*arrays))[0]

    def both(*arrays: Any) -> Any:
        sum_of = lambda arrays: forward(*arrays).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(sum_of)(arrays)

    inputs = sum(math.prod(x.shape) * x.dtype.itemsize for x in args)
    output = tokens * heads * size * 2
    flops = (8.0 if kind == "RWKV-7" else 4.0) * tokens * heads * size * size
    if gradient:
        return Workload(function=both, args=args, flops=3 * flops, min_hbm_bytes=3 * inputs + 2 * output)
    return Workload(function=forward, args=args, flops=flops, min_hbm_bytes=inputs + output)


def recurrent_steps(kind: str, tokens: int = 1, sequences: int = 64) -> Workload:
    """Decode steps of a recurrence in slots: 16 heads with 128 by 128 states of 64 sequences, `tokens` tokens each.

    The bound is of the bytes of the states, read once and written once.
    """
    heads, slots, total = 16, 2 * sequences, tokens * sequences
    wide = jax.ShapeDtypeStruct((1, total, heads, SIZE), jnp.bfloat16)
    by_head = jax.ShapeDtypeStruct((1, total, heads), jnp.float32)
    by_channel = jax.ShapeDtypeStruct((1, total, heads, SIZE), jnp.float32)
    held = jax.ShapeDtypeStruct((slots, heads, SIZE, SIZE), jnp.float32)
    starts = (np.arange(sequences + 1) * tokens).astype(np.int32)
    indices = np.random.default_rng(0).permutation(slots)[:sequences].astype(np.int32)
    decay = by_channel if kind in ("a gate a channel", "KDA") else by_head
    delta = kind in ("gated delta rule", "KDA")

    def function(query: Any, key: Any, value: Any, held: Any, starts: Any, indices: Any, decay: Any, *beta: Any) -> Any:
        if delta:
            tokens = (x[0] for x in (query, key, value, *beta, decay))
            return ragged_gated_delta_rule(*tokens, held, starts, indices, platform="pallas")
        options: Any = {"cu_seqlens": starts, "initial_state": held, "state_indices": indices, "platform": "pallas"}
        return gated_linear_attention(query, key, value, decay, **options)

    size = 2 * sequences * heads * SIZE * SIZE * 4
    args = (wide, wide, wide, held, starts, indices, decay, *([by_head] if delta else []))
    return Workload(function=function, args=args, flops=4.0 * total * heads * SIZE * SIZE, min_hbm_bytes=size)


def scan_steps(tokens: int = 1, sequences: int = 64) -> Workload:
    """Decode steps of the selective scan in slots: 4096 channels with 16 numbers, `tokens` tokens of each sequence."""
    channels, size, slots, total = 4096, 16, 2 * sequences, tokens * sequences
    wide, narrow = (jax.ShapeDtypeStruct((1, total, n), jnp.bfloat16) for n in (channels, size))
    decay = jax.ShapeDtypeStruct((channels, size), jnp.float32)
    skip = jax.ShapeDtypeStruct((channels,), jnp.float32)
    held = jax.ShapeDtypeStruct((slots, channels, size), jnp.float32)
    starts = (np.arange(sequences + 1) * tokens).astype(np.int32)
    indices = np.random.default_rng(0).permutation(slots)[:sequences].astype(np.int32)

    def function(*args: Any) -> Any:
        *fields, held, starts, indices = args
        options: Any = {"cu_seqlens": starts, "initial_state": held, "state_indices": indices, "platform": "pallas"}
        return state_space_v1(*fields, **options)[:2]

    args = (wide, decay, narrow, narrow, skip, wide, held, starts, indices)
    states = 2 * sequences * channels * size * 4
    return Workload(function=function, args=args, flops=6.0 * total * channels * size, min_hbm_bytes=states)


def pages(queries: int, page: int = 16, trees: bool = False, prefix: int = 0) -> Workload:
    """Ragged paged attention: 16 sequences with 2048 tokens in the cache, of which `queries` are new, in a tree per
    sequence if there are `trees`. The first `prefix` tokens are the same for all sequences.
    """
    sequences, length, heads, kv_heads = 16, 2048, 32, 8
    per_sequence = length // page

    def function(*args: Any) -> Any:
        *args, bias = args if trees else (*args, None)
        return ragged_page_attention_v2(*args, qq_bias=bias, shared_prefix=prefix or None, platform="pallas")

    table = np.random.default_rng(0).permutation(sequences * per_sequence).astype(np.int32)
    args = (
        jax.ShapeDtypeStruct((sequences * queries, heads, SIZE), jnp.bfloat16),
        jax.ShapeDtypeStruct((sequences * per_sequence, page, 2 * kv_heads, SIZE), jnp.bfloat16),
        np.full(sequences, length, np.int32),
        table.reshape(sequences, per_sequence),
        (np.arange(sequences + 1) * queries).astype(np.int32),
        np.array([sequences], np.int32),
        *([jax.ShapeDtypeStruct((sequences, queries, queries), jnp.float32)] if trees else []),
    )
    pairs = sequences * queries * (length - (queries - 1) / 2)
    keys = prefix + sequences * (length - prefix)
    size = 2 * SIZE * (2 * keys * kv_heads + 2 * sequences * queries * heads)
    return Workload(function=function, args=args, flops=4 * pairs * heads * SIZE, min_hbm_bytes=size)


def pages_with_term(term: str, by_function: bool, queries: int) -> Workload:
    """Ragged paged attention as in `pages`, with a window of 1024 keys, ALiBi slopes or a soft cap, by the argument for
    it or by a function of pairs; or with three documents per sequence, by a function alone.
    """
    slopes, plain = jnp.exp2(-8.0 * (jnp.arange(32) + 1) / 32), pages(queries)
    documents = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (16, 2048))), jnp.int32)

    def decay(score: Any, b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return score + slopes[h] * (k_pos - q_pos)

    arguments, functions = {
        "window": ({"sliding_window": 1024}, {"mask_mod": lambda b, h, q, k: q - k < 1024}),
        "slopes": ({"alibi_slopes": slopes}, {"score_mod": decay}),
        "documents": ({}, {"mask_mod": lambda b, h, q, k: documents[b, q] == documents[b, k]}),
        "soft cap": ({"logits_soft_cap": 20.0}, {"score_mod": lambda s, b, h, q, k: 20.0 * jnp.tanh(s / 20.0)}),
    }[term]
    options: dict[str, Any] = functions if by_function else arguments

    def function(*args: Any) -> Any:
        return ragged_page_attention_v2(*args, **options, platform="pallas")

    return dataclasses.replace(plain, function=function)


def code_pages(queries: int = 1, signs: int = SIZE, length: int = 2048, bits: int = 4) -> Workload:
    """The same sequences in a TurboQuant cache: keys and values of `bits` bits, and signs of keys if there are some."""
    sequences, heads, kv_heads, page = 16, 32, 8, 128
    per_sequence = length // page
    slots = (sequences * per_sequence, page, kv_heads)
    arrays = {"queries": ((sequences * queries, heads, SIZE), jnp.bfloat16)}
    size = SIZE * bits // 8
    arrays |= {"codes": ((*slots, size), jnp.uint8), "signs": ((*slots, signs // 8), jnp.uint8)}
    arrays |= {"norms": ((*slots, 2), jnp.bfloat16), "values": ((*slots, size), jnp.uint8)}
    arrays |= {"value norms": (slots, jnp.bfloat16)}
    matrices = (SIZE, SIZE), (signs, SIZE), (2**bits,), (2**bits,)
    args = (
        *(jax.ShapeDtypeStruct(*x) for x in arrays.values()),
        np.full(sequences, length, np.int32),
        np.random.default_rng(0).permutation(sequences * per_sequence).astype(np.int32).reshape(sequences, -1),
        (np.arange(sequences + 1) * queries).astype(np.int32),
        np.array([sequences], np.int32),
        *(jax.ShapeDtypeStruct(x, jnp.float32) for x in matrices),
    )
    pairs = sequences * queries * (length - (queries - 1) / 2)
    token = kv_heads * (2 * size + signs // 8 + 6)
    return Workload(
        function=functools.partial(ragged_page_attention_v2_turboquant, platform="pallas"),
        args=args,
        flops=2 * pairs * heads * (2 * SIZE + signs),
        min_hbm_bytes=sequences * length * token + 4 * SIZE * sequences * queries * heads,
    )


def experts(sizes: Any = None, of: str = "output") -> Workload:
    """Grouped matmul: the output, or the gradient of `"lhs"` or of `"rhs"`; 8 groups alike unless some are given."""
    m, k, n, count = 8192, 4096, 4096, 8
    groups = np.array(sizes or [m // count] * count, np.int32)

    def forward(rows: Any, matrices: Any, sizes: Any) -> Any:
        return grouped_matmul(rows, matrices, sizes, preferred_element_type=jnp.bfloat16, platform="pallas")

    def backward(rows: Any, matrices: Any, output: Any, sizes: Any) -> Any:
        if of == "lhs":
            return jax.vjp(lambda rows: forward(rows, matrices, sizes), rows)[1](output)
        return jax.vjp(lambda matrices: forward(rows, matrices, sizes), matrices)[1](output)

    rows, matrices, output = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((m, k), (count, k, n), (m, n)))
    size = 2 * (m * k + count * k * n + m * n)
    if of == "output":
        return Workload(function=forward, args=(rows, matrices, groups), flops=2 * m * n * k, min_hbm_bytes=size)
    return Workload(function=backward, args=(rows, matrices, output, groups), flops=2 * m * n * k, min_hbm_bytes=size)


def gated_experts(columns: int, contracted: int = 2048, rows: int = 512, fuse: bool = True, **options: Any) -> Workload:
    """The first product of 16 experts with a gate, `rows` rows an expert; or the plain product with twice the columns.

    Rows are as they are: a gather is XLA's, before the kernel.
    """
    count = 16
    groups = np.full(count, rows, np.int32)

    def function(lhs: Any, matrices: Any, sizes: Any) -> Any:
        if fuse:
            return gated_grouped_matmul(lhs, matrices, sizes, platform="pallas", **options)
        return grouped_matmul(lhs, matrices, sizes, preferred_element_type=jnp.bfloat16, platform="pallas")

    shapes = (count * rows, contracted), (count, contracted, 2 * columns)
    lhs, matrices = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    written = count * rows * columns * (1 if fuse else 2)
    size = 2 * (math.prod(lhs.shape) + math.prod(matrices.shape) + written)
    return Workload(
        function=function,
        args=(lhs, matrices, groups),
        flops=4 * count * rows * contracted * columns,
        min_hbm_bytes=size,
    )


def quantised(m: int, mode: str | None = "affine", bits: int | None = None, transpose: bool = False) -> Workload:
    """Quantised matmul in groups of 64, K 4096, N 14336; with no mode, weights of bfloat16 as one group."""
    k, n = 4096, 14336
    x, flops, rest = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), 2 * m * k * n, 2 * m * (k + n)
    if mode is None:

        def dense(x: Any, matrix: Any, sizes: Any) -> Any:
            return grouped_matmul(x, matrix, sizes, preferred_element_type=jnp.bfloat16, platform="pallas")

        weights, sizes = jax.ShapeDtypeStruct((1, k, n), jnp.bfloat16), np.array([m], np.int32)
        return Workload(function=dense, args=(x, weights, sizes), flops=flops, min_hbm_bytes=rest + 2 * k * n)
    form = make_format(mode, bits, 64)
    rows, columns = (n, k) if transpose else (k, n)
    scales = jax.ShapeDtypeStruct((rows, columns // 64), form.scale_dtype)
    weights = (jax.ShapeDtypeStruct((rows, form.words_per_row(columns)), jnp.uint32), scales)
    weights += (scales,) if mode == "affine" else ()

    def function(x: Any, *weights: Any) -> Any:
        options: Any = {"transpose": transpose, "group_size": 64, "bits": bits, "mode": mode, "platform": "pallas"}
        return quantized_matmul(x, *weights, **options)

    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in weights)
    return Workload(function=function, args=(x, *weights), flops=flops, min_hbm_bytes=rest + size)


def latent_pages(queries: int, heads: int, sequences: int = 16) -> Workload:
    """Latent attention over pages: sequences with 2048 tokens of 512 + 64 in the cache, of which `queries` are new."""
    length, page, tokens = 2048, 64, sequences * queries
    entries = length // page

    def function(*args: Any) -> Any:
        return multi_latent_ragged_page_attention(*args, platform="pallas")

    table = np.random.default_rng(0).permutation(sequences * entries).astype(np.int32)
    shapes = ((tokens, heads, 512), (tokens, heads, 64), (tokens, 512), (tokens, 64), (len(table), page // 2, 2, 640))
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
    lengths, starts = np.full(sequences, length, np.int32), (np.arange(sequences + 1) * queries).astype(np.int32)
    args = (*arrays, lengths, table, starts, np.array([0, 0, sequences], np.int32))
    pairs, size = tokens * (length - (queries - 1) / 2), 2 * (sequences * length * 640 + tokens * heads * (576 + 512))
    return Workload(function=function, args=args, flops=2 * pairs * heads * (576 + 512), min_hbm_bytes=size)


def latent_dense(heads: int, caches: tuple[int, ...] = (576,)) -> Workload:
    """Latent decoding over dense caches: 16 sequences with 2048 tokens of 512 + 64, in one array or in two."""

    def function(query: Any, w_kc: Any, w_vc: Any, latent: Any, *rest: Any) -> Any:
        rope, lengths = rest if len(rest) == 2 else (None, *rest)
        return mla_decode(query, latent, rope, w_kc, w_vc, lengths, platform="pallas")

    shapes = ((16, heads, 192), (512, heads, 128), (512, heads, 128), *((16, 2048, size) for size in caches))
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
    flops, size = 2 * 16 * 2048 * heads * (576 + 512), 2 * 16 * 2048 * 576
    return Workload(function=function, args=(*arrays, np.full(16, 2048, np.int32)), flops=flops, min_hbm_bytes=size)


def linear_cross_entropy(gradient: bool = False) -> Workload:
    """The loss of an output layer from hidden states: some tokens of Llama 3 with part of its vocabulary; with the
    gradients, whose kernels compute the logits again, twice.
    """
    tokens, channels, entries = 2048, 4096, 16384

    def loss(hidden: Any, head: Any, targets: Any) -> Any:
        return fused_cross_entropy(hidden=hidden, lm_head_weight=head, targets=targets, platform="pallas").loss

    shape, size = jax.ShapeDtypeStruct, jnp.bfloat16
    args = (shape((tokens, channels), size), shape((channels, entries), size), shape((tokens,), jnp.int32))
    product, arrays = 2.0 * tokens * channels * entries, 2.0 * channels * (tokens + entries)
    if gradient:
        both = jax.grad(loss, (0, 1))
        return Workload(function=both, args=args, flops=5 * product, min_hbm_bytes=2 * arrays)
    return Workload(function=loss, args=args, flops=product, min_hbm_bytes=arrays)


def selected_keys(keys: int) -> Workload:
    """The indexer of DeepSeek-V3.2: the newest 256 tokens select 2048 of all keys by 64 heads of 128."""
    queries, heads, size, selected = 256, 64, 128, 2048

    def forward(query: Any, key: Any, weights: Any, positions: Any) -> Any:
        return lightning_indexer(query, key, weights, q_positions=positions, top_k=selected, platform="pallas")

    shape = jax.ShapeDtypeStruct
    args = (
        shape((1, queries, heads, size), jnp.bfloat16),
        shape((1, keys, size), jnp.bfloat16),
        shape((1, queries, heads), jnp.float32),
        np.arange(keys - queries, keys, dtype=np.int32)[None],
    )
    pairs = queries * (keys - queries) + queries * (queries + 1) / 2
    copied = 2 * size * (queries * heads + keys) + 4 * queries * heads + 8 * queries * selected
    return Workload(function=forward, args=args, flops=2 * pairs * heads * size, min_hbm_bytes=copied)


def selected_keys_decode(keys: int, requests: int = 16, queries: int = 1, key_dtype: str = "bfloat16") -> Workload:
    """The decode step of DeepSeek-V3.2's indexer: each request selects 2048 keys in pages of 64 by 64 heads of 128."""
    heads, size, selected, slots = 64, 128, 2048, 64
    pages = requests * keys // slots
    has_scales = key_dtype != "bfloat16"

    def forward(query: Any, cache: Any, weights: Any, tables: Any, positions: Any, scales: Any = None) -> Any:
        options: dict[str, Any] = {"key_scales": scales, "block_tables": tables, "q_positions": positions}
        return lightning_indexer(query, cache, weights, **options, top_k=selected, platform="pallas")

    shape = jax.ShapeDtypeStruct
    args = (
        shape((requests, queries, heads, size), jnp.bfloat16),
        shape((pages, slots, size), key_dtype),
        shape((requests, queries, heads), jnp.float32),
        np.random.default_rng(0).permutation(pages).reshape(requests, -1).astype(np.int32),
        np.tile(np.arange(keys - queries, keys, dtype=np.int32), (requests, 1)),
        *((shape((pages, slots), jnp.float32),) if has_scales else ()),
    )
    key_bytes = size * jnp.dtype(key_dtype).itemsize + (4 if has_scales else 0)
    tokens = requests * queries
    copied = requests * keys * key_bytes + tokens * (2 * heads * size + 4 * heads + 8 * selected)
    return Workload(function=forward, args=args, flops=2.0 * tokens * keys * heads * size, min_hbm_bytes=copied)


def listed_blocks_decode(
    keys: int, requests: int = 16, queries: int = 1, blocks: int = 16, dense: bool = False, window: int | None = None
) -> Workload:
    """The decode step of native sparse attention: 64 heads of 128 and 4 KV heads, and lists of random blocks of 64 keys
    in pages of 64 or in a dense cache; with a window of the newest keys if there is one.
    """
    heads, kv_heads, size, slots, block = 64, 4, 128, 64, 64
    random = np.random.default_rng(0)

    def forward(query: Any, key: Any, value: Any, tables: Any, lists: Any, lengths: Any, gate: Any) -> Any:
        options: dict[str, Any] = {} if dense else {"kv_lens": lengths, "block_tables": tables}
        options |= {"block_indices": lists, "block_counts": blocks, "block_size": block, "platform": "pallas"}
        if window is not None:
            options |= {"window_size": window, "g_swa": gate}
        return native_sparse_attention(query, key, value, **options)

    shape, entries = jax.ShapeDtypeStruct, keys // slots
    cache = shape(((requests, keys) if dense else (requests * entries, slots)) + (kv_heads, size), jnp.bfloat16)
    order = random.random((requests, queries, kv_heads, keys // block)).argsort(axis=-1)
    args = (
        shape((requests, queries, heads, size), jnp.bfloat16),
        cache,
        cache,
        random.permutation(requests * entries).reshape(requests, -1).astype(np.int32),
        order[..., :blocks].astype(np.int32),
        np.full(requests, keys, np.int32),
        shape((requests, queries, heads), jnp.float32),
    )
    tokens, read = requests * queries, blocks * block + (window or 0)
    copied = 2 * size * (2 * tokens * heads + 2 * tokens * kv_heads * read)
    return Workload(function=forward, args=args, flops=4.0 * tokens * heads * read * size, min_hbm_bytes=copied)


def listed_keys(keys: int, latent: bool = False) -> Workload:
    """Attention of 128 queries to 2048 random keys each, in whole tiles of keys: 64 heads of 128 and 4 KV heads, or 128
    heads of one latent key of 512 + 64.
    """
    queries, listed = 128, 2048

    def forward(query: Any, key: Any, value: Any, indices: Any) -> Any:
        if latent:
            record = latent_record(query, key, indices)
            return whole_tiles.forward(record, whole_tiles_config.heuristic(record, None, "forward"))[0]
        return token_sparse_attention(query, key, value, indices, platform="pallas")

    heads, kv_heads, size, value_size = (128, 1, 576, 512) if latent else (64, 4, 128, 128)
    order = np.random.default_rng(0).random((queries, keys))
    indices = np.argsort(order, axis=1)[None, :, :listed].astype(np.int32)
    query, key = (jax.ShapeDtypeStruct((1, n, h, size), jnp.bfloat16) for n, h in ((queries, heads), (keys, kv_heads)))
    copied = 2 * (queries * heads * (size + value_size) + keys * kv_heads * (size if latent else 2 * size))
    flops = 2.0 * queries * heads * listed * (size + value_size)
    return Workload(function=forward, args=(query, key, key, indices), flops=flops, min_hbm_bytes=copied)


def latent_record(query: jax.Array, key: jax.Array, indices: jax.Array) -> TokenSparseAttention:
    """Returns a record of DeepSeek-V3.2's attention, for one of the kernels that serve it."""
    return TokenSparseAttention(query=query, key=key, indices=indices[:, :, None], softmax_scale=0.1, value_size=512)


def listed_union(keys: int, shared: float = 0.0, heads: int = 128) -> Workload:
    """Attention of 16 queries to the union of the lists of 8 of them: 128 heads of one latent key of 512 + 64. A list
    of 2048 keys has a share of the one before it, and other keys at random.

    How many keys of a group are in the union is not known to a profile, which does not have what a kernel computes in
    vectors. It reads these numbers from a table, and the kernel computes them as well.
    """
    queries, listed = 16, 2048
    lists = overlapping_lists(queries, keys, listed, shared)
    query, key = (jax.ShapeDtypeStruct((1, n, h, 576), jnp.bfloat16) for n, h in ((queries, heads), (keys, 1)))
    tiles = union_config.heuristic(latent_record(query, key, lists[None]), None, "forward")
    is_listed = np.zeros((queries // tiles.block_q, -(-keys // tiles.block_kv) * tiles.block_kv), bool)
    for n, entries in enumerate(lists):
        is_listed[n // tiles.block_q, entries] = True
    table = is_listed.reshape(-1, union_config.GROUP).sum(axis=1).astype(np.int32)

    def forward(query: Any, key: Any, indices: Any, table: Any) -> Any:
        with mock.patch.object(union, "launch", functools.partial(launch_with_counts, table)):
            return union.forward(latent_record(query, key, indices), tiles)[0]

    copied = 2 * (queries * heads * (576 + 512) + keys * 576)
    flops = 2.0 * queries * heads * listed * (576 + 512)
    return Workload(function=forward, args=(query, key, lists[None], table), flops=flops, min_hbm_bytes=copied)


def overlapping_lists(queries: int, keys: int, listed: int, shared: float) -> np.ndarray:
    """Returns lists [queries, listed] of which each has a share of the one before it, and other keys at random."""
    random = np.random.default_rng(0)
    lists = [random.permutation(keys)[:listed]]
    while len(lists) < queries:
        kept = random.permutation(lists[-1])[: int(shared * listed)]
        others = random.permutation(np.setdiff1d(np.arange(keys), kept))
        lists.append(np.concatenate([kept, others[: listed - len(kept)]]))
    return np.stack(lists).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class CountsOfTable:
    """Scalars of a step that are written to scratch memory and read from a table."""

    scratch: Any
    table: Any
    first: Any

    @property
    def shape(self) -> Any:
        return self.scratch.shape

    def __setitem__(self, n: Any, value: Any) -> None:
        self.scratch[n] = value

    def __getitem__(self, n: Any) -> Any:
        return self.table[self.first + n]


def launch_with_counts(table: Any, call: KernelCall) -> Any:
    """Launches the kernel of the union of lists with the numbers of a table."""

    def refs(counts_table: Any, **named: Any) -> Any:
        scratch, tile = named["group_counts"], pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
        first = (tile * pl.num_programs(2) + pl.program_id(2)) * scratch.shape[0]
        return call.refs(**{**named, "group_counts": CountsOfTable(scratch, counts_table, first)})

    tables = {**call.scalar_tables, "counts_table": table}
    return launch(dataclasses.replace(call, refs=refs, scalar_tables=tables, coordinate_map=lambda *x: x[:-1]))
