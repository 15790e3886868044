"""The loops of this folder for `python3 -m ejkernel_conformance.random_calls run --loops tests/loops/device_loops.py`.

`LOOPS` holds, for an operation, a function of its argument record in float64 that returns the first output, NaN where a
loop says nothing; None for calls that it is not written for or takes too long for.
"""

import linear_recurrence_loop
import naive
import numpy as np
from causal_convolution_loop import causal_conv1d
from grouped_matmul_loop import grouped_matmul
from lightning_indexer_loop import lightning_indexer
from rwkv_loop import rwkv4, rwkv6, rwkv7, rwkv7_mul
from segment_pooling_loop import mean_pooling
from selective_scan_loop import state_space_v1
from token_sparse_loop import token_sparse_attention

PAIRS = 20_000
"""Pairs of a query and a key, over all heads, of which a loop takes seconds."""


def arrays(args, *names):
    """The named fields that are given."""
    given = {name: getattr(args, name, None) for name in names}
    return {name: np.asarray(x) for name, x in given.items() if x is not None}


def unassigned(output, cu_seqlens):
    """NaN for tokens of no sequence."""
    if cu_seqlens is not None:
        output[:, int(cu_seqlens[-1]) :] = np.nan
    return output


def recurrent(args):
    if args.state_indices is not None:
        return None
    names = ("query", "key", "value", "g", "g_gamma", "gk", "gv", "initial_state", "cu_seqlens")
    output, _ = linear_recurrence_loop.recurrent(
        **arrays(args, *names), reverse=args.reverse, softmax_scale=args.softmax_scale
    )
    return unassigned(output, args.cu_seqlens)


def delta(args):
    names = ("query", "key", "value", "beta", "decay", "seg_ids", "initial_state")
    options = {"use_qk_l2norm": args.use_qk_l2norm, "softmax_scale": getattr(args, "softmax_scale", None)}
    return linear_recurrence_loop.delta(**arrays(args, *names), **options)[0]


def ragged_delta(args):
    decay = None if args.decay is None else np.asarray(args.decay)
    starts, indices = np.asarray(args.query_start_loc), np.asarray(args.state_indices)
    tokens = arrays(args, "query", "key", "value", "beta")
    return linear_recurrence_loop.ragged_delta(
        **tokens, decay=decay, slots=np.asarray(args.recurrent_state), starts=starts, indices=indices
    )[0]


def rwkv(args, loop, *names):
    if args.state_indices is not None:
        return None
    given = arrays(args, *names, "initial_state", "cu_seqlens")
    output, _ = loop(**given, reverse=args.reverse, softmax_scale=args.softmax_scale)
    return unassigned(output, args.cu_seqlens)


def state_space_v2(args):
    if args.cu_seqlens is not None or args.gate is not None or args.dt_softplus:
        return None
    names = ("x", "A", "B", "C", "D", "dt", "initial_state")
    return linear_recurrence_loop.state_space(**arrays(args, *names))[0]


def selective_scan(args):
    if args.cu_seqlens is not None or args.dt_softplus:
        return None
    return state_space_v1(**arrays(args, "hidden_states", "A", "B", "C", "D", "dt", "gate", "initial_state"))[0]


def convolution(args):
    names = ("x", "weight", "bias", "initial_state", "cu_seqlens")
    return unassigned(causal_conv1d(**arrays(args, *names), activation=args.activation)[0], args.cu_seqlens)


def experts(args):
    given = arrays(args, "lhs", "rhs", "rhs_bias")
    sizes = [int(size) for size in args.group_sizes]
    return grouped_matmul(**given, group_sizes=sizes, transpose_rhs=args.transpose_rhs)


def pooling(args):
    lengths = None if args.cu_seqlens is None else np.diff(np.asarray(args.cu_seqlens)).tolist()
    chunk = 32 if args.chunk_size is None and args.x.ndim == 4 else args.chunk_size
    return mean_pooling(np.asarray(args.x), lengths, chunk)


def indexer(args):
    (b, t, h, d), s = args.query.shape, args.key.shape[1]
    if b * t * h * s > PAIRS:
        return None
    names = ("query", "key", "weights", "cum_seqlens_q", "cum_seqlens_k")
    scale = d**-0.5 if args.softmax_scale is None else args.softmax_scale
    options = {"causal": args.causal, "sliding_window": args.sliding_window}
    return lightning_indexer(**arrays(args, *names), top_k=args.top_k, softmax_scale=scale, **options)[0]


def token_sparse(args):
    (b, t, h, _), count = args.query.shape, args.indices.shape[-1]
    if b * t * h * count > PAIRS:
        return None
    names = ("query", "key", "indices", "softmax_aux")
    value = None if args.value is None else np.asarray(args.value)
    options = {"value_size": args.value_size, "softmax_scale": args.softmax_scale}
    return token_sparse_attention(**arrays(args, *names), value=value, **options)[0]


def flash(args):
    (b, t, h, _), s = args.query.shape, args.key.shape[1]
    if b * h * t * s > PAIRS:
        return None
    names = ("query", "key", "value", "bias", "softmax_aux", "cum_seqlens_q", "cum_seqlens_k")
    masks = {"mask": "_attention_mask", "q_segment_ids": "_q_segment_ids", "kv_segment_ids": "_kv_segment_ids"}
    masks |= {"q_positions": "q_positions", "kv_positions": "kv_positions"}
    info = {name: getattr(args.mask_info, field, None) for name, field in masks.items()}
    options = ("softmax_scale", "causal", "sliding_window", "logits_soft_cap")
    return naive.attention(
        naive.Call(
            **arrays(args, *names),
            **{name: np.asarray(x) for name, x in info.items() if x is not None},
            **{name: getattr(args, name) for name in options},
        )
    )


LOOPS = {
    "causal_conv1d": convolution,
    "flash_attention": flash,
    "gated_delta_rule": delta,
    "gated_linear_attention": recurrent,
    "grouped_matmul": experts,
    "kernel_delta_attention": delta,
    "lightning_indexer": indexer,
    "mean_pooling": pooling,
    "ragged_gated_delta_rule": ragged_delta,
    "recurrent_attention": recurrent,
    "rwkv4": lambda args: rwkv4(**arrays(args, "w", "u", "k", "v", "state"))[0],
    "rwkv6": lambda args: rwkv(args, rwkv6, "r", "k", "v", "w", "u"),
    "rwkv7": lambda args: rwkv(args, rwkv7, "r", "w", "k", "v", "a", "b"),
    "rwkv7_mul": lambda args: rwkv(args, rwkv7_mul, "r", "w", "k", "v", "kk", "a"),
    "state_space_v1": selective_scan,
    "state_space_v2": state_space_v2,
    "token_sparse_attention": token_sparse,
}
