"""When two answers count as equal."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.model import Tolerance


def assert_close(got: Any, want: Any, tolerance: Tolerance, what: str) -> None:
    """Outputs agree: `|got - want| <= atol + rtol * |want|`, element by element; infinities are equal to themselves.

    Raises:
        AssertionError: The outputs differ by more, or have other shapes.
    """
    for g, w in _pairs(got, want, what):
        _check(g, w, tolerance.atol + tolerance.rtol * np.abs(w), what)


def assert_gradients_close(got: dict[str, Any], want: dict[str, Any], tolerance: Tolerance, what: str) -> None:
    """Gradients agree: an error of `rtol` of the largest entry of that gradient, and `atol` of the largest of them all.

    A gradient is a sum of many products, whose rounding is that of the large terms: entries that cancel to nearly
    nothing cannot be asked for their own leading digits. `atol` is what lets a gradient be rounding noise where it is
    zero in exact arithmetic (the query's, where there is a single key). Of gradients of 8 bits, either may be the
    neighbouring number: sums that differ in their last digit can be rounded apart.

    Raises:
        AssertionError: The gradients differ by more, or have other names or shapes.
    """
    if got.keys() != want.keys():
        raise AssertionError(f"{what}: got gradients of {sorted(got)}, wants {sorted(want)}")
    largest = {name: max((_largest(x) for x in jax.tree.leaves(w)), default=0.0) for name, w in want.items()}
    for name, w in want.items():
        allowed = tolerance.rtol * largest[name] + tolerance.atol * max(largest.values())
        for g, x in _pairs(got[name], w, f"{what}, gradient of {name}"):
            _check(g, x, allowed + _spacing(w) * np.abs(x), f"{what}, gradient of {name}")


def _spacing(tree: Any) -> float:
    """Returns the largest distance of numbers of 8 bits to their neighbours, in parts of them; 0 of wider dtypes."""
    found = [jnp.finfo(x.dtype) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return max((float(dtype.eps) for dtype in found if dtype.bits == 8), default=0.0)


def close(got: Any, want: Any, tolerance: Tolerance) -> bool:
    """Returns whether `assert_close` would pass."""
    try:
        assert_close(got, want, tolerance, "")
    except AssertionError:
        return False
    return True


def assert_same_bits(got: Any, want: Any, what: str) -> None:
    """Raises AssertionError unless two pytrees of arrays are equal bit by bit."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    if any(np.asarray(g).tobytes() != np.asarray(w).tobytes() for g, w in pairs):
        raise AssertionError(f"{what}: two runs on the same inputs differ in their bits")


def assert_same_shapes(got: Any, want: Any, what: str) -> None:
    """Raises AssertionError unless two pytrees have equal structure, shapes and dtypes."""
    ours, theirs = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (got, want))
    if jax.tree.structure(ours) != jax.tree.structure(theirs) or jax.tree.leaves(ours) != jax.tree.leaves(theirs):
        raise AssertionError(f"{what}: got {ours}, wants {theirs}")


def _pairs(got: Any, want: Any, what: str) -> list[tuple[np.ndarray, np.ndarray]]:
    assert_same_shapes(got, want, what)
    return [
        (np.asarray(g).astype(np.float64), np.asarray(w).astype(np.float64))
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]


def _largest(x: Any) -> float:
    return float(np.max(np.abs(np.asarray(x).astype(np.float64)), initial=0.0))


def _check(got: np.ndarray, want: np.ndarray, allowed: np.ndarray, what: str) -> None:
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
    # A NaN compares false, so it is wrong.
    wrong = ~((got == want) | (error <= allowed))
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[np.argmax(np.nan_to_num(error[wrong], nan=np.inf))])
    raise AssertionError(
        f"{what}: {wrong.sum()} of {wrong.size} entries are wrong; at {at} got {got[at]:.6g}, wants {want[at]:.6g} "
        f"within {allowed[at]:.2g}"
    )
