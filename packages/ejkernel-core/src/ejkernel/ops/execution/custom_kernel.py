"""Kernels of the caller's own: subclasses of `Kernel` that name no operation, run by an `Executor`.

Such a kernel is plain JAX code with a configuration. It has `run(*args, cfg, **kwargs)` and `heuristic_cfg(invocation)`
and, where there is something to tune, `candidate_cfgs(invocation)`. The tiers are those of every call, but for tables
and the disk: an own kernel has no schema that a later process could check.
"""

from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.config.chain import ConfigSelectorChain, NoConfigError
from ejkernel.ops.config.key import ConfigKey, device_label
from ejkernel.ops.config.policy import effective
from ejkernel.ops.device import current_device
from ejkernel.ops.execution.tuner import Tuner, traced
from ejkernel.ops.fingerprint import short_hash


def run(chain: ConfigSelectorChain, kernel: Any, args: tuple[Any, ...], cfg: Any, kwargs: dict[str, Any]) -> Any:
    """Calls an own kernel with the configuration that `choose` finds."""
    args, kwargs = kernel.prepare(*args, **kwargs)
    return kernel.run(*args, cfg=choose(chain, kernel, args, cfg, kwargs), **kwargs)


def choose(chain: ConfigSelectorChain, kernel: Any, args: tuple[Any, ...], cfg: Any, kwargs: dict[str, Any]) -> Any:
    """The configuration of a call: its own, one measured earlier, one measured now, or the kernel's rule.

    Raises:
        NoConfigError: The policy allows no tier that answers.
    """
    if cfg is not None:
        chain.event("override", kernel.op_id)
        return cfg
    key = _key(kernel, args, kwargs)
    known = chain.cache.get(key)
    if known is not None:
        chain.event("cache_hit", kernel.op_id, level="memory")
        return known
    invocation, policy = kernel.invocation(args, kwargs), effective(chain.policy, chain)
    if policy.tunes_on_miss and not traced((args, kwargs)):
        best = _measured(chain, kernel, tuple(kernel.candidate_cfgs(invocation)), args, kwargs)
        if best is not None:
            chain.cache.put(key, best)
            return best
    if not policy.allow_heuristics:
        chain.event("error", kernel.op_id)
        raise NoConfigError(f"no configuration for {key}: heuristics: not allowed by the policy")
    chain.event("heuristics", kernel.op_id)
    return kernel.heuristic_cfg(invocation)


def _measured(
    chain: ConfigSelectorChain, kernel: Any, candidates: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The fastest candidate; None where there is no choice, or where none runs."""
    if len(candidates) < 2:
        return None
    chain.event("autotune_start", kernel.op_id)
    tuner = chain.tuner if isinstance(chain.tuner, Tuner) else Tuner()
    seconds: dict[int, float] = {}
    for number, candidate in enumerate(candidates):
        try:
            seconds[number] = tuner.measure(_with(kernel, candidate, kwargs), *args)
        except Exception:  # noqa: BLE001 - a candidate may exceed any limit of the device or its compiler
            continue
    best = candidates[min(seconds, key=seconds.__getitem__)] if seconds else None
    chain.event("autotune_finish", kernel.op_id, part=best)
    return best


def _with(kernel: Any, cfg: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    return jax.jit(lambda *args: kernel.run(*args, cfg=cfg, **kwargs))


def _key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ConfigKey:
    leaves, structure = jax.tree.flatten((args, kwargs))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves]
    return ConfigKey(
        op=f"{kernel.op_id}@{kernel.version}",
        implementation=f"{type(kernel).__module__}.{type(kernel).__qualname__}",
        direction="forward",
        device=device_label(current_device(next(iter(leaves), None))),
        schema="own",
        call=short_hash(f"{structure} {shapes}"),
    )


__all__ = ["choose", "run"]
