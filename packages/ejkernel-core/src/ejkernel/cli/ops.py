"""Implements `ejkernel ops`, which generates the support matrix from the registry."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
import jax
import msgspec

from ejkernel.cli.as_json import JSON_OPTION, print_json
from ejkernel.cli.devices import find_devices
from ejkernel.cli.public_arguments import public_arguments
from ejkernel.families.contract import Family
from ejkernel.ops import evidence
from ejkernel.ops.dispatch import can_compute
from ejkernel.ops.model import Case, Implementation, Op, Requires
from ejkernel.ops.plugins import Registry, registry
from ejkernel.types.arguments import non_default_fields, optional_fields

INTRODUCTION = """\
# Support matrix

`ejkernel ops` generates this page from what the installed backends declare. The conformance suite fails if a
declaration is wrong. To see which implementation a particular call would run, and why, use `ejkernel explain`.

*Splits* are the [axis letters](axes.md) over which `mesh`, `in_specs` and `out_specs` can split a call. Differentiating
an operation without a gradient is an error.

The last rows of a table are the arguments. In brackets is the name that reasons of `ejkernel explain` have for what an
argument sets, if it is another one:

- *with gradient*: the implementation supports the argument, and its backward pass computes the gradient.
- *no gradient*: it supports the argument in the forward pass only. If another implementation has the gradient, that one
  runs the backward pass.
- *yes*: it supports the argument, which has no gradient.
- *no*: a call with this argument runs on another implementation.

*Evidence* names the chips and toolchains on which every test of the operation has passed, and what is missing
elsewhere. Where it is missing, the kernel comes after all that are confirmed.
"""


@click.command()
@JSON_OPTION
def ops(as_json: bool) -> None:
    """List every operation and what its implementations support.

    The output is Markdown.
    """
    find_devices()
    if as_json:
        print_json(support_matrix_data(registry()))
    else:
        click.echo(support_matrix(registry()))


def support_matrix_data(registered: Registry) -> list[dict[str, Any]]:
    """Returns the support matrix as plain data."""
    return [
        _operation_to_dict(registered.ops[name], serving, _implementation_notes(registered, name, serving))
        for name in sorted(registered.ops)
        for serving in [_serving_implementations(registered, name)]
    ]


def _operation_to_dict(op: Op, implementations: tuple[Implementation, ...], notes: list[str]) -> dict[str, Any]:
    names = distinguishing_fields(op, implementations)
    return {
        "operation": op.name,
        "family": op.family.name,
        "arguments": dict(op.axes),
        "splits": splittable_axes(op),
        "notes": notes,
        "implementations": [
            {
                "name": one.name,
                **{label: describe(one) for label, describe in IMPLEMENTATION_FACTS.items()},
                "evidence": [msgspec.to_builtins(summary) for summary in evidence.evidence_summaries(one, op.name)],
                "priority": one.constant_priority,
                "backward": one.backward is not None,
                "fields": {name: _field_support(op.family, one, name) for name in names},
            }
            for one in implementations
        ],
    }


def support_matrix(registered: Registry) -> str:
    """Returns the support matrix as Markdown.

    Args:
        registered: What the plugins declared.
    """
    every = [(registered.ops[name], _serving_implementations(registered, name)) for name in sorted(registered.ops)]
    sections = (
        line
        for op, serving in every
        for line in _operation_section(op, serving, _implementation_notes(registered, op.name, serving))
    )
    return "\n".join([INTRODUCTION, *_overview_table(every), *sections])


def _serving_implementations(registered: Registry, name: str) -> tuple[Implementation, ...]:
    """Returns the implementations that serve at least one case of an operation on the devices they are for."""
    op = registered.ops[name]
    records = [_case_record(op, case) for case in op.cases]

    def serves(one: Implementation) -> bool:
        return any(can_compute(op.family, one, record, "forward") for record in records) or any(
            can_compute(op.family, one, _case_record(op, case), "forward") for case in one.cases_of(op)
        )

    return tuple(filter(serves, registered.implementations.get(name, ())))


def _overview_table(operations: Iterable[tuple[Op, tuple[Implementation, ...]]]) -> Iterator[str]:
    rows = [
        (
            f"[{op.name}](#{op.name})",
            ", ".join(one.name for one in implementations) or "none installed",
            "yes" if any(one.backward for one in implementations) else "no",
            " ".join(splittable_axes(op)) or "none",
        )
        for op, implementations in operations
    ]
    yield from _markdown_table(("operation", "implementations", "gradient", "splits"), rows)


def _operation_section(op: Op, implementations: tuple[Implementation, ...], notes: list[str]) -> Iterator[str]:
    """Yields the heading of an operation, its arguments, and a table with a column per implementation."""
    yield f"## {op.name}\n"
    arguments = ", ".join(f"`{name}[{letters}]`" for name, letters in op.axes.items())
    yield f"Arguments: {arguments}. Splits: {' '.join(splittable_axes(op)) or 'none'}. Family: {op.family.name}.\n"
    if not implementations:
        yield "No installed backend has an implementation.\n"
        return
    yield from (f"Note: {note}.\n" for note in notes)
    rows = [(label, *map(describe, implementations)) for label, describe in IMPLEMENTATION_FACTS.items()]
    rows = [row for row in rows if any(row[1:])]
    rows.append(("evidence", *(evidence.evidence_in_words(one, op.name) for one in implementations)))
    rows += [
        (_field_label(op, name), *(_field_support(op.family, one, name) for one in implementations))
        for name in distinguishing_fields(op, implementations)
    ]
    yield from _markdown_table(("", *(one.name for one in implementations)), rows)


def _field_label(op: Op, field: str) -> str:
    """Returns the public arguments that set a field of the record and, in brackets, the field if its name differs."""
    arguments = public_arguments(op, field)
    if not arguments or arguments == (field,):
        return f"`{field}`"
    names = ", ".join(f"`{argument}`" for argument in arguments)
    return f"{names} (`{field}`)"


def _implementation_notes(registered: Registry, name: str, implementations: Iterable[Implementation]) -> list[str]:
    """Returns sentences about implementations that have another name here than their plugin gave them, and about kinds
    of devices without a kernel.
    """
    kernels = {kind for one in implementations for kind in one.requires.devices if not one.instead_of_kernel}
    missing = {kind: reason for one in implementations for kind, reason in one.instead_of_kernel.items()}
    renamed = [sentence for (op, _), sentence in registered.renaming_notes.items() if op == name]
    return renamed + [
        f"no kernel for {kind.upper()}s: {reason}" for kind, reason in missing.items() if kind not in kernels
    ]


def splittable_axes(op: Op) -> list[str]:
    """Returns the axis letters of an operation's arguments that may be split over devices, in order."""
    letters = dict.fromkeys(letter for axes in op.axes.values() for letter in axes.split())
    shardable = op.family.splittable_axes_of(_case_record(op, op.cases[0]))
    return [letter for letter in letters if letter in shardable]


@functools.cache
def _case_record(op: Op, case: Case) -> Any:
    """Returns the shapes of a case's family record; tracing all cases takes ten seconds."""
    return jax.eval_shape(lambda key: op.lower(case.make(key)), jax.random.key(0))


def distinguishing_fields(op: Op, implementations: Iterable[Implementation]) -> list[str]:
    """Returns the fields that distinguish implementations: optional ones, and those with a gradient."""
    used = {name for case in op.cases for name in non_default_fields(_case_record(op, case))}
    served = used & {name for one in implementations for name in one.requires.handles}
    optional = [name for name in optional_fields(op.family.record) if name in served]
    return [*(name for name in op.family.differentiable if name not in optional_fields(op.family.record)), *optional]


def _field_support(family: Family, implementation: Implementation, name: str) -> str:
    """Says if an implementation supports a field, and its gradient; all support required fields."""
    if name in optional_fields(family.record) and name not in implementation.requires.handles:
        return "no"
    if name not in family.differentiable:
        return "yes"
    has_gradient = implementation.backward is not None and name in implementation.gradients
    return "with gradient" if has_gradient else "no gradient"


def _requirements_describer(describe: Callable[[Requires], str]) -> Callable[[Implementation], str]:
    """Describes the requirements of the forward pass, and of the backward pass if they differ."""

    def describe_both_passes(implementation: Implementation) -> str:
        of_forward, of_backward = (describe(implementation.requires_for(each)) for each in ("forward", "backward"))
        differs = implementation.backward is not None and of_backward != of_forward
        return f"{of_forward or 'any'}; backward {of_backward or 'any'}" if differs else of_forward

    return describe_both_passes


def _head_dims(requires: Requires) -> str:
    sizes = requires.head_dims
    if isinstance(sizes, range) and sizes:
        step = f" in steps of {sizes.step}" if sizes.step != 1 else ""
        return f"{sizes[0]} to {sizes[-1]}{step}"
    return ", ".join(map(str, sorted(sizes))) if isinstance(sizes, frozenset | set | tuple | list) else str(sizes or "")


def _min_compute_capability(requires: Requires) -> str:
    return "" if requires.min_compute_capability is None else str(requires.min_compute_capability)


def _backward_support(implementation: Implementation) -> str:
    return "own" if implementation.backward else "that of another implementation, if there is one"


IMPLEMENTATION_FACTS: dict[str, Callable[[Implementation], str]] = {
    "platform": lambda one: one.platform,
    "priority": lambda one: "by call" if one.constant_priority is None else str(one.constant_priority),
    "devices": _requirements_describer(lambda requires: ", ".join(sorted(requires.devices))),
    "modules": _requirements_describer(lambda requires: ", ".join(requires.modules)),
    "compute capability": _requirements_describer(_min_compute_capability),
    "dtypes": _requirements_describer(lambda requires: ", ".join(sorted(requires.dtypes))),
    "head sizes": _requirements_describer(_head_dims),
    "backward": _backward_support,
}
"""The rows about an implementation as a whole. A row that is empty for all implementations is left out."""


def _markdown_table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""
