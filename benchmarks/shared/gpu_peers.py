"""Other libraries' attention on a GPU, for the benchmarks: those that are installed, on the shapes that they can do."""

import concurrent.futures
import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def peers(cell: Any) -> dict[str, Callable[..., Any]]:
    """Functions of query, key, value and cu_seqlens by name; those of PyTorch take all arrays and return both passes,
    ready.
    """
    found: dict[str, Callable[..., Any]] = {}
    if cell.dropout or cell.sinks:  # everyone draws other weights, and few have sinks
        return found
    if cell.pattern is not None:  # nobody else has one
        return {"torch flex": functools.partial(_flex, cell)} if importlib.util.find_spec("torch") else found
    plain = cell.soft_cap is None and cell.num_packed is None
    if plain:
        window = {} if cell.window is None else {"local_window_size": (cell.window - 1, 0)}
        found["cuDNN (jax.nn)"] = functools.partial(
            jax.nn.dot_product_attention, is_causal=cell.causal, implementation="cudnn", **window
        )
    if cell.soft_cap is None and cell.num_packed is not None and cell.window is None:
        found["cuDNN packed"] = functools.partial(_cudnn_packed, cell)
    if importlib.util.find_spec("tokamax") and cell.num_packed is None:
        for implementation in ("mosaic", "triton"):
            found[f"tokamax {implementation}"] = functools.partial(_tokamax, cell, implementation)
    if importlib.util.find_spec("torch"):
        if plain and cell.window is None:
            for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
                found[f"torch SDPA {backend.split('_')[0].lower()}"] = functools.partial(_sdpa, cell, backend)
        else:  # slow to compile
            found["torch flex"] = functools.partial(_flex, cell)
    return found


def _cudnn_packed(cell: Any, q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention  # no public function has it

    cu_seqlens = cu_seqlens[None]
    lengths = jnp.diff(cu_seqlens)
    mask = MaskType.PADDING_CAUSAL if cell.causal else MaskType.PADDING
    return dot_product_attention(
        q, k, v, None, None, lengths, lengths, cu_seqlens, cu_seqlens, scale=cell.size**-0.5, mask_type=mask
    )


def _tokamax(cell: Any, implementation: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    import tokamax

    window = {} if cell.window is None else {"local_window_size": (cell.window - 1, 0)}
    return tokamax.dot_product_attention(
        q, k, v, is_causal=cell.causal, logits_soft_cap=cell.soft_cap, implementation=implementation, **window
    )


def torch_passes(call: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> tuple[Callable[[], Any], ...]:
    """Both passes of a PyTorch function of [B, H, T, D] tensors, on [B, T, H, D] arrays."""
    import torch

    q, k, v, cotangent = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        with torch.no_grad():
            return call(q, k, v)

    def forward_and_backward() -> Any:
        output = call(*leaves)
        return [x.transpose(1, 2) for x in (output, *torch.autograd.grad(output, leaves, cotangent))]

    forward_and_backward()  # compiles, or says that it cannot
    return forward, forward_and_backward


def _sdpa(cell: Any, backend: str, arrays: tuple[jax.Array, ...]) -> tuple[Callable[[], Any], ...]:
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention

    def call(q: Any, k: Any, v: Any) -> Any:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=cell.heads != cell.kv_heads)

    return torch_passes(call, arrays)


def _flex(cell: Any, arrays: tuple[jax.Array, ...]) -> tuple[Callable[[], Any], ...]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = None
    if cell.cu_seqlens is not None:
        places = torch.arange(cell.length, device="cuda")
        ids = torch.bucketize(places, torch.from_numpy(cell.cu_seqlens[1:]).cuda(), right=True)

    def is_attended(b: Any, h: Any, q: Any, k: Any) -> Any:
        allowed = q >= k if cell.causal else q >= 0
        if cell.window is not None:
            allowed = allowed & (q - k < cell.window)
        if cell.pattern is not None:
            allowed = allowed & cell.attends(q // 128, k // 128)
        return allowed if ids is None else allowed & (ids[q] == ids[k])

    def apply_soft_cap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score if cell.soft_cap is None else cell.soft_cap * torch.tanh(score / cell.soft_cap)

    mask = create_block_mask(is_attended, None, None, cell.length, cell.length, device="cuda")
    keep_triton_cache()
    torch._dynamo.reset()  # which gives up on a function that was compiled for eight shapes
    compiled = torch.compile(flex_attention)
    score_mod = None if cell.soft_cap is None else apply_soft_cap
    call = functools.partial(compiled, score_mod=score_mod, block_mask=mask, enable_gqa=cell.heads != cell.kv_heads)
    return torch_passes(call, arrays)


def keep_triton_cache() -> None:
    """Lets PyTorch's Triton kernels have a cache folder, which jax-triton turns off for the whole process."""
    if not os.environ.get("TRITON_CACHE_DIR", "unset"):
        del os.environ["TRITON_CACHE_DIR"]


def compile_configurations_in_parallel(num_threads: int = 12) -> None:
    """Lets Triton's autotuner compile the configurations of a kernel in threads before it times them in turn."""
    from triton.runtime.autotuner import Autotuner  # noqa: TID251  the one of PyTorch's kernels

    choose = Autotuner.prune_configs

    def compile_and_choose(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        chosen = choose(self, kwargs)

        def compile_one(config: Any) -> None:
            # A configuration that does not compile fails again in the autotuner, which leaves it out.
            with contextlib.suppress(Exception):
                self.fn.run(*self.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})

        with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(compile_one, chosen))
        return chosen

    Autotuner.prune_configs = compile_and_choose
