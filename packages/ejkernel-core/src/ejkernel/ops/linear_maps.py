"""The tangents of a call as linear maps, with their transposes, their derivatives, and batches of them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Leaves = list[Any]


class Call(Protocol):
    """A call with tangents, as `ejkernel.ops.tangents.TangentCall` describes it."""

    @property
    def moved(self) -> tuple[int, ...]: ...
    @property
    def without_shared_batches(self) -> "Call": ...
    def expand(self, i: int, u: jax.Array) -> jax.Array: ...
    def with_moved(self, moved: tuple[int, ...]) -> "Call": ...
    def forward(self, xs: Leaves) -> Any: ...
    def results_and_tangents(self, xs: Leaves, vs: Leaves) -> tuple[Leaves, Leaves]: ...
    def backward(self, xs: Leaves, results: Any, cotangents: Leaves) -> Leaves: ...
    def linear_map(self, results: Any) -> Any: ...
    def second_order(self, moved: tuple[int, ...]) -> Any: ...


def is_floating(x: Any) -> bool:
    """Returns whether an array is of a floating dtype, and so can have tangents."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def replaced(xs: Leaves, moved: Sequence[int], some: Leaves) -> Leaves:
    """Returns the leaves with those at the given indices replaced."""
    result = list(xs)
    for i, x in zip(moved, some, strict=True):
        result[i] = x
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class FirstOrder:
    """The tangents of a call, linear in those of its record. Residuals: leaves of the record, then of the results.

    Attributes:
        call: The call.
        count: Leaves of the record.
        structure: Tree structure of the results.
    """

    call: Call
    count: int
    structure: Any

    @property
    def moved(self) -> tuple[int, ...]:
        """Returns the indices of the leaves that the linear arguments are tangents of."""
        return self.call.moved

    def apply(self, residuals: Leaves, vs: Leaves) -> Leaves:
        """Returns the tangents of the floating leaves of the results."""
        return self.call.results_and_tangents(residuals[: self.count], vs)[1]

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the gradients; a cotangent of zero is None."""
        results = jax.tree.unflatten(self.structure, residuals[self.count :])
        return self.call.backward(residuals[: self.count], results, cotangents)

    def expand(self, i: int, u: jax.Array) -> jax.Array:
        """Returns a tangent of leaf i with every batch axis: there is none."""
        return u

    def derivative(self, moved: tuple[int, ...]) -> "SecondOrder":
        """Returns the derivative in the given leaves of the record."""
        return SecondOrder(self.call, self.count, moved)


@dataclasses.dataclass(frozen=True, eq=False)
class SecondOrder:
    """The derivative of `FirstOrder` in leaves of the record, linear in their tangents `us`.

    Residuals: leaves of the record, then the tangents `vs` of `FirstOrder`.

    Attributes:
        call: The call.
        count: Leaves of the record.
        moved: Indices of the leaves.
    """

    call: Call
    count: int
    moved: tuple[int, ...]

    def apply(self, residuals: Leaves, us: Leaves) -> Leaves:
        """Returns the second derivatives along `vs` and `us`."""
        xs, vs = residuals[: self.count], residuals[self.count :]

        def tangents(some: Leaves) -> Leaves:
            return self.call.results_and_tangents(replaced(xs, self.moved, some), vs)[1]

        return jax.jvp(tangents, ([xs[i] for i in self.moved],), (us,))[1]

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the derivative along `vs` of the gradients in the moved leaves."""
        xs, vs = residuals[: self.count], residuals[self.count :]
        call = self.call.with_moved(self.moved)

        def gradients(some: Leaves) -> Leaves:
            at = replaced(xs, self.call.moved, some)
            return call.backward(at, call.forward(at), cotangents)

        return jax.jvp(gradients, ([xs[i] for i in self.call.moved],), (vs,))[1]

    def expand(self, i: int, u: jax.Array) -> jax.Array:
        """Returns a tangent of leaf i with every batch axis: there is none."""
        return u

    def derivative(self, moved: tuple[int, ...]) -> Any:
        """Raises NotImplementedError: third derivatives are those of the reference."""
        raise NotImplementedError("third derivatives in a `forward_mode` block need a `second_derivatives` block too")


@dataclasses.dataclass(frozen=True, eq=False)
class _Batched:
    """What a batch of calls and a batch of linear maps share.

    Attributes:
        inner: The call, or the map.
        size: Of the batch.
        mapped: Which leaves of the record, and of a map's other residuals, have the batch axis, first.
    """

    inner: Any
    size: int
    mapped: tuple[bool, ...]

    @property
    def moved(self) -> tuple[int, ...]:
        """Returns the indices of the leaves that the linear arguments are tangents of."""
        return self.inner.moved

    @property
    def axes(self) -> list[int | None]:
        """Returns `in_axes` of the leaves."""
        return [0 if mapped else None for mapped in self.mapped]

    def expand(self, i: int, u: jax.Array) -> jax.Array:
        """Returns a tangent of leaf i with every batch axis."""
        if self.mapped[i]:
            return jax.vmap(functools.partial(self.inner.expand, i))(u)
        expanded = self.inner.expand(i, u)
        return jnp.broadcast_to(expanded, (self.size, *expanded.shape))


class BatchedMap(_Batched):
    """A linear map under `jax.vmap`: linear arguments, results and some residuals have a batch axis first."""

    @property
    def count(self) -> int:
        """Returns the number of leaves of the record."""
        return self.inner.count

    def apply(self, residuals: Leaves, vs: Leaves) -> Leaves:
        """Returns the map's results for every element of the batch."""
        return jax.vmap(self.inner.apply, in_axes=(self.axes, 0))(residuals, vs)

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the transposed map's results for every element of the batch."""
        return jax.vmap(self.inner.transposed, in_axes=(self.axes, 0))(residuals, cotangents)

    def derivative(self, moved: tuple[int, ...]) -> "BatchedMap":
        """Returns the batch of derivatives; the linear arguments are residuals there."""
        mapped = (*self.mapped[: self.count], *(True,) * len(self.moved))
        return BatchedMap(self.inner.derivative(moved), self.size, mapped)


class BatchedCall(_Batched):
    """A call under `jax.vmap`: tangents have a batch axis first, and so have some leaves of the record.

    Results have it where a leaf has it.
    """

    @property
    def results_axis(self) -> int | None:
        """Returns the batch axis of results."""
        return 0 if any(self.mapped) else None

    @property
    def without_shared_batches(self) -> Any:
        """Returns the call without the batch axes that only tangents have."""
        return self if any(self.mapped) else self.inner.without_shared_batches

    def with_moved(self, moved: tuple[int, ...]) -> "BatchedCall":
        """Returns the same call with tangents of other leaves."""
        return BatchedCall(self.inner.with_moved(moved), self.size, self.mapped)

    def forward(self, xs: Leaves) -> Any:
        """Returns the results of the forward pass, for every element of the batch."""
        if not any(self.mapped):
            return self.inner.forward(xs)
        return jax.vmap(self.inner.forward, in_axes=(self.axes,))(xs)

    def results_and_tangents(self, xs: Leaves, vs: Leaves) -> tuple[Leaves, Leaves]:
        """Returns leaves of the results and their tangents, for every element of the batch."""
        run = self.inner.results_and_tangents
        if not vs and not any(self.mapped):
            return run(xs, vs)
        return jax.vmap(run, in_axes=(self.axes, 0), out_axes=(self.results_axis, 0))(xs, vs)

    def backward(self, xs: Leaves, results: Any, cotangents: Leaves) -> Leaves:
        """Returns the gradients, for every element of the batch."""
        return jax.vmap(self.inner.backward, in_axes=(self.axes, self.results_axis, 0))(xs, results, cotangents)

    def linear_map(self, results: Any) -> BatchedMap:
        """Returns the map from tangents to those of the results."""
        mapped = (*self.mapped, *(any(self.mapped),) * len(jax.tree.leaves(results)))
        return BatchedMap(self.inner.linear_map(results), self.size, mapped)

    def second_order(self, moved: tuple[int, ...]) -> BatchedMap:
        """Returns the map of second derivatives along tangents of `moved` and of the given leaves."""
        mapped = (*self.mapped, *(True,) * len(self.moved))
        return BatchedMap(self.inner.second_order(moved), self.size, mapped)
