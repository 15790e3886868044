"""Compiles for a TPU that is not attached, and finds what libtpu writes about each kernel."""

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile.cases import SINGLE_DEVICE_MESH, Case, Workload
from ejkernel_pallas.tpu.profile.chips import Chip
from ejkernel_pallas.tpu.profile.report import KernelReport, Report
from ejkernel_pallas.tpu.profile.scalars import PallasCall, pack_words, pallas_calls
from ejkernel_pallas.tpu.profile.simulate import CompiledKernel

_KERNEL_NAME_PATTERN = re.compile(r"%([\w.\-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"")
_BUNDLES_SUFFIX = "final_bundles.txt"
_UTILISATION_SUFFIX = "final_hlo-static-per-bundle-utilization.txt"
_ALLOCATIONS_SUFFIX = "pre-finalize-registers-and-allocations.txt"


@dataclasses.dataclass(frozen=True)
class CompiledCase:
    """A compiled program.

    Attributes:
        hlo: Its HLO.
        pallas_calls: Its `pallas_call`s.
        lower_seconds: Seconds that tracing and lowering took.
        compile_seconds: Seconds that compiling took.
    """

    hlo: str
    pallas_calls: Sequence[PallasCall]
    lower_seconds: float
    compile_seconds: float


def profile_case(chip: Chip, case: Case, dump_folder: Path) -> Report:
    """Compiles a case and simulates its kernels, in a process whose libtpu writes to the folder `dump_folder`."""
    workload = case.workload()
    compiled = _compile_case(chip, case, workload)
    return Report(
        label=case.label,
        target=chip.name,
        kernels=tuple(_simulate_kernels(chip, case, compiled, dump_folder)),
        flops=workload.flops,
        min_hbm_bytes=workload.min_hbm_bytes,
        lower_seconds=compiled.lower_seconds,
        compile_seconds=compiled.compile_seconds,
    )


@contextlib.contextmanager
def compiling_for(chip: Chip, mesh_axes: Mapping[str, int] = SINGLE_DEVICE_MESH) -> Generator[NamedSharding]:
    """Dispatches operations for the chip inside the context, and yields a sharding that puts arrays on every device."""
    mesh = _make_mesh(chip, tuple(mesh_axes.items()))
    device = DeviceInfo(platform="tpu", vendor="google", kind=chip.kind)
    with target_device(device), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield NamedSharding(mesh, PartitionSpec())


@functools.cache
def _make_mesh(chip: Chip, mesh_axes: tuple[tuple[str, int], ...]) -> Mesh:
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices)
    names, sizes = zip(*mesh_axes, strict=True)
    count = math.prod(sizes)
    if count > devices.size:
        raise ValueError(f"axes: got {dict(mesh_axes)}, wants at most {devices.size} devices")
    return Mesh(devices[:count].reshape(sizes), names)


def _compile_case(chip: Chip, case: Case, workload: Workload) -> CompiledCase:
    leaves, structure = jax.tree.flatten(list(workload.args))
    values = [None if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf) for leaf in leaves]
    with compiling_for(chip, workload.mesh_axes) as replicated:
        shardings = [NamedSharding(replicated.mesh, spec) for spec in _partition_spec_per_leaf(workload)]
        argument_shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, shardings, strict=True)
        ]
        args = jax.tree.unflatten(structure, argument_shapes)
        started = time.perf_counter()
        lowered = jax.jit(workload.function).trace(*args).lower(lowering_platforms=("tpu",))
        lowered_at = time.perf_counter()
        executable = lowered.compile(compiler_options=case.options())
        compiled_at = time.perf_counter()
        calls = pallas_calls(workload.function, args, values)
    return CompiledCase(executable.as_text() or "", calls, lowered_at - started, compiled_at - lowered_at)


def _partition_spec_per_leaf(workload: Workload) -> list[PartitionSpec]:
    """Returns the partition spec of each leaf of the arguments."""
    specs = [PartitionSpec()] * len(workload.args) if workload.partition_specs is None else workload.partition_specs
    pairs = zip(specs, workload.args, strict=True)
    return [spec for spec, arg in pairs for _ in jax.tree.leaves(arg)]


def _simulate_kernels(chip: Chip, case: Case, compiled: CompiledCase, dump_folder: Path) -> Generator[KernelReport]:
    left = list(compiled.pallas_calls)
    for name in _KERNEL_NAME_PATTERN.findall(compiled.hlo):
        call = _find_pallas_call(name, left)
        if call is not None:
            left.remove(call)
        yield _simulate_kernel(chip, case, name, call, dump_folder)


def _find_pallas_call(name: str, pallas_calls: Sequence[PallasCall]) -> PallasCall | None:
    """Returns the call that a kernel came from: the first of the same name, or else the first of all."""
    base = name.partition(".")[0]
    return next((call for call in pallas_calls if call.name == base), pallas_calls[0] if pallas_calls else None)


def _simulate_kernel(chip: Chip, case: Case, name: str, call: PallasCall | None, dump_folder: Path) -> KernelReport:
    bundles, utilisation, allocations = (
        _read_dump(dump_folder, name, kind) for kind in (_BUNDLES_SUFFIX, _UTILISATION_SUFFIX, _ALLOCATIONS_SUFFIX)
    )
    if not bundles:
        raise FileNotFoundError(f"libtpu wrote no bundles of kernel {name}")
    schedule = CompiledKernel(chip, bundles, utilisation, allocations)
    scalars = call.scalar_operands if call else ()
    known = {number: pack_words(value) for number, value in enumerate(scalars) if value is not None}
    simulation = schedule.run(known, seconds=case.max_simulation_seconds)
    return KernelReport(
        name=name,
        target=chip.name,
        grid=call.grid if call else (),
        utilisation=schedule.utilisation,
        loops=schedule.loops(simulation.entries_per_block),
        vmem_bytes=schedule.vmem_bytes,
        known_operand_indices=tuple(known),
        simulation=simulation,
    )


def _read_dump(dump_folder: Path, name: str, file_suffix: str) -> str:
    """Returns the text of a kernel's dump, whose file is named `<time>-<kernel>-<pass>-<kind>`; empty if there is
    none.
    """
    wanted = re.compile(rf"\d+-{re.escape(name)}-\d+-{re.escape(file_suffix)}")
    found = next((path for path in sorted(dump_folder.iterdir()) if wanted.fullmatch(path.name)), None)
    return found.read_text(errors="replace") if found else ""
