"""Kernels of flash-linear-attention and FlashQLA for the benchmark of linear recurrences, where they are installed."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from shared.gpu_peers import keep_triton_cache

Side = Callable[[], Any]


def is_torch(made: Any) -> bool:
    """Whether it is PyTorch's."""
    while isinstance(made, (tuple, list)):
        made = made[0]
    return type(made).__module__.startswith("torch")


def synchronise() -> None:
    """Waits for PyTorch."""
    import torch

    torch.cuda.synchronize()


def peers(kind: str, record: Any) -> Iterator[tuple[str, tuple[Side, Side], int]]:
    """Name, both passes and the most bytes that the second had beside its arguments, of each that can do a kind."""
    if not importlib.util.find_spec("torch"):
        return
    keep_triton_cache()
    for name, package, call_of in (("FLA", "fla", _fla_call), ("FlashQLA", "flash_qla", _flash_qla_call)):
        if not importlib.util.find_spec(package):
            continue
        try:
            pair = _passes(call_of(kind, record.softmax_scale), kind, record)
            if pair is not None:
                yield name, pair, _most(pair[1])
        except Exception as error:  # noqa: BLE001  whatever another library fails with is its result
            print(f"<!-- {name} on {kind}: {type(error).__name__}: {str(error)[:200]} -->", flush=True)


def _most(side: Side) -> int:
    import torch

    side()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    side()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _fla_call(kind: str, scale: float) -> Callable[..., Any] | None:
    """The library's function of a kind's tensors: query, key, value, decay and, for delta rules, beta."""
    if kind == "gla":
        from fla.ops.gla import chunk_gla

        return lambda q, k, v, g: chunk_gla(q, k, v, g, scale=scale)[0]
    if kind in ("lightning", "gate a head"):
        from fla.ops.simple_gla import chunk_simple_gla

        def simple(q: Any, k: Any, v: Any, g: Any) -> Any:
            gate = {"g_gamma": g[0, 0, :, 0]} if kind == "lightning" else {"g": g[..., 0]}
            return chunk_simple_gla(q, k, v, scale=scale, **gate)[0]

        return simple
    if kind == "gated delta":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g[..., 0], beta, scale=scale)[0]
    if kind == "kda":
        from fla.ops.kda import chunk_kda

        return lambda q, k, v, g, beta: chunk_kda(q, k, v, g, beta, scale=scale)[0]
    return None


def _flash_qla_call(kind: str, scale: float) -> Callable[..., Any] | None:
    """FlashQLA's function of a kind's tensors: it has the gated delta rule alone."""
    if kind != "gated delta":
        return None
    from flash_qla import chunk_gated_delta_rule

    return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g[..., 0].contiguous(), beta, scale=scale)[0]


def _passes(call: Callable[..., Any] | None, kind: str, record: Any) -> tuple[Side, Side] | None:
    """The forward pass and both passes of a library's function on a record's arrays."""
    import torch

    if call is None:
        return None
    names = ("query", "key", "value", "decay", "beta")
    tensors = [torch.from_dlpack(getattr(record, name)) for name in names if getattr(record, name) is not None]
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    if kind == "lightning":
        leaves[3].requires_grad_(False)
    cotangent = torch.ones_like(tensors[2])

    def forward() -> Any:
        with torch.no_grad():
            return call(*tensors)

    def both() -> Any:
        return torch.autograd.grad(call(*leaves), [x for x in leaves if x.requires_grad], cotangent)

    both()
    return forward, both
