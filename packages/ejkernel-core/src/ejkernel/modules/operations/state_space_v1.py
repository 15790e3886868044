"""The state space model of Mamba-1: a selective scan, with an optional gate after it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families import selective_scan
from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.modules.operations.cases import state_space_v1 as cases
from ejkernel.modules.operations.configs import StateSpaceV1Config
from ejkernel.modules.operations.shared.conditions import conditions_of_states
from ejkernel.modules.operations.shared.recurrences import check_packing, check_states, rank
from ejkernel.modules.operations.shared.shapes import (
    as_flag,
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_shape,
    got,
)
from ejkernel.modules.operations.shared.step_sizes import as_step_size_limits, check_step_size_bias, step_sizes
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.invariant_rows import compute_rows
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation

AXES_BY_ARGUMENT = {
    "hidden_states": "B T I",
    "A": "I E",
    "B": "B T E",
    "C": "B T E",
    "D": "I",
    "dt": "B T I",
    "gate": "B T I",
    "conv_state": "B I d_conv",
}


@document_options
def state_space_v1(
    hidden_states: Float[Array, "b t i"],
    A: Float[Array, "i e"],
    B: Float[Array, "b t e"],
    C: Float[Array, "b t e"],
    D: Float[Array, " i"] | None,
    dt: Float[Array, "b t i"],
    gate: Float[Array, "b t i"] | None = None,
    initial_state: Float[Array, "n i e"] | None = None,
    conv_state: Float[Array, "b i c"] | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    *,
    state_indices: Integer[Array, " n"] | None = None,
    dt_bias: Float[Array, " i"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    act_fn: Callable[[jax.Array], jax.Array] | None = None,
    platform: str | None = None,
    cfg: StateSpaceV1Config | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "b t i"], Float[Array, "b i e"], Float[Array, "b i c"] | None]:
    """Computes the selective scan of Mamba-1 (Gu & Dao 2023, arXiv:2312.00752).

    Shape letters: B rows, T tokens, I channels, E numbers per state. The formula is in
    `ejkernel.families.selective_scan`. Between chunks only their states are kept, forward and backward.

    Over devices, rows, channels and tokens can be split, states cannot.

    Args:
        hidden_states: [B, T, I] float16, bfloat16, float32 or float64: x.
        A: [I, E] floating, real and negative; a model that learns its logarithm passes `-exp(A_log)`.
        B: [B, T, E] floating, what each token writes.
        C: [B, T, E] floating, what each token reads.
        D: [I] floating, weight of the skip connection; None for none.
        dt: [B, T, I] floating, the step of each token; after softplus, unless `dt_softplus` takes it.
        gate: [B, T, I] floating; the output is multiplied with `act_fn(gate)`.
        initial_state: [B, I, E] floating, the state before the first token; None is zeros. [N, I, E] of packed
            sequences.
        conv_state: [B, I, d_conv] floating, state of the convolution in front of the scan, which is the caller's;
            handed back as it is, so that a layer's state is what the call returns.
        cu_seqlens: [N + 1] int cumulative lengths of N packed sequences, with B = 1; each has a separate state. May
            be traced; an eager call waits for the values and checks them. Sequences may be empty. Padding tokens
            have output 0.
        state_indices: [N] int, with cu_seqlens: initial_state is slots, [slots, I, E], and sequence n continues the
            state in slot `state_indices[n]` and stores it there. Sequences with tokens have different slots; a sequence
            whose index is out of range, such as -1, starts from zeros, and its state is not kept. The state that is
            returned is the slots, in their dtype; donate them under `jax.jit`.
        dt_bias: [I] floating, added to dt before the softplus. Differentiable.
        dt_softplus: Take the softplus of dt, so that dt is what the layer projects.
        dt_limit: (lower, upper), limits of the step sizes after the softplus; the upper one may be infinite. Steps past
            a limit have no gradient.
        act_fn: Activation of the gate, a function of an array in the accumulator's dtype; None is `jax.nn.silu`. Goes
            with a gate. A call is traced again for every new function object.

    Returns:
        Output [B, T, I] in the dtype of hidden_states, final state [B, I, E], or [N, I, E] of packed sequences, in
        float32 (float64 for float64), and conv_state.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import state_space_v1

        x = jax.random.normal(jax.random.key(0), (2, 100, 32))
        A, D = -jnp.arange(1.0, 17.0) * jnp.ones((32, 1)), jnp.ones(32)
        B, C = jax.random.normal(jax.random.key(1), (2, 2, 100, 16))
        dt = jax.nn.softplus(x - 4)
        y, state, _ = state_space_v1(x, A, B, C, D, dt)
        first, middle, _ = state_space_v1(x[:, :60], A, B[:, :60], C[:, :60], D, dt[:, :60])
        rest, last, _ = state_space_v1(x[:, 60:], A, B[:, 60:], C[:, 60:], D, dt[:, 60:], initial_state=middle)
        assert jnp.allclose(jnp.concatenate([first, rest], axis=1), y, atol=1e-5)
        assert jnp.allclose(last, state, atol=1e-5)
        ```
    """
    return run_operation(OP, locals())


class StateSpaceV1Arguments(ArgumentRecord, of=state_space_v1):
    """The arguments of a call of `state_space_v1`."""

    def __post_init__(self) -> None:
        if self.act_fn is not None and not callable(self.act_fn):
            raise ValueError(f"act_fn: got {got(self.act_fn)}, wants a function of an array")
        if self.act_fn is not None and self.gate is None:
            raise ValueError(f"act_fn: got {got(self.act_fn)} without gate, wants both or None")
        object.__setattr__(self, "dt_softplus", as_flag("dt_softplus", self.dt_softplus))
        object.__setattr__(self, "dt_limit", as_step_size_limits(self.dt_limit))
        if self.cu_seqlens is not None and rank(self.hidden_states) == 3:
            check_cumulative_lengths("cu_seqlens", self.cu_seqlens, 1, self.hidden_states.shape[1])


def validate(args: StateSpaceV1Arguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name, axes in AXES_BY_ARGUMENT.items():
        array = getattr(args, name)
        if args.cu_seqlens is not None and name == "conv_state":
            axes = axes.replace("B", "N")
        if array is not None:
            check_shape(name, array, axes, sizes)
            check_dtype(name, array, jnp.floating, "a floating dtype")
        if name == "hidden_states" and args.cu_seqlens is not None:
            check_packing(args.cu_seqlens, sizes)
    check_step_size_bias(args, "I", sizes)
    check_states(args, "I E", sizes)
    check_not_empty("hidden_states", args.hidden_states, "B T I", "T I")
    check_not_empty("A", args.A, "I E", "E")


def lower(args: StateSpaceV1Arguments) -> SelectiveScan:
    """Returns the selective-scan record of a call."""
    return SelectiveScan(
        x=args.hidden_states,
        step=step_sizes(args),
        decay=args.A,
        write=args.B,
        read=args.C,
        skip=jnp.zeros(args.A.shape[0], args.A.dtype) if args.D is None else args.D,
        initial_state=args.initial_state,
        cu_seqlens=args.cu_seqlens,
        state_slots=args.state_indices,
    )


def finish(args: StateSpaceV1Arguments, output: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    """Returns what the public function returns."""
    y, state = output
    if args.gate is not None:
        gate = args.gate.astype(jnp.promote_types(y.dtype, jnp.float32))
        # The caller's function may read traced arrays, so it gets the whole array.
        gated = _gated if args.act_fn is None else _multiplied
        y = compute_rows(gated, (y, gate if args.act_fn is None else args.act_fn(gate)), axes=2)
    return y, state, args.conv_state


def _gated(y: jax.Array, gate: jax.Array) -> jax.Array:
    return _multiplied(y, jax.nn.silu(gate))


def _multiplied(y: jax.Array, factor: jax.Array) -> jax.Array:
    return (y.astype(jnp.promote_types(y.dtype, jnp.float32)) * factor).astype(y.dtype)


class StateSpaceV1(Kernel[StateSpaceV1Config, tuple[Array, Array, Any]]):
    """Wraps `state_space_v1` in an object that an `Executor` can call."""


OP = Op(
    arguments=StateSpaceV1Arguments,
    family=selective_scan.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions_of_states("hidden_states"),
    cases=cases.cases(StateSpaceV1Arguments),
    tolerance=tolerances(float64=1e-10, float32=3e-5, bfloat16=2e-2, float16=3e-3),
    make_inputs=cases.make_inputs,
    axes={"initial_state": "b i e", "cu_seqlens": "n"},
    finish=finish,
    output=("b t i", "b i e", "b i c"),
)
StateSpaceV1.op = OP
