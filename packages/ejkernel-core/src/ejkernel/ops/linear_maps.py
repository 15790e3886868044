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
    def perturbed(self) -> tuple[int, ...]: ...
    @property
    def without_tangent_batch_axes(self) -> "Call": ...
    def expand_tangent(self, i: int, u: jax.Array) -> jax.Array: ...
    def with_perturbed(self, perturbed: tuple[int, ...]) -> "Call": ...
    def forward(self, xs: Leaves) -> Any: ...
    def results_and_tangents(self, xs: Leaves, vs: Leaves) -> tuple[Leaves, Leaves]: ...
    def backward(self, xs: Leaves, results: Any, cotangents: Leaves) -> Leaves: ...
    def linear_map(self, results: Any) -> Any: ...
    def second_order(self, perturbed: tuple[int, ...]) -> Any: ...


def is_floating(x: Any) -> bool:
    """Returns whether an array is of a floating dtype, and so can have tangents."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def replace_leaves(xs: Leaves, indices: Sequence[int], new_leaves: Leaves) -> Leaves:
    """Returns the leaves with those at `indices` replaced by `new_leaves`."""
    result = list(xs)
    for i, x in zip(indices, new_leaves, strict=True):
        result[i] = x
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class FirstOrder:
    """The tangents of a call, linear in those of its record. Residuals: leaves of the record, then of the results.

    Attributes:
        call: The call.
        num_record_leaves: Leaves of the record.
        structure: Tree structure of the results.
    """

    call: Call
    num_record_leaves: int
    structure: Any

    @property
    def perturbed(self) -> tuple[int, ...]:
        """Returns the indices of the leaves that the linear arguments are tangents of."""
        return self.call.perturbed

    def apply(self, residuals: Leaves, vs: Leaves) -> Leaves:
        """Returns the tangents of the floating leaves of the results."""
        return self.call.results_and_tangents(residuals[: self.num_record_leaves], vs)[1]

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the gradients; a cotangent of zero is None."""
        results = jax.tree.unflatten(self.structure, residuals[self.num_record_leaves :])
        return self.call.backward(residuals[: self.num_record_leaves], results, cotangents)

    def expand_tangent(self, i: int, u: jax.Array) -> jax.Array:
        """Returns a tangent of leaf i with every batch axis: there is none."""
        return u

    def derivative(self, perturbed: tuple[int, ...]) -> "SecondOrder":
        """Returns the derivative in the given leaves of the record."""
        return SecondOrder(self.call, self.num_record_leaves, perturbed)


@dataclasses.dataclass(frozen=True, eq=False)
class SecondOrder:
    """The derivative of `FirstOrder` in leaves of the record, linear in their tangents `us`.

    Residuals: leaves of the record, then the tangents `vs` of `FirstOrder`.

    Attributes:
        call: The call.
        num_record_leaves: Leaves of the record.
        perturbed: Indices of the leaves.
    """

    call: Call
    num_record_leaves: int
    perturbed: tuple[int, ...]

    def apply(self, residuals: Leaves, us: Leaves) -> Leaves:
        """Returns the second derivatives along `vs` and `us`."""
        xs, vs = residuals[: self.num_record_leaves], residuals[self.num_record_leaves :]

        def tangents(perturbed_leaves: Leaves) -> Leaves:
            return self.call.results_and_tangents(replace_leaves(xs, self.perturbed, perturbed_leaves), vs)[1]

        return jax.jvp(tangents, ([xs[i] for i in self.perturbed],), (us,))[1]

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the derivative along `vs` of the gradients in the perturbed leaves."""
        xs, vs = residuals[: self.num_record_leaves], residuals[self.num_record_leaves :]
        call = self.call.with_perturbed(self.perturbed)

        def gradients(perturbed_leaves: Leaves) -> Leaves:
            leaves = replace_leaves(xs, self.call.perturbed, perturbed_leaves)
            return call.backward(leaves, call.forward(leaves), cotangents)

        return jax.jvp(gradients, ([xs[i] for i in self.call.perturbed],), (vs,))[1]

    def expand_tangent(self, i: int, u: jax.Array) -> jax.Array:
        """Returns a tangent of leaf i with every batch axis: there is none."""
        return u

    def derivative(self, perturbed: tuple[int, ...]) -> Any:
        """Raises NotImplementedError: third derivatives are those of the reference."""
        raise NotImplementedError("third derivatives in a `forward_mode` block need a `second_derivatives` block too")


@dataclasses.dataclass(frozen=True, eq=False)
class _Batched:
    """What a batch of calls and a batch of linear maps share.

    Attributes:
        unbatched: The call, or the map.
        batch_size: The size of the batch axis.
        is_mapped: Which leaves of the record, and of a map's other residuals, have the batch axis, first.
    """

    unbatched: Any
    batch_size: int
    is_mapped: tuple[bool, ...]

    @property
    def perturbed(self) -> tuple[int, ...]:
        """Returns the indices of the leaves that the linear arguments are tangents of."""
        return self.unbatched.perturbed

    @property
    def in_axes(self) -> list[int | None]:
        """Returns `in_axes` of the leaves."""
        return [0 if is_mapped else None for is_mapped in self.is_mapped]

    def expand_tangent(self, i: int, u: jax.Array) -> jax.Array:
        """Returns a tangent of leaf i with every batch axis."""
        if self.is_mapped[i]:
            return jax.vmap(functools.partial(self.unbatched.expand_tangent, i))(u)
        expanded = self.unbatched.expand_tangent(i, u)
        return jnp.broadcast_to(expanded, (self.batch_size, *expanded.shape))


class BatchedMap(_Batched):
    """A linear map under `jax.vmap`: linear arguments, results and some residuals have a batch axis first."""

    @property
    def num_record_leaves(self) -> int:
        """Returns the number of leaves of the record."""
        return self.unbatched.num_record_leaves

    def apply(self, residuals: Leaves, vs: Leaves) -> Leaves:
        """Returns the map's results for every element of the batch."""
        return jax.vmap(self.unbatched.apply, in_axes=(self.in_axes, 0))(residuals, vs)

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the transposed map's results for every element of the batch."""
        return jax.vmap(self.unbatched.transposed, in_axes=(self.in_axes, 0))(residuals, cotangents)

    def derivative(self, perturbed: tuple[int, ...]) -> "BatchedMap":
        """Returns the batch of derivatives; the linear arguments are residuals there."""
        is_mapped = (*self.is_mapped[: self.num_record_leaves], *(True,) * len(self.perturbed))
        return BatchedMap(self.unbatched.derivative(perturbed), self.batch_size, is_mapped)


class BatchedCall(_Batched):
    """A call under `jax.vmap`: tangents have a batch axis first, and so have some leaves of the record.

    Results have it where a leaf has it.
    """

    @property
    def results_batch_axis(self) -> int | None:
        """Returns the batch axis of results."""
        return 0 if any(self.is_mapped) else None

    @property
    def without_tangent_batch_axes(self) -> Any:
        """Returns the call without the batch axes that only tangents have."""
        return self if any(self.is_mapped) else self.unbatched.without_tangent_batch_axes

    def with_perturbed(self, perturbed: tuple[int, ...]) -> "BatchedCall":
        """Returns the same call with tangents of other leaves."""
        return BatchedCall(self.unbatched.with_perturbed(perturbed), self.batch_size, self.is_mapped)

    def forward(self, xs: Leaves) -> Any:
        """Returns the results of the forward pass, for every element of the batch."""
        if not any(self.is_mapped):
            return self.unbatched.forward(xs)
        return jax.vmap(self.unbatched.forward, in_axes=(self.in_axes,))(xs)

    def results_and_tangents(self, xs: Leaves, vs: Leaves) -> tuple[Leaves, Leaves]:
        """Returns leaves of the results and their tangents, for every element of the batch."""
        run = self.unbatched.results_and_tangents
        if not vs and not any(self.is_mapped):
            return run(xs, vs)
        return jax.vmap(run, in_axes=(self.in_axes, 0), out_axes=(self.results_batch_axis, 0))(xs, vs)

    def backward(self, xs: Leaves, results: Any, cotangents: Leaves) -> Leaves:
        """Returns the gradients, for every element of the batch."""
        return jax.vmap(self.unbatched.backward, in_axes=(self.in_axes, self.results_batch_axis, 0))(
            xs, results, cotangents
        )

    def linear_map(self, results: Any) -> BatchedMap:
        """Returns the map from tangents to those of the results."""
        is_mapped = (*self.is_mapped, *(any(self.is_mapped),) * len(jax.tree.leaves(results)))
        return BatchedMap(self.unbatched.linear_map(results), self.batch_size, is_mapped)

    def second_order(self, perturbed: tuple[int, ...]) -> BatchedMap:
        """Returns the map of second derivatives along tangents of `perturbed` and of the given leaves."""
        is_mapped = (*self.is_mapped, *(True,) * len(self.perturbed))
        return BatchedMap(self.unbatched.second_order(perturbed), self.batch_size, is_mapped)
