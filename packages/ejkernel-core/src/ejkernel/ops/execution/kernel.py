"""Operations as classes, for code that carries them around as objects."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import jax

from ejkernel.errors import NoImplementationError
from ejkernel.ops.call import call, default_chain, make_plan
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.config.key import signature
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.dispatch import can_compute
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.lowering import lowered_record
from ejkernel.ops.model import Implementation, Op
from ejkernel.ops.params import BaseOperationConfig, Direction
from ejkernel.ops.plugins import registry

Cfg = TypeVar("Cfg", bound=BaseOperationConfig)
Out = TypeVar("Out")

# What heuristics are told about a platform that is not in this machine.
_TYPICAL_DEVICE_BY_PLATFORM = {
    "gpu": DeviceInfo(platform="gpu", vendor="nvidia", kind="gpu", compute_capability=9.0),
    "tpu": DeviceInfo(platform="tpu", vendor="google", kind="tpu"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Invocation:
    """One call, as data.

    Attributes:
        op_id: The operation's name.
        args: Positional arguments of the public function.
        kwargs: Keyword arguments; call options among them count where the fields below are None.
        batch_axes: Axes of a batch of calls, of `vmap_with_config`.
        override_cfg: The call's own configuration.
        stamp: Whether an executor's `stamp_prefix` counts.
        method: `"shard_map"` of a call under a mesh.
        mesh: With the two specs: run under `shard_map`.
        in_specs: Partition specs of the first arguments.
        out_specs: Partition spec of the output.
        check_vma: As of `jax.shard_map`.
    """

    op_id: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    batch_axes: Any = None
    override_cfg: BaseOperationConfig | None = None
    stamp: bool = True
    method: str | None = None
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None
    check_vma: bool = False

    def arguments(self) -> Any:
        """Returns the argument record of the call."""
        return self._bound_arguments[0]

    def options(self) -> dict[str, Any]:
        """Returns the call options that were given: `platform`, `cfg`, `mesh`, `in_specs`, `out_specs`."""
        call_options = {
            "cfg": self.override_cfg,
            "mesh": self.mesh,
            "in_specs": self.in_specs,
            "out_specs": self.out_specs,
        }
        merged = self._bound_arguments[1] | {name: value for name, value in call_options.items() if value is not None}
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def call_key(self) -> str:
        """Returns the signature of the call: shapes, dtypes and static arguments, platform, mesh and specs."""
        options = self.options()
        platform = options.get("platform") or getattr(options.get("cfg"), "platform", "auto")
        mesh, specs = options.get("mesh"), [options.get(name) for name in ("in_specs", "out_specs")]
        placed = "" if mesh is None else f" mesh={dict(mesh.shape)} in={specs[0]} out={specs[1]}"
        return f"{signature(self.arguments())} platform={platform}{placed}"

    def make_key(self, key_builder: Callable[["Invocation"], str] | None = None) -> str:
        """Returns the key of a call: `call_key`, or the result of `key_builder` for the call."""
        return self.call_key if key_builder is None else key_builder(self)

    @functools.cached_property
    def _bound_arguments(self) -> tuple[Any, dict[str, Any]]:
        return registry().op(self.op_id).bind(self.args, self.kwargs)


class Kernel(Generic[Cfg, Out]):
    """An operation as an object. Subclasses name their operation; everything else follows from its declaration.

    Attributes:
        op: The operation's declaration.
        key_builder: Makes the key under which a configuration of a kernel of the caller's own is kept, in the place of
            the shapes of the call.
    """

    op: ClassVar[Op]
    key_builder: Callable[[Invocation], str] | None = None

    def __init__(self, op_id: str | None = None) -> None:
        """Makes a kernel.

        Args:
            op_id: Name of a kernel of the caller's own, which has no `op`: see `ejkernel.ops.execution.custom_kernel`.

        Raises:
            ValueError: The kernel is one of an operation, which has a name.
        """
        if op_id is not None and not self.is_custom:
            raise ValueError(f"op_id: got {op_id!r}, wants None: {type(self).__name__} is {self.op.name!r}")
        self._custom_id = op_id

    @property
    def is_custom(self) -> bool:
        """Returns whether this is a kernel of the caller's own, without an operation."""
        return getattr(type(self), "op", None) is None

    @property
    def op_id(self) -> str:
        """Returns the name of the operation, or of the caller's own kernel."""
        if not self.is_custom:
            return self.op.name
        return self._custom_id or f"{type(self).__module__}.{type(self).__qualname__}"

    @property
    def version(self) -> str:
        """Returns the version of the operation's configurations."""
        return "0" if self.is_custom else self.op.version

    def invocation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Invocation:
        """Returns a call of this kernel, as data."""
        return Invocation(self.op_id, args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turns the arguments of `run` into those of the public function."""
        return args, kwargs

    def run(self, *args: Any, chain: ConfigSelectorChain | None = None, **kwargs: Any) -> Out:
        """Calls the operation; arguments as the public function's.

        Args:
            *args: Positional arguments.
            chain: Who is asked for configurations; None for the default chain.
            **kwargs: Keyword arguments, call options included.
        """
        args, kwargs = self.prepare(*args, **kwargs)
        record, options = self.op.bind(args, kwargs)
        return call(self.op, record, chain=chain, **options)

    def get_impl(self, cfg: Cfg) -> Callable[..., Out]:
        """Returns the operation with its configuration, and so its toolchain, fixed."""
        return functools.partial(self.run, cfg=cfg)

    def create_shard_map_wrapper(
        self,
        fn: Callable[..., Out],
        *args: Any,
        mesh: Any,
        in_specs: Any,
        out_specs: Any,
        check_vma: bool = False,
        **kwargs: Any,
    ) -> tuple[Callable[..., Out], tuple[Any, ...]]:
        """Returns `fn` (such as `run`) bound to a mesh, and the arguments to call it with.

        Raises:
            ValueError: `check_vma` is set: kernels are opaque to it.
        """
        if check_vma:
            raise ValueError(
                "check_vma: got True, wants False: JAX cannot infer over which axes the results of a kernel vary"
            )
        return functools.partial(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **kwargs), args

    def heuristic_cfg(self, inv: Invocation) -> Cfg:
        """Returns what the rules of the implementations that the call would use on this machine say.

        Raises:
            NoImplementationError: No implementation serves the call.
        """
        plan, record = self._plan_and_record(inv)
        choice = plan.choose_implementation(record, "forward")
        if choice.implementation is None:
            raise NoImplementationError(choice)
        return self._heuristic_of_implementation(choice.implementation, record, plan.device)

    def heuristic_cfg_gpu(self, inv: Invocation) -> Cfg:
        """Returns what the best registered GPU implementation's rule says."""
        return self._heuristic_of_best_implementation(inv, "gpu")

    def heuristic_cfg_tpu(self, inv: Invocation) -> Cfg:
        """Returns what the best registered TPU implementation's rule says."""
        return self._heuristic_of_best_implementation(inv, "tpu")

    def candidate_cfgs(self, inv: Invocation) -> tuple[Cfg, ...]:
        """Returns configurations worth measuring on this machine: of every implementation that could serve the call,
        the rule's first.
        """
        if self.is_custom:
            return (self.heuristic_cfg(inv),)
        plan, record = self._plan_and_record(inv)
        verdicts = plan.choose_implementation(record, "forward").verdicts
        serving = [v.implementation for v in verdicts if v.status != "refused"]
        return self._candidates_of_implementations(serving, record, plan.device)

    def candidate_cfgs_gpu(self, inv: Invocation) -> tuple[Cfg, ...]:
        """Returns configurations worth measuring on a GPU."""
        return self._candidates_of_implementations(*self._implementations_for(inv, "gpu"))

    def candidate_cfgs_tpu(self, inv: Invocation) -> tuple[Cfg, ...]:
        """Returns configurations worth measuring on a TPU."""
        return self._candidates_of_implementations(*self._implementations_for(inv, "tpu"))

    def candidate_cfgs_xla(self, inv: Invocation) -> tuple[Cfg, ...]:
        """Returns configurations worth measuring for the XLA implementations, on this machine's device."""
        plan, record = self._plan_and_record(inv)
        xla = [i for i in registry().implementations.get(plan.op.name, ()) if i.platform == "xla"]
        return self._candidates_of_implementations(xla, record, plan.device)

    # Under shard_map a kernel sees one shard. The code above also uses one shard for an invocation with a mesh.
    candidate_cfgs_shard_map_gpu = candidate_cfgs_gpu
    candidate_cfgs_shard_map_tpu = candidate_cfgs_tpu
    candidate_cfgs_shard_map_xla = candidate_cfgs_xla

    def _plan_and_record(self, inv: Invocation) -> tuple[CallPlan, Any]:
        """Returns how the call would be carried out, and the record that kernels would see, with shapes for arrays."""
        if self.is_custom:
            raise NotImplementedError(f"{type(self).__name__} has no rule: define heuristic_cfg")
        options, args = inv.options(), inv.arguments()
        plan = make_plan(self.op, args, options.get("platform"), options.get("cfg"), default_chain())
        lower = functools.partial(lowered_record, plan.op, mesh=options.get("mesh"), in_specs=options.get("in_specs"))
        return plan, jax.eval_shape(lower, args)

    def _implementations_for(self, inv: Invocation, platform: str) -> tuple[list[Implementation], Any, DeviceInfo]:
        """Returns implementations that serve the call on a kind of device, best first; record and device to ask them
        about.
        """
        plan, record = self._plan_and_record(inv)
        device = plan.device if plan.device.platform == platform else _TYPICAL_DEVICE_BY_PLATFORM[platform]
        everything = registry().implementations.get(plan.op.name, ())
        fitting = [i for i in everything if i.requires.devices & device.names]
        serving = [i for i in fitting if can_compute(plan.op.family, i, record, "forward")]
        return sorted(serving, key=lambda i: (-i.priority_for(record, device), i.name)), record, device

    def _heuristic_of_best_implementation(self, inv: Invocation, platform: str) -> Cfg:
        implementations, record, device = self._implementations_for(inv, platform)
        if not implementations:
            raise NotImplementedError(f"no registered implementation of {self.op.name} serves this call on {platform}")
        return self._heuristic_of_implementation(implementations[0], record, device)

    def _heuristic_of_implementation(self, implementation: Implementation, record: Any, device: DeviceInfo) -> Cfg:
        if implementation.paired:
            return self._public_config(implementation, implementation.config.heuristic(record, device, "both"), None)
        directions: tuple[Direction, ...] = ("forward", "backward")
        parts = (
            implementation.config.heuristic(record, device, direction)
            if can_compute(self.op.family, implementation, record, direction)
            else None
            for direction in directions
        )
        return self._public_config(implementation, *parts)

    def _candidates_of_implementations(
        self, implementations: Iterable[Implementation], record: Any, device: DeviceInfo
    ) -> tuple[Cfg, ...]:
        configs: list[Cfg] = []
        for implementation in implementations:
            space, rule = implementation.config, self._heuristic_of_implementation(implementation, record, device)
            forward, backward = rule.part("forward"), rule.part("backward")
            parts = space.candidates(record, device, "both" if implementation.paired else "forward")
            configs += [rule, *(self._public_config(implementation, part, backward) for part in parts)]
            if backward is not None:
                parts = space.candidates(record, device, "backward")
                configs += [self._public_config(implementation, forward, part) for part in parts]
        return tuple(dict.fromkeys(configs))

    def _public_config(self, implementation: Implementation, forward: Any, backward: Any) -> Cfg:
        config: Any = implementation.config.to_public_config(self.op.config, forward, backward)
        return dataclasses.replace(config, platform=implementation.platform, backend=implementation.backend)
