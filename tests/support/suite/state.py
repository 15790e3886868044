"""What tests share in a process, restored so that no test depends on those before it.

The registry of plugins is restored after each test: one that a test has loaded anew has other objects than those that
tests were collected with. The rest is restored after each file, since fixtures of a file may change it for all its
tests: variables of the environment that this project and JAX read, options of JAX, the path of modules and the working
directory. The default chain and the recorded calls are emptied. A module's generators of random numbers are set before
each test to the state that its import left, so that a test draws the same numbers whichever tests ran before it.
"""

import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np

from ejkernel.ops import clear_recorded, plugins
from ejkernel.ops.call import default_chain

RESTORED_VARIABLE_PREFIXES = ("EJKERNEL_", "JAX_", "XLA_FLAGS")
"""Of the variables that are restored; other packages set variables of their own when they are imported."""


def _restored_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(RESTORED_VARIABLE_PREFIXES)}


def _restore_variables(before: Mapping[str, str]) -> None:
    for name in _restored_variables().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _restore_options(before: Mapping[str, Any]) -> None:
    """Modules that are imported later may define more options of JAX, which stay."""
    now = dict(jax.config.values)
    for name, value in before.items():
        if now[name] != value:
            jax.config.update(name, value)


class SharedStateGuard:
    """Keeps tests from one another; hooks of pytest call its methods."""

    def __init__(self) -> None:
        self._registry: list[plugins.Registry] = []
        self._generators: dict[ModuleType, list[tuple[np.random.Generator, Mapping[str, Any]]]] = {}
        self._in_file = False

    def begin_test(self, module: ModuleType | None = None) -> None:
        """Notes the state before the fixtures of a test, and of a file, change it.

        Args:
            module: The test's module, whose generators are reset; `None` for a test without a module.
        """
        if module is not None:
            self._reset_generators(module)
        self._registry = list(plugins.loaded_registries)
        if not self._in_file:
            self._in_file = True
            self._variables, self._options = _restored_variables(), dict(jax.config.values)
            self._path, self._folder = list(sys.path), os.getcwd()

    def _reset_generators(self, module: ModuleType) -> None:
        if module not in self._generators:
            found = (x for x in vars(module).values() if isinstance(x, np.random.Generator))
            self._generators[module] = [(x, x.bit_generator.state) for x in found]
        for generator, state in self._generators[module]:
            generator.bit_generator.state = state

    def end_test(self, is_last_of_file: bool) -> None:
        """Restores the state.

        Args:
            is_last_of_file: Whether fixtures of the file are torn down, too.
        """
        plugins.loaded_registries[:] = self._registry
        if not is_last_of_file or not self._in_file:
            return
        self._in_file = False
        _restore_variables(self._variables)
        _restore_options(self._options)
        sys.path[:] = self._path
        os.chdir(self._folder)
        default_chain.cache_clear()
        clear_recorded()
