"""Fixtures of the tests of operations."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def x64() -> Iterator[None]:
    """Gives the tests of a module 64-bit arrays: `pytestmark = pytest.mark.usefixtures("x64")`."""
    with jax.enable_x64(True):
        yield
