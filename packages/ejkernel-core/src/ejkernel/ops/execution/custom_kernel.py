"""Kernels of the caller's own: subclasses of `Kernel` that name no operation, run by an `Executor`.

Such a kernel is plain JAX code with a configuration. It has `run(*args, cfg, **kwargs)` and `heuristic_cfg(invocation)`
and, where there is something to tune, `candidate_cfgs(invocation)`. The tiers are those of every call, but for tables
and the disk: an own kernel has no schema that a later process could check.

A method may be written for one kind of device, for calls under `shard_map`, or for both: of `run_shard_map_gpu`,
`run_shard_map`, `run_gpu` and `run` the first that the kernel defines is called, and so it is with `heuristic_cfg`,
`candidate_cfgs`, `fwd_with_residuals` and `vjp`. The last two belong together and are the kernel's gradient:

    fwd_with_residuals(*args, cfg, **kwargs) -> (output, residuals)
    vjp(residuals, dy, *args, cfg, **kwargs) -> one gradient for each positional argument

`vjp(residuals, y, dy, *args, cfg, **kwargs)` is given the output too.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ejkernel.errors import NoConfigError
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.config.key import ConfigKey, device_label
from ejkernel.ops.config.policy import effective_policy
from ejkernel.ops.config.tuner import Tuner, is_under_trace
from ejkernel.ops.device import current_device
from ejkernel.ops.execution import custom_gradient
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.fingerprint import short_hash


def run(
    chain: ConfigSelectorChain,
    kernel: Any,
    args: tuple[Any, ...],
    cfg: Any,
    kwargs: dict[str, Any],
    mapping: Mapping[str, Any] | None = None,
) -> Any:
    """Calls an own kernel with the configuration that `choose` finds.

    Args:
        chain: The executor's chain.
        kernel: The kernel.
        args: Positional arguments.
        cfg: Configuration for this call alone, or None.
        kwargs: Keyword arguments of the kernel.
        mapping: `mesh`, `in_specs`, `out_specs` and `check_vma` of a call under `shard_map`; None without one.

    Raises:
        ValueError: One of `mesh`, `in_specs` and `out_specs` is missing.
    """
    args, kwargs = kernel.prepare(*args, **kwargs)
    cfg = choose(chain, kernel, args, cfg, kwargs, mapped=mapping is not None)
    if mapping is None:
        return _function_of_positional_arguments(kernel, cfg, kwargs, under_shard_map=False)(*args)
    for name in ("mesh", "in_specs", "out_specs"):
        if mapping.get(name) is None:
            raise ValueError(f"{name}: got None, wants a value for {kernel.op_id} under shard_map")
    if overrides_method(kernel, "create_shard_map_wrapper"):
        mapped, operands, *after = kernel.create_shard_map_wrapper(*args, **mapping, cfg=cfg, **kwargs)
        output = mapped(*operands)
        return after[0](output, cfg=cfg) if after else output
    runner = _function_of_positional_arguments(kernel, cfg, kwargs, under_shard_map=True)
    return jax.shard_map(runner, **mapping)(*args)


def overrides_method(kernel: Any, name: str) -> bool:
    """Returns whether a kernel's class defines a method itself."""
    method = getattr(type(kernel), name, None)
    return method is not None and method is not _base_methods().get(name)


def most_specific_method(kernel: Any, name: str, under_shard_map: bool = False) -> Callable[..., Any] | None:
    """Returns the kernel's method of this name that is most specific for the device and the call; None
    if it has none.
    """
    platform = current_device(None).platform
    names = [f"{name}_shard_map_{platform}", f"{name}_shard_map"] if under_shard_map else []
    return next((getattr(kernel, n) for n in (*names, f"{name}_{platform}", name) if overrides_method(kernel, n)), None)


@functools.cache
def _base_methods() -> Mapping[str, Any]:
    return {name: getattr(Kernel, name) for name in dir(Kernel)}


def _function_of_positional_arguments(
    kernel: Any, cfg: Any, kwargs: dict[str, Any], under_shard_map: bool
) -> Callable[..., Any]:
    """Returns a function of the positional arguments, with the kernel's own gradient where it has one."""
    forward, backward = (
        most_specific_method(kernel, "fwd_with_residuals", under_shard_map),
        most_specific_method(kernel, "vjp", under_shard_map),
    )
    if forward is not None and backward is not None:
        return functools.partial(custom_gradient.call, kernel.op_id, forward, backward, cfg, kwargs)
    method = most_specific_method(kernel, "run", under_shard_map)
    if method is None:
        raise NotImplementedError(f"{kernel.op_id} has no run method for {current_device(None).platform}")
    return functools.partial(method, cfg=cfg, **kwargs)


def choose(
    chain: ConfigSelectorChain,
    kernel: Any,
    args: tuple[Any, ...],
    cfg: Any,
    kwargs: dict[str, Any],
    mapped: bool = False,
) -> Any:
    """Returns the configuration of a call: its own, one measured earlier, one measured now, or the kernel's rule.

    A call under `shard_map` is not measured: its arrays are not those that the kernel sees.

    Raises:
        NoConfigError: The policy allows no tier that answers.
    """
    if cfg is not None:
        chain.report_event("override", kernel.op_id)
        return cfg
    key = _config_key(kernel, args, kwargs)
    known = chain.cache.get(key)
    if known is not None:
        chain.report_event("cache_hit", kernel.op_id, level="memory")
        return known
    invocation, policy = kernel.invocation(args, kwargs), effective_policy(chain.policy, chain)
    if policy.tunes_on_miss and not mapped and not is_under_trace((args, kwargs)):
        candidates = most_specific_method(kernel, "candidate_cfgs")
        best = _fastest_candidate(chain, kernel, tuple(candidates(invocation) if candidates else ()), args, kwargs)
        if best is not None:
            chain.cache.put(key, best)
            return best
    if not policy.allow_heuristics:
        chain.report_event("error", kernel.op_id)
        raise NoConfigError(f"no configuration for {key}: heuristics: not allowed by the policy")
    chain.report_event("heuristics", kernel.op_id)
    rule = most_specific_method(kernel, "heuristic_cfg", mapped)
    if rule is None:
        raise NotImplementedError(f"{kernel.op_id} has no rule: define heuristic_cfg")
    return rule(invocation)


def _fastest_candidate(
    chain: ConfigSelectorChain, kernel: Any, candidates: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns the fastest candidate; None where there is no choice, or where none runs."""
    if len(candidates) < 2:
        return None
    chain.report_event("autotune_start", kernel.op_id)
    tuner = chain.tuner if isinstance(chain.tuner, Tuner) else Tuner()
    seconds: dict[int, float] = {}
    for number, candidate in enumerate(candidates):
        try:
            seconds[number] = tuner.measure(_jitted_runner(kernel, candidate, kwargs), *args)
        except Exception:  # noqa: BLE001 - a candidate may exceed any limit of the device or its compiler
            continue
    best = candidates[min(seconds, key=seconds.__getitem__)] if seconds else None
    chain.report_event("autotune_finish", kernel.op_id, part=best)
    return best


def _jitted_runner(kernel: Any, cfg: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    return jax.jit(_function_of_positional_arguments(kernel, cfg, kwargs, under_shard_map=False))


def _config_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ConfigKey:
    leaves, structure = jax.tree.flatten((args, kwargs))
    builder = kernel.key_builder
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves]
    return ConfigKey(
        op=f"{kernel.op_id}@{kernel.version}",
        implementation=f"{type(kernel).__module__}.{type(kernel).__qualname__}",
        direction="forward",
        device=device_label(current_device(next(iter(leaves), None))),
        schema="own",
        call=short_hash(f"{structure} {shapes}") if builder is None else builder(kernel.invocation(args, kwargs)),
    )


__all__ = ["choose", "most_specific_method", "overrides_method", "run"]
