"""An operation and backends so small that what the engine does with them is all there is to see.

`toy(x, bias)` is `x ** power + bias`. Its kernels note what they are called with, at trace time, in `SEEN`.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import jax

from ejkernel.ops import (
    BaseOperationConfig,
    BwdParams,
    Case,
    ConfigSpace,
    Family,
    FwdParams,
    Implementation,
    Kernel,
    Op,
    Requires,
    arguments,
    call,
    hookimpl,
    static,
    tolerances,
)
from ejkernel.ops.call import make_plan

SEEN: list[tuple[str, str, Any]] = []
"""(implementation, direction, configuration part) of every kernel trace."""

Blocks = tuple[int, ...]
ALL_FIELDS = frozenset(f.name for f in dataclasses.fields(FwdParams))


@arguments
class ToyArguments:
    x: jax.Array
    bias: jax.Array | None = None
    power: int = static(2)
    scale: float = static(1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(BaseOperationConfig):
    part_types: ClassVar[dict[str, type]] = {"forward": FwdParams, "backward": BwdParams}

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None

    def part(self, direction: str) -> Any:
        return self.fwd_params if direction == "forward" else self.bwd_params

    @classmethod
    def from_parts(cls, forward: Any, backward: Any) -> Self:
        return cls(fwd_params=forward, bwd_params=backward)


def toy(
    x: Any, bias: Any = None, /, *, power: int = 2, scale: float = 1.0, platform=None, cfg=None, mesh=None,
    in_specs=None, out_specs=None, chain=None,
) -> Any:  # fmt: skip
    args = ToyArguments(x=x, bias=bias, power=power, scale=scale)
    options = {"platform": platform, "cfg": cfg, "mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return call(OP, args, chain=chain, **options)


def validate(args: ToyArguments) -> None:
    if args.x.ndim != 2:
        raise ValueError(f"x: got shape {args.x.shape}, wants [T, D]")


def value(record: ToyArguments) -> Any:
    output = record.scale * record.x**record.power
    return output if record.bias is None else output + record.bias


def make_inputs(args: Any, key: Any) -> Any:
    MADE.append(jax.tree.map(lambda x: (x.shape, x.dtype.name), args))
    return jax.tree.map(lambda x: jax.random.normal(key, x.shape, x.dtype), args)


MADE: list[Any] = []

FAMILY = Family(
    name="toy",
    record=ToyArguments,
    differentiable=("x", "bias"),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.x.shape[-1],),
    axes={"x": "t d", "bias": "t d", "output": "t d"},
    shardable="t",
    aligned=(),
    apply_shard_offsets=lambda record, offsets: record,
    reference=lambda record: (value(record), ()),
)

OP = Op(
    name="toy",
    function=toy,
    arguments=ToyArguments,
    family=FAMILY,
    config=ToyConfig,
    validate=validate,
    lower=lambda args: args,
    reference=value,
    cases=(Case(name="plain", make=lambda key: ToyArguments(x=jax.random.normal(key, (4, 8)))),),
    tolerance=tolerances(float32=1e-6),
    make_inputs=make_inputs,
    axes={"x": "t d", "bias": "t d"},
)


def forward(name: str, record: Any, config: Any) -> tuple[Any, Any]:
    SEEN.append((name, "forward", config))
    return value(record), ()


def backward(name: str, pullback: Any, config: Any) -> dict[str, Any]:
    SEEN.append((name, "backward", config))
    return jax.vjp(value, pullback.record)[1](pullback.cotangent)[0].__dict__


def slow_or_fast(record: Any, config: Any) -> tuple[Any, Any]:
    """With `q_blocksize` 1 it does 400 times the work in a short program, with 2 the work once in a long one."""
    step = record.x @ record.x.T @ record.x
    if config.q_blocksize == 1:
        return jax.lax.fori_loop(0, 400, lambda i, x: x @ record.x.T @ record.x * 1e-6, step), ()
    for _ in range(300):
        step = step + 0
    return step, ()


def failing(record: Any, config: Any) -> tuple[Any, Any]:
    raise RuntimeError(f"no room for a tile of {config.q_blocksize}")


def __getattr__(name: str) -> Any:
    """`"toy:forward_<name>"` and `"toy:backward_<name>"`, any name: implementations name functions by import path."""
    direction, _, implementation = name.partition("_")
    if direction not in ("forward", "backward") or not implementation:
        raise AttributeError(name)
    return functools.partial({"forward": forward, "backward": backward}[direction], implementation)


def heuristic(record: Any, device: Any, direction: str) -> Any:
    return (FwdParams if direction == "forward" else BwdParams)(q_blocksize=64, kv_blocksize=64)


def candidates(blocks: Blocks) -> Callable[..., tuple[Any, ...]]:
    def listed(record: Any, device: Any, direction: str) -> tuple[Any, ...]:
        make = FwdParams if direction == "forward" else BwdParams
        return tuple(make(q_blocksize=b, kv_blocksize=64) for b in blocks)

    return listed


def space(heuristic: Callable[..., Any], candidates: Callable[..., Any]) -> ConfigSpace:
    """The configurations of kernels that have two of the public fields for their own."""
    public = {name: name for name in ("q_blocksize", "kv_blocksize")}
    return ConfigSpace(
        heuristic=heuristic, candidates=candidates, forward=FwdParams, backward=BwdParams, public_fields=public
    )


def implementation(
    name: str = "plain",
    *,
    platform: str = "xla",
    blocks: Blocks = (16, 32),
    handles: frozenset[str] = frozenset({"bias", "power", "scale"}),
    devices: frozenset[str] = frozenset({"cpu"}),
    extra: Callable[[Any], Any] = lambda record: (),
    dtypes: frozenset[str] = frozenset({"float32"}),
    **fields: Any,
) -> Implementation:
    """An implementation of `toy`; `fields` as `Implementation`'s."""
    requires = Requires(devices=devices, dtypes=dtypes, handles=handles, extra=extra)
    standard = {
        "forward": f"toy:forward_{name}",
        "backward": f"toy:backward_{name}",
        "gradients": frozenset({"x", "bias"}),
        "config": space(heuristic, candidates(blocks)),
    }
    return Implementation(family="toy", name=name, platform=platform, requires=requires, **standard | fields)


def plugin(*implementations: Implementation, name: str = "toy", ops: tuple[Op, ...] = (OP,), **entry: Any) -> Any:
    """An entry point of a backend with these implementations."""

    class Hooks:
        @hookimpl
        def ejkernel_ops(self) -> Any:
            return ops

        @hookimpl
        def ejkernel_implementations(self) -> Any:
            return implementations

    return entry_point(name, Hooks, **entry)


def entry_point(name: str, load: Callable[[], Any], version: str = "1.0", requires: tuple[str, ...] = ()) -> Any:
    """An entry point whose loading is `load`, of a distribution `<name>-dist`."""
    dist = SimpleNamespace(name=f"{name}-dist", version=version, requires=list(requires))
    return SimpleNamespace(name=name, dist=dist, load=load)


def seen(direction: str = "forward", since: int = 0) -> list[Any]:
    """Configuration parts that kernels of one direction were traced with."""
    return [part for _, traced, part in SEEN[since:] if traced == direction]


def blocks(part: Any) -> tuple[int | None, int | None]:
    """The two tile sizes of a part."""
    return part.q_blocksize, part.kv_blocksize


def request(chain: Any, x: Any, direction: Any = "forward", **options: Any) -> Any:
    """What a chain is asked about `toy(x)`."""
    record = ToyArguments(x=x)
    plan = make_plan(OP, record, options.get("platform"), options.get("cfg"), chain)
    return plan.request(plan.choose_implementation(record, direction), record)


class Toy(Kernel[ToyConfig, jax.Array]):
    """`toy` as an object."""

    op = OP
