"""Small things around compiled calls that model code imports from `ejkernel.callib`."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ejkernel.compat.utils import cdiv, next_power_of_2, strides_from_shape

__all__ = ["cdiv", "ejit", "next_power_of_2", "strides_from_shape"]

# `ejkernel.callib._ejit` is imported below this module's old name, which therefore has to be a package.
__path__: list[str] = []


def ejit(
    func: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    backend: str | None = None,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles a function with `jax.jit`. Can be used as a decorator with or without arguments, which are those of
    `jax.jit`.

    Compiled programs are kept where JAX keeps them: set `jax_compilation_cache_dir` to have them on disk.

    Args:
        func: The function to compile; without it, a decorator is returned.
        static_argnums: Positions of arguments that are constants.
        static_argnames: Names of such arguments.
        donate_argnums: Positions of arguments whose memory the outputs may use.
        in_shardings: Shardings of the arguments.
        out_shardings: Shardings of the outputs.
        donate_argnames: Names of arguments whose memory the outputs may use.
        keep_unused: Whether arguments that are not used stay arguments of the program.
        backend: The kind of device.
        inline: Whether the function becomes part of the caller's program text.
        compiler_options: Options of XLA.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.callib import ejit

        @ejit(static_argnames=("power",))
        def raised(x, power):
            return x**power

        assert raised(jnp.arange(3), power=2).tolist() == [0, 1, 4]
        ```
    """
    options: dict[str, Any] = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "backend": backend,
        "inline": inline,
        "compiler_options": compiler_options,
    }
    options = {name: option for name, option in options.items() if option is not None}
    return functools.partial(ejit, **options) if func is None else jax.jit(func, **options)


def args_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns structure, shapes, dtypes and shardings of arguments as text; other values count by their type."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    return f"{structure} {[_leaf_signature(leaf) for leaf in leaves]}"


def _leaf_signature(leaf: Any) -> str:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)} {getattr(leaf, 'sharding', '')}"


_get_args_signature = args_signature  # the name under which it is imported
