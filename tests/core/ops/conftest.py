"""Every test has a store, a default chain and a set of plugins of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import toy

from ejkernel.ops import ConfigSelectorChain, clear_recorded, plugins
from ejkernel.ops.call import default_chain
from ejkernel.ops.config.persistent import DIRECTORY_VARIABLE
from ejkernel.ops.plugins import Registry

Use = Callable[..., Registry]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's store, which no test shares."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "store"))
    default_chain.cache_clear()
    clear_recorded()
    yield tmp_path / "store" / "configs.json"
    default_chain.cache_clear()
    clear_recorded()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Makes entry points the only ones there are."""

    def only(*entry_points: Any) -> Registry:
        monkeypatch.setattr(plugins, "_entry_points", lambda: list(entry_points))
        plugins.reload()
        return plugins.registry()

    yield only
    monkeypatch.undo()
    plugins.reload()


@pytest.fixture
def plain(use: Use) -> Registry:
    """One implementation of `toy`, with candidates."""
    toy.SEEN.clear()
    return use(toy.plugin(toy.implementation()))


@pytest.fixture
def chain() -> ConfigSelectorChain:
    """A chain without a disk."""
    return ConfigSelectorChain()


@pytest.fixture
def x() -> Any:
    return jnp.ones((4, 8))
