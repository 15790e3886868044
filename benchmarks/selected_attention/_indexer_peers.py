"""cuDNN's kernels of the lightning indexer, for the benchmark, where `nvidia-cudnn-frontend` is installed."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax


def is_installed() -> bool:
    """Whether cuDNN's sparse attention can be imported."""
    return all(importlib.util.find_spec(name) for name in ("torch", "cudnn", "cutlass"))


def cudnn_scores(arrays: tuple[jax.Array, ...], softmax_scale: float, float8: bool) -> Callable[[], Any]:
    """Returns a call that computes the scores [B, T, S] of the newest T queries of a context, float32.

    Args:
        arrays: Queries [B, T, H, D] and keys [B, S, D] in bfloat16, weights [B, T, H] in float32.
        softmax_scale: The factor on products.
        float8: Whether queries and keys are rounded to float8_e4m3fn, with scales of 1.
    """
    import torch
    from cudnn.deepseek_sparse_attention import indexer_forward_wrapper

    query, key, weights = (torch.from_dlpack(x) for x in arrays)
    offsets = torch.full((len(query),), key.shape[1] - query.shape[1], dtype=torch.int32, device=query.device)
    key, options = key[:, :, None], {"ratio": 1, "q_causal_offsets": offsets, "sm_scale": softmax_scale}
    if float8:
        scales = {"q_scale": torch.ones_like(weights), "k_scale": torch.ones(key.shape[:3], device=key.device)}
        query, key = query.to(torch.float8_e4m3fn), key.to(torch.float8_e4m3fn)
        options |= {"precision": "fp8", "sm_scale": 1.0, **scales}
        weights = weights * softmax_scale
    call = functools.partial(indexer_forward_wrapper, query, key, weights, **options)
    return lambda: call()["scores"]


def cudnn_selection(scores: Any, top_k: int) -> Callable[[], Any]:
    """Returns a call that selects the largest scores of each row, the first of equal ones, in the order of keys.

    Args:
        scores: [B, T, S] float32, a PyTorch tensor; -inf for keys that a row may not select.
        top_k: The number of keys.
    """
    import torch
    from cudnn.deepseek_sparse_attention import indexer_top_k_wrapper

    rows, keys = scores.flatten(0, 1), scores.shape[-1]
    lengths = torch.full((len(rows),), keys, dtype=torch.int32, device=scores.device)
    call = functools.partial(indexer_top_k_wrapper, rows, lengths, top_k, deterministic=True, tie_break=1)
    return lambda: call()["indices"]
