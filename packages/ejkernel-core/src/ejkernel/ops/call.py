"""The one path of a call: record -> validate -> lower -> (shard_map) -> dispatch -> chain -> kernel."""

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ejkernel import _compat
from ejkernel.ops import recording, tuning, values
from ejkernel.ops.batch_invariance import GRADIENTS_NOTE
from ejkernel.ops.callers import caller_arguments, caller_platform, nested_call_notes
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.config.check_cfg import check_cfg, check_platform
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.tuner import Tuner
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.dispatch import Decision
from ejkernel.ops.grad import CallPlan, DeviceRun
from ejkernel.ops.isolation import NOT_ISOLATED_NOTE
from ejkernel.ops.model import CALL_OPTIONS, Op
from ejkernel.ops.params import BaseOperationConfig
from ejkernel.ops.plan_context import blocks_around_call
from ejkernel.ops.sharding import record_on_shard, run_sharded, specs_from_array_types
from ejkernel.ops.suspicions import suspicious_argument_warnings
from ejkernel.ops.tangents import forward_mode_note
from ejkernel.types.arguments import array_fields


@dataclasses.dataclass(frozen=True)
class CallSettings:
    """How a call is to be carried out; everything here is part of the jit cache key."""

    plan: CallPlan
    mesh: Any
    in_specs: tuple[Any, ...] | None
    out_specs: Any
    cache_generation: int


@functools.cache
def default_chain() -> ConfigSelectorChain:
    """Returns the chain of calls made through the public functions: the user's store, heuristics on a miss."""
    return ConfigSelectorChain(tuner=Tuner(), persistent=PersistentCache())


def call(
    op: Op,
    args: Any,
    *,
    platform: str | None = None,
    cfg: BaseOperationConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    chain: ConfigSelectorChain | None = None,
) -> Any:
    """Runs an operation.

    Args:
        op: The operation.
        args: Its argument record.
        platform: A toolchain, or `"auto"`; None takes the configuration's.
        cfg: Configuration for this call alone.
        mesh: With `in_specs` and `out_specs`: run under `shard_map`. Without the three, arrays whose types say how
            they are sharded, as under `jax.set_mesh` with explicit axes, are taken at their word.
        in_specs: Partition specs of the first arguments, in public order.
        out_specs: Partition spec of the output.
        chain: Who is asked for configurations; None for `default_chain()`.

    Raises:
        ValueError: The call is wrong.
        NoImplementationError: No implementation serves it.
    """
    chain = default_chain() if chain is None else chain
    values.check(op.conditions, args, op.validate if op.route is None else None)
    if op.route is not None:
        call_options = {"platform": platform, "cfg": cfg, "mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
        op, args, call_options = op.route(args, call_options)
        platform, cfg, mesh, in_specs, out_specs = (call_options[name] for name in CALL_OPTIONS)
    plan = make_plan(op, args, platform, cfg, chain)
    _check_mesh(mesh, in_specs, out_specs)
    specs = None if in_specs is None else _as_specs(in_specs)
    if plan.tunes_on_miss and not _is_traced_call(args) and _mesh_and_specs(plan.op, args, mesh, specs)[0] is None:
        tuning.tune_missing(plan, args)
    options = CallSettings(plan, mesh, specs, out_specs, chain.cache.generation)
    outer = caller_arguments.set(args)
    try:
        with _explained_jax_errors(op, args):
            return _compiled_function(options, args)
    finally:
        caller_arguments.reset(outer)


def make_plan(op: Op, args: Any, platform: str | None, cfg: Any, chain: ConfigSelectorChain) -> CallPlan:
    """Settles everything about a call but its arguments.

    Raises:
        ValueError: `cfg` is not the operation's configuration class, has a value that its fields do not have, or
            contradicts an argument; or the platform is unknown.
    """
    if cfg is not None:
        check_cfg(op, cfg, "cfg")
    cfg = op.configure(args, cfg)
    if platform is not None:
        check_platform(op, platform)
    chosen = platform or (cfg.platform if cfg is not None else "auto")
    return CallPlan(
        op=op,
        device=_device_of(args),
        platform=chosen,
        cfg=cfg,
        chain=chain,
        returns_lse=op.returns_residual_lse(args),
        **blocks_around_call(),
    )


def policy_notes(plan: CallPlan, record: Any) -> tuple[str, ...]:
    """Returns the notes of `explain` about a `batch_invariant` block, or about sequences that may affect each other."""
    if plan.batch_invariant:
        return (GRADIENTS_NOTE,)
    isolate = plan.op.family.request_isolation
    if isolate is None or plan.isolates_sequences or plan.op.padding_only or not isolate.may_share_tiles(record):
        return ()
    return (NOT_ISOLATED_NOTE,)


def decide(op: Op, args: Any, **options: Any) -> Decision:
    """Returns what `call` would do, without running or measuring anything.

    Args:
        op: The operation.
        args: Its argument record; arrays or `jax.ShapeDtypeStruct`s.
        **options: As for `call`. Under a mesh the decision is the one made for a shard.
    """
    chain = options.get("chain") or default_chain()
    op, args, options = op.routed_call(args, options)
    plan = make_plan(op, args, options.get("platform"), options.get("cfg"), chain)
    mesh, in_specs, out_specs = (options.get(name) for name in ("mesh", "in_specs", "out_specs"))
    _check_mesh(mesh, in_specs, out_specs)
    op = plan.op
    decisions: list[Decision] = []

    def explain_record(record: Any) -> Any:
        grad_fields = frozenset(op.family.differentiable) & set(array_fields(record))
        forward = plan.choose(record, "forward")
        nested = dict.fromkeys(nested_call_notes.get() or ())
        notes = (*forward.notes, *suspicious_argument_warnings(op, args), *policy_notes(plan, record), *nested)
        if plan.forward_mode and forward.implementation is not None:
            notes = (*notes, forward_mode_note(plan, record, grad_fields))
        forward = dataclasses.replace(forward, notes=notes)
        first, backward = plan.choose_both_passes(record, grad_fields)
        other = first.implementation not in (None, forward.implementation)
        decisions.append(
            Decision(
                forward=forward,
                backward=plan.choice_with_config(backward, record),
                differentiated_forward=plan.choice_with_config(first, record) if other else None,
            )
        )
        return record

    def explain_traced_call(args: Any) -> Any:
        op.validate(args)
        placed, specs = _mesh_and_specs(op, args, mesh, in_specs)
        if placed is not None:
            return record_on_shard(op, args, placed, _as_specs(specs), out_specs, explain_record)
        return explain_record(op.lower(args))

    context = _context({caller_arguments: args, caller_platform: plan.platform, nested_call_notes: []})
    with context, _explained_jax_errors(op, args):
        jax.eval_shape(explain_traced_call, args)
    return decisions[0]


@contextlib.contextmanager
def _context(values: Mapping[Any, Any]) -> Generator[None]:
    """Sets context variables, and sets them back at the end."""
    tokens = {variable: variable.set(value) for variable, value in values.items()}
    try:
        yield
    finally:
        for variable, token in tokens.items():
            variable.reset(token)


# Not inlined: an eager `jax.grad` would run the backward pass outside of `jit`, and compile its loops in every call.
@functools.partial(jax.jit, static_argnums=0)
def _compiled_function(options: CallSettings, args: Any) -> Any:
    plan = options.plan
    plan.op.validate(args)
    mesh, specs = _mesh_and_specs(plan.op, args, options.mesh, options.in_specs)
    recording.record_call(plan, args, mesh, specs)
    run = DeviceRun(plan)
    outer = caller_platform.set(plan.platform)
    try:
        if mesh is not None:
            return run_sharded(plan.op, args, mesh, specs or (), options.out_specs, run)
        return plan.op.finish(args, run(plan.op.lower(args)))
    finally:
        caller_platform.reset(outer)


def _mesh_and_specs(op: Op, args: Any, mesh: Any, in_specs: Any) -> tuple[Any, Any]:
    """Returns the mesh and the specs of a call: its own or, where it has none, those of its arrays' types."""
    return (mesh, in_specs) if mesh is not None else specs_from_array_types(op, args)


def _check_mesh(mesh: Any, in_specs: Any, out_specs: Any) -> None:
    sharding_options = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    missing = [name for name, value in sharding_options.items() if value is None]
    if 0 < len(missing) < len(sharding_options):
        raise ValueError(f"{', '.join(missing)}: got None, wants a value: mesh, in_specs and out_specs go together")
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise ValueError(f"mesh: got {type(mesh).__name__}, wants a jax.sharding.Mesh")


def _as_specs(in_specs: Any) -> tuple[Any, ...]:
    if isinstance(in_specs, PartitionSpec) or not isinstance(in_specs, tuple | list):
        raise ValueError(f"in_specs: got {in_specs!r}, wants a tuple with a PartitionSpec for each argument")
    return tuple(in_specs)


def _device_of(args: Any) -> DeviceInfo:
    return current_device(next(iter(jax.tree.leaves(args)), None))


def _is_traced_call(args: Any) -> bool:
    return _compat.under_trace() or any(_compat.is_tracer(leaf) for leaf in jax.tree.leaves(args))


@contextlib.contextmanager
def _explained_jax_errors(op: Op, args: Any) -> Generator[None]:
    """Raises the errors of JAX that `_explain_jax_error` explains in its words."""
    try:
        yield
    except (TypeError, jax.errors.InconclusiveDimensionOperation, jax.dtypes.TypePromotionError) as error:
        raise _explain_jax_error(op, args, error) from error


def _explain_jax_error(op: Op, args: Any, error: Exception) -> Exception:
    """Returns an error of JAX in words about the call: forward-mode derivatives, symbolic dimensions, unhashable
    values, dtypes of 8 bits.
    """
    if "forward-mode autodiff (jvp)" in str(error):
        return NotImplementedError(
            f"{op.name} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize): use jax.grad or jax.vjp, "
            "or make the call under `ejkernel.ops.forward_mode()`"
        )
    if isinstance(error, jax.dtypes.TypePromotionError):
        return _name_narrow_arguments(op, args, error)
    symbolic = {name: x.shape for name, x in array_fields(args).items() if _has_symbolic_size(x)}
    if symbolic:
        shapes = ", ".join(f"{name} {list(map(str, shape))}" for name, shape in symbolic.items())
        return NotImplementedError(
            f"{op.name}: the chosen kernels need sizes that are numbers, got symbolic dimensions in {shapes}: export a "
            "program for every size"
        )
    return _name_unhashable_argument(op, args, error)


def _name_narrow_arguments(op: Op, args: Any, error: Exception) -> Exception:
    """Names the arguments of 8-bit floats, which JAX does not promote; without one, the error stays as it was."""
    narrow = {name: x.dtype.name for name, x in array_fields(args).items() if _is_narrow_float(x)}
    if not narrow:
        return error
    return NotImplementedError(
        f"{', '.join(narrow)}: got {', '.join(dict.fromkeys(narrow.values()))}, {op.name} wants floats of 16 bits or "
        "more in this call"
    )


def _is_narrow_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 16


def _has_symbolic_size(value: Any) -> bool:
    return not all(isinstance(size, int) for size in getattr(value, "shape", ()))


def _name_unhashable_argument(op: Op, args: Any, error: Exception) -> Exception:
    """Names the argument that should have been a plain Python value; any other error stays as it was."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.metadata.get("static"):
            try:
                hash(value)
            except TypeError:
                got = type(value).__name__
                return ValueError(f"{field.name}: got {got}, {op.name} wants a hashable Python value")
    return error
