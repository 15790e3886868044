"""Lists the tests that exist on this machine, and the units in which processes run them."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ejkernel_conformance
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import registry
from ejkernel_conformance.plugin import PARAMETERS
from ejkernel_conformance.selection import FamilyTarget, Selection, Tunable
from ejkernel_conformance.subjects import Subject

TAG = "ci"
CLAIMS, CANDIDATES = "claims of ", "candidates of "


@dataclasses.dataclass(frozen=True)
class SuiteTest:
    """One test of one implementation.

    Attributes:
        id: The function and what it is run on, as pytest writes it: `test_value[flash_attention-triton-causal]`.
        family: The implementation's family.
        implementation: Its name.
        op: The operation; empty for a test of what the implementation claims for the whole family.
        unit: Tests of the same unit share what is compiled for them, and are run one after the other.
    """

    id: str
    family: str
    implementation: str
    op: str
    unit: str


@dataclasses.dataclass
class Unit:
    """Tests that one process runs one after the other.

    Attributes:
        name: What they have in common: a case, the candidates of an implementation, or the claims of a family.
        op: The operation; empty for claims.
        family: The family.
        tests: Those that have not run.
        long: Whether it takes longer than others: these are begun first, so that none is begun near the end.
    """

    name: str
    op: str
    family: str
    tests: list[SuiteTest]
    long: bool


@functools.cache
def functions() -> dict[str, tuple[str, Callable[[Any], None]]]:
    """Returns the suite's tests by name, in order: each with its only parameter."""
    found: dict[str, tuple[str, Callable[[Any], None]]] = {}
    for module in sorted(each.name for each in pkgutil.iter_modules(ejkernel_conformance.__path__)):
        if not module.startswith("test_"):
            continue
        for name, function in vars(importlib.import_module(f"ejkernel_conformance.{module}")).items():
            if name.startswith("test_"):
                (parameter,) = inspect.signature(function).parameters
                assert parameter in PARAMETERS
                found[name] = (parameter, function)
    return found


def implementations_for(device: DeviceInfo) -> tuple[str, ...]:
    """Returns the names of the implementations that serve this device and are not for every one, as XLA's are."""
    every = {i.name for listed in registry().implementations.values() for i in listed if _targets(i, device)}
    return tuple(sorted(every))


def _targets(implementation: Implementation, device: DeviceInfo) -> bool:
    return implementation.platform != "xla" and bool(implementation.requires.devices & device.names)


def list_tests(implementations: tuple[str, ...], ops: tuple[str, ...]) -> Iterator[SuiteTest]:
    """Yields the tests of implementations, in the same order on every machine with the same device.

    Args:
        implementations: Names; none for those made for the device.
        ops: Names of operations; none for all.
    """
    device = current_device()
    selection = Selection(ops, implementations or implementations_for(device), TAG)
    for name, (parameter, _) in functions().items():
        for item in selection.of(parameter):
            implementation, op, unit = _about(item)
            if _targets(implementation, device) or implementation.name in implementations:
                yield SuiteTest(f"{name}[{item}]", implementation.family, implementation.name, op, unit)


def _about(item: Any) -> tuple[Implementation, str, str]:
    """Returns the implementation, the operation and the unit of what a test is run on."""
    if isinstance(item, FamilyTarget):
        return item.implementation, "", f"{CLAIMS}{item.implementation.family}"
    if isinstance(item, Tunable):
        return item.subject.implementation, item.subject.op.name, f"{CANDIDATES}{item}"
    subject: Subject = item
    return subject.implementation, subject.op.name, f"{subject.op.name}, {subject.case.name}"


def make_units(tests: Iterable[SuiteTest]) -> list[Unit]:
    """Returns the tests in units, the long ones first."""
    units: dict[str, Unit] = {}
    for test in tests:
        long = test.unit.startswith((CLAIMS, CANDIDATES))
        units.setdefault(test.unit, Unit(test.unit, test.op, test.family, [], long)).tests.append(test)
    for unit in units.values():
        unit.tests.sort(key=lambda test: test.implementation)
    return sorted(units.values(), key=lambda unit: not unit.long)


@functools.cache
def _items(parameter: str, op: str, implementation: str) -> dict[str, Any]:
    """Returns what the tests of one parameter are run on, by the text in a test's id."""
    # The claims of a family are about the cases of all its operations.
    selection = Selection((op,) if op else (), (implementation,), TAG)
    return {str(item): item for item in selection.of(parameter)}


def resolve(test: SuiteTest) -> tuple[Callable[[Any], None], Any]:
    """Returns the test function, and what it is run on."""
    name, _, text = test.id.partition("[")
    parameter, function = functions()[name]
    item = _items(parameter, test.op, test.implementation)[text.removesuffix("]")]
    return function, item
