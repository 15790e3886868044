"""Executors, which call kernels with a configuration chain of their own."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax

from ejkernel.errors import NoImplementationError
from ejkernel.ops.call import decide
from ejkernel.ops.config.agreement import explain_only
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.config.persistent import PersistentCache, expand_store_path
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.tuner import Tuner
from ejkernel.ops.dispatch import Decision
from ejkernel.ops.execution import custom_kernel
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.params import BaseOperationConfig

Cfg = TypeVar("Cfg", bound=BaseOperationConfig)
Out = TypeVar("Out")

_SHARD_MAP_ARGUMENTS = ("mesh", "in_specs", "out_specs")


class Executor:
    """Runs kernels with the configurations that one chain chooses.

    Args:
        chooser: The chain.
        stamp_prefix: Begins the name of the scope, `prefix#operation@version`, that the kernels of a compiled program
            have in its text and in profiles; None gives them none.
    """

    def __init__(self, chooser: ConfigSelectorChain, stamp_prefix: str | None = None) -> None:
        self.chooser = chooser
        self.stamp_prefix = stamp_prefix

    def __call__(
        self,
        kernel: Kernel[Cfg, Out],
        *args: Any,
        cfg: Cfg | None = None,
        stamp: bool = True,
        method: Literal["shard_map"] | None = None,
        check_vma: bool = False,
        **kwargs: Any,
    ) -> Out:
        """Calls a kernel: one of an operation, or one of the caller's own.

        Args:
            kernel: The kernel.
            *args: Positional arguments of its public function.
            cfg: Configuration for this call alone.
            stamp: Whether the executor's `stamp_prefix` counts.
            method: `"shard_map"` runs the call under `jax.shard_map` with `mesh`, `in_specs` and `out_specs`, as a call
                does that is given the three.
            check_vma: As of `jax.shard_map`, for kernels of the caller's own.
            **kwargs: Keyword arguments, `platform`, `mesh`, `in_specs` and `out_specs` included.

        Raises:
            ValueError: `kernel` is no kernel object, `method` is unknown, one of the three is missing, or `check_vma`
                is set for an operation.
        """
        _check_kernel(kernel)
        if method not in (None, "shard_map"):
            raise ValueError(f"method: got {method!r}, wants None or 'shard_map'")
        prefix = self.stamp_prefix if stamp else None
        name = f"{prefix}#{kernel.op_id}@v{kernel.version}"
        with contextlib.nullcontext() if prefix is None else jax.named_scope(name):
            if kernel.is_custom:
                mapping = {name: kwargs.pop(name, None) for name in _SHARD_MAP_ARGUMENTS}
                mapped = method is not None or any(value is not None for value in mapping.values())
                mapping |= {"check_vma": check_vma}
                return custom_kernel.run(self.chooser, kernel, args, cfg, kwargs, mapping if mapped else None)
            if check_vma:
                raise ValueError(
                    "check_vma: got True, wants False: JAX cannot infer over which axes the results of a kernel vary"
                )
            missing = [name for name in _SHARD_MAP_ARGUMENTS if method and kwargs.get(name) is None]
            if missing:
                raise ValueError(f"{missing[0]}: got None, wants a value with method='shard_map'")
            return kernel.run(*args, cfg=cfg, chain=self.chooser, **kwargs)

    def explain(self, kernel: Kernel[Cfg, Out], *args: Any, **kwargs: Any) -> Decision:
        """Returns what the call of an operation would do, and why.

        Raises:
            ValueError: `kernel` is one of the caller's own, for which there is no choice of implementations.
        """
        _check_kernel(kernel)
        if kernel.is_custom:
            raise ValueError(f"kernel: got {kernel.op_id}, which has no operation, wants a kernel of an operation")
        with explain_only():
            return self._operation_and_decision(kernel, *args, **kwargs)[1]

    def choose_config(self, kernel: Kernel[Cfg, Out], *args: Any, **kwargs: Any) -> Cfg:
        """Returns the configuration the call would use, both directions, for the toolchain that was asked for.

        The processes of a job call this together, as they would the kernel.

        Raises:
            NoImplementationError: No implementation serves the call.
        """
        _check_kernel(kernel)
        if kernel.is_custom:
            args, kwargs = kernel.prepare(*args, **kwargs)
            return custom_kernel.choose(self.chooser, kernel, args, kwargs.pop("cfg", None), kwargs)
        op, decision = self._operation_and_decision(kernel, *args, **kwargs)
        forward, backward = decision.forward, decision.backward
        chosen = forward.implementation
        if chosen is None:
            raise NoImplementationError(forward)
        space = chosen.config
        follower = space if backward.implementation is None else backward.implementation.config
        config: Any = op.config.from_parts(
            space.part_in_public_fields(op.config, forward.config, "forward"),
            follower.part_in_public_fields(op.config, backward.config, "backward"),
        )
        return dataclasses.replace(config, platform=decision.forward.platform)

    def compile(self, kernel: Kernel[Cfg, Out], *example_args: Any, **kwargs: Any) -> Callable[..., Out]:
        """Returns a jitted function of the kernel's arguments, with the configuration fixed to what the examples
        choose.

        Args:
            kernel: The kernel.
            *example_args: Positional arguments; arrays or `jax.ShapeDtypeStruct`s.
            **kwargs: Keyword arguments. They are fixed, but for arrays that the compiled function is given again.
        """
        config = self.choose_config(kernel, *example_args, **kwargs)

        def run(*args: Any, **extra: Any) -> Out:
            call_kwargs: dict[str, Any] = {**kwargs, **extra, "cfg": config}
            return self(kernel, *args, **call_kwargs)

        return jax.jit(run)

    def _operation_and_decision(self, kernel: Kernel[Cfg, Out], *args: Any, **kwargs: Any) -> tuple[Op, Decision]:
        """Returns the operation that carries the call out, and what it would do."""
        _check_kernel(kernel)
        args, kwargs = kernel.prepare(*args, **kwargs)
        op, record, options = kernel.op.routed_call(*kernel.op.bind(args, kwargs))
        return op, decide(op, record, chain=self.chooser, **options)


def _check_kernel(kernel: Any) -> None:
    """Refuses what is no kernel object, such as an operation's function or a class of kernels."""
    if not isinstance(kernel, Kernel):
        name = getattr(kernel, "__name__", type(kernel).__name__)
        wants = f"an object, {name}()" if isinstance(kernel, type) else "a Kernel, such as FlashAttention()"
        raise ValueError(f"kernel: got {name}, wants {wants}")


def create_default_executor(
    persistent_cache_path: str | os.PathLike[str] | None = None,
    enable_autotuning: bool = True,
    warmup_iterations: int = 2,
    timing_iterations: int = 5,
) -> Executor:
    """Returns an executor with a memory of its own.

    Args:
        persistent_cache_path: The store: a `.json` file or a directory; None for the user's store.
        enable_autotuning: Whether an eager call that no tier knows is measured first; otherwise rules decide.
        warmup_iterations: Untimed runs of each candidate.
        timing_iterations: Timed runs of each candidate, of which the median counts.

    Raises:
        ValueError: The store's path is no path, or begins with the home directory of a user that does not exist.
    """
    store = PersistentCache(path=expand_store_path("persistent_cache_path", persistent_cache_path))
    policy = AutotunePolicy(
        allow_autotune=enable_autotuning, cache_miss_fallback="autotune" if enable_autotuning else "heuristics"
    )
    tuner = Tuner(warmup_iterations=warmup_iterations, timing_iterations=timing_iterations)
    return Executor(ConfigSelectorChain(policy=policy, tuner=tuner, persistent=store))
