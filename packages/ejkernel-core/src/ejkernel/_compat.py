"""The few places where JAX moved something, or has no public door yet."""

import contextlib
import threading
from collections.abc import Generator
from typing import Any

import jax
from jax.core import Tracer

_described_tpu_lock = threading.RLock()


def coordination_client() -> Any | None:
    """Returns the key-value client of `jax.distributed`, or None in a single-process job."""
    from jax._src import distributed

    return distributed.global_state.client


def process_index() -> int:
    """Returns number of this process in its job, for which no backend is started: 0 unless the job says otherwise."""
    from jax._src import distributed, xla_bridge

    if xla_bridge.backends_are_initialized():
        return jax.process_index()
    return distributed.global_state.process_id


def is_tracer(value: Any) -> bool:
    """Returns whether `value` stands for an array inside a trace."""
    return isinstance(value, Tracer)


def default_device() -> Any:
    """Returns the device JAX would put an uncommitted array on."""
    chosen: Any = jax.config.values["jax_default_device"]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def under_trace() -> bool:
    """Returns whether JAX is tracing on this thread, so that values are not available."""
    from jax._src import core

    return not core.trace_state_clean()


def ambient_mesh() -> Any | None:
    """Returns the mesh of `jax.set_mesh` or of a `with mesh:` block around the caller, or None."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    from jax._src import mesh as meshes

    mesh = meshes.thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array is known to vary; empty where `shard_map` does not keep
    track of that.
    """
    aval: Any = jax.typeof(value)
    tracked = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ())) if tracked is None else frozenset(tracked.varying)


def as_varying(tree: Any, like: Any) -> Any:
    """Returns the arrays of a tree, taken to vary over every mesh axis that one of the arrays of `like` varies over.

    A loop's carry must have one type from the start, and constants do not vary over any axis.
    """
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(like)))
    if not axes:
        return tree

    def cast_to_varying(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast_to_varying, tree)


def as_varying_over(tree: Any, axis: str) -> Any:
    """Returns the arrays of a tree, taken to vary over a mesh axis, where `shard_map` keeps track of that."""
    from jax._src import config

    settings: Any = config
    if not settings._check_vma.value:
        return tree
    return jax.tree.map(lambda x: x if axis in varying_axes(x) else jax.lax.pcast(x, (axis,), to="varying"), tree)


def shape_varying_like(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """Returns a shape of something that varies over the mesh axes that an array varies over, for kernels to promise."""
    if not varying_axes(like):
        return jax.ShapeDtypeStruct(shape, dtype)
    aval: Any = jax.typeof(like)
    tracked = getattr(aval, "manual_axis_type", None)
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype, vma=aval.vma) if tracked is None else make(shape, dtype, manual_axis_type=tracked)


@contextlib.contextmanager
def trace_without_tpu() -> Generator[None]:
    """Lets JAX trace pipelines of TPU kernels on a machine without a TPU, such as one that exports programs.

    The pipelines depend on the chip: chips before v4 lay arrays out in another way.
    """
    from jax._src.pallas.mosaic import tpu_info

    info: Any = tpu_info
    if info.is_tpu_device():
        yield
        return
    with _described_tpu_lock:
        kind, kinds = info.get_device_kind(), dict(info.registry)
        info.registry.setdefault(kind, lambda: info.get_tpu_info_for_chip(info.ChipVersion.TPU_V5E, 1))
        try:
            yield
        finally:
            if kind not in kinds:
                info.registry.pop(kind)


def aval_varying_like(shape: tuple[int, ...], dtype: Any, avals: Any) -> Any:
    """Returns an abstract array that varies over every mesh axis that any of `avals` varies over."""
    from jax.core import ShapedArray

    create_shape: Any = ShapedArray
    tracked = next((aval for aval in avals if _is_varying(aval)), None)
    if tracked is None:
        return create_shape(shape, dtype)
    kind = getattr(tracked, "manual_axis_type", None)
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(tracked.sharding.mesh, spec)
    axes = {"vma": tracked.vma} if kind is None else {"manual_axis_type": kind}
    return create_shape(shape, dtype, sharding=sharding, **axes)


def _is_varying(aval: Any) -> bool:
    kind = getattr(aval, "manual_axis_type", None)
    return bool(getattr(aval, "vma", ()) if kind is None else kind.varying)
