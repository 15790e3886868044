"""The Mamba-2 state space layer: one decay per head, inputs and outputs shared by groups of heads."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from ejkernel.families import linear_recurrence
from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.modules.operations.cases import recurrence as recurrence_cases
from ejkernel.modules.operations.cases import state_space as state_space_cases
from ejkernel.modules.operations.configs import StateSpaceV2Config
from ejkernel.modules.operations.shared.conditions import conditions_of_states, conditions_of_trees
from ejkernel.modules.operations.shared.recurrences import (
    TOLERANCE,
    check_floating,
    check_packing,
    check_parents_shape_and_dtype,
    check_states,
    check_token_states_are_of_trees,
    to_float32_or_wider,
    tree_fields,
)
from ejkernel.modules.operations.shared.repeated import check_config_agrees_with_call
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_flag,
    as_number,
    as_precision,
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
    got,
)
from ejkernel.modules.operations.shared.step_sizes import as_step_size_limits, check_step_size_bias, step_sizes
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.invariant_rows import compute_rows
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


@document_options
def state_space_v2(
    x: Float[Array, "b t h p"],
    A: Float[Array, " h"],
    B: Float[Array, "b t g e"],
    C: Float[Array, "b t g e"],
    D: Float[Array, " h"] | None,
    dt: Float[Array, "b t h"],
    gate: Float[Array, "b t h*p"] | None = None,
    initial_state: Float[Array, "n h p e"] | None = None,
    conv_state: Float[Array, "b i c"] | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    *,
    state_indices: Integer[Array, " n"] | None = None,
    dt_bias: Float[Array, " h"] | None = None,
    dt_softplus: bool = False,
    parents: Integer[Array, "b t"] | None = None,
    return_token_states: bool = True,
    dt_limit: tuple[float, float] | None = None,
    n_groups: int | None = None,
    act_fn: Callable[[jax.Array], jax.Array] | None = None,
    use_gated_rmsnorm: bool = False,
    rmsnorm_eps: float = 1e-5,
    norm_before_gate: bool = True,
    norm_group_size: int | None = None,
    precision: Any = None,
    platform: str | None = None,
    cfg: StateSpaceV2Config | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "b t h*p"], Float[Array, "b h p e"] | Float[Array, "b t h p e"], Float[Array, "b i c"] | None]:
    """Computes the Mamba-2 state space layer chunk by chunk (Dao & Gu 2024, arXiv:2405.21060).

    For each head, with state h of shape [P, E] and its group's B and C (head i belongs to group `i // (H // G)`):

        h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T
        y_t = h_t C_t + D x_t

    Over devices, batch, heads and tokens can be split.

    Args:
        x: [B, T, H, P] float16, bfloat16, float32 or float64.
        A: [H] floating, real and negative: `-exp(A_log)`. Differentiable, as are all arrays here.
        B: [B, T, G, E], dtype of x; H is a multiple of G.
        C: [B, T, G, E], dtype of x.
        D: [H] floating, weight of the skip connection; None for none.
        dt: [B, T, H] floating step sizes; after softplus, unless `dt_softplus` takes it.
        gate: [B, T, H * P] floating; multiplies the output with `act_fn(gate)`.
        initial_state: [B, H, P, E] floating, the state before the first token; None is zeros. [N, H, P, E] of packed
            sequences.
        conv_state: Anything; returned as it is.
        cu_seqlens: [N + 1] int cumulative lengths of N packed sequences, with B = 1; each has a separate state. May
            be traced; an eager call waits for the values and checks them. Sequences may be empty.
        state_indices: [N] int, with cu_seqlens: initial_state is slots, [slots, H, P, E], and sequence n continues the
            state in slot `state_indices[n]` and stores it there. Sequences with tokens have different slots; a sequence
            whose index is out of range, such as -1, starts from zeros, and its state is not kept. The state that is
            returned is the slots, in their dtype; donate them under `jax.jit`.
        dt_bias: [H] floating, added to dt before the softplus. Differentiable.
        dt_softplus: Take the softplus of dt, so that dt is what the layer projects.
        parents: [B, T] int, a tree of draft tokens to verify: the token that each token continues, by its index among
            those of its row or packed sequence, which is below its own; -1 continues the initial state. An output then
            depends on the token's ancestors alone, a state is returned for each token, and slots do not change:
            `ejkernel.modules.ragged.accept_states` stores those of the accepted tokens. May be traced; values that are
            not are checked.
        return_token_states: With `parents`, return the states after every token. False returns the initial states or
            slots as they are, and stores no state: `ejkernel.modules.ragged.accepted_tokens` lists the tokens to
            process again for the states after the accepted ones.
        dt_limit: (lower, upper), limits of the step sizes after the softplus; the upper one may be infinite. Steps past
            a limit have no gradient.
        n_groups: G; None takes it from B.
        act_fn: Activation of the gate; None is SiLU. Goes with a gate.
        use_gated_rmsnorm: Divide the output by its root mean square; has no weight, which the caller multiplies with,
            and needs a gate.
        rmsnorm_eps: Added to the mean square, > 0.
        norm_before_gate: Whether the norm comes before the gate. Mamba-2's own layer and most checkpoints gate first:
            False.
        norm_group_size: Channels that share a mean square, a divisor of H * P; None for all. Mamba-2 has a norm per
            group: `H * P // G`.
        precision: `jax.lax.Precision`, or its name, of the matrix products; means what it means to JAX on the device.
            None takes all digits of float32 and wider inputs, unless `jax.default_matmul_precision` says otherwise.

    Returns:
        y [B, T, H * P] in x's dtype, the state after the last token [B, H, P, E], or of every packed sequence
        [N, H, P, E], float32 (float64 for float64 inputs), and conv_state. With `parents` the states are those after
        every token, [B, T, H, P, E], or without `return_token_states` those before the tokens.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import state_space_v2

        x = jax.random.normal(jax.random.key(0), (1, 128, 8, 16))
        B, C = jax.random.normal(jax.random.key(1), (2, 1, 128, 2, 32))
        dt = jax.nn.softplus(jax.random.normal(jax.random.key(2), (1, 128, 8)))
        y, state, _ = state_space_v2(x, -jnp.arange(1.0, 9.0), B, C, jnp.ones(8), dt, n_groups=2)
        assert y.shape == (1, 128, 128) and state.shape == (1, 8, 16, 32)
        ```
    """
    return run_operation(OP, locals())


class StateSpaceV2Arguments(ArgumentRecord, of=state_space_v2):
    """The arguments of a call of `state_space_v2`."""

    def __post_init__(self) -> None:
        groups, size = self.n_groups, self.norm_group_size
        if self.act_fn is not None and not callable(self.act_fn):
            raise ValueError(f"act_fn: got {got(self.act_fn)}, wants a function of an array")
        if self.act_fn is not None and self.gate is None:
            raise ValueError(f"act_fn: got {got(self.act_fn)} without gate, wants both or None")
        canonical = {
            "n_groups": None if groups is None else as_count("n_groups", groups, 1),
            "dt_softplus": as_flag("dt_softplus", self.dt_softplus),
            "dt_limit": as_step_size_limits(self.dt_limit),
            "return_token_states": as_flag("return_token_states", self.return_token_states),
            "use_gated_rmsnorm": as_flag("use_gated_rmsnorm", self.use_gated_rmsnorm),
            "rmsnorm_eps": as_number("rmsnorm_eps", self.rmsnorm_eps, greater_than=0),
            "norm_before_gate": as_flag("norm_before_gate", self.norm_before_gate),
            "norm_group_size": None if size is None else as_count("norm_group_size", size, 1),
            "precision": as_precision("precision", self.precision),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)
        if self.cu_seqlens is not None and len(getattr(self.x, "shape", ())) == 4:
            check_cumulative_lengths("cu_seqlens", self.cu_seqlens, 1, self.x.shape[1])


def validate(args: StateSpaceV2Arguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name, axes in (("x", "B T H P"), ("B", "B T G E"), ("C", "B T G E")):
        check_shape(name, getattr(args, name), axes, sizes)
        check_not_empty(name, getattr(args, name), axes, axes.removeprefix("B "))
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_same_dtype({name: getattr(args, name) for name in ("x", "B", "C")})
    if sizes["H"] % sizes["G"]:
        raise ValueError(
            f"B: got shape {args.B.shape} with {sizes['G']} groups, wants a divisor of x's {sizes['H']} heads"
        )
    if args.n_groups not in (None, sizes["G"]):
        raise ValueError(f"n_groups: got {args.n_groups}, wants the {sizes['G']} groups of B")
    for name, axes in (("A", "H"), ("dt", "B T H")):
        check_shape(name, getattr(args, name), axes, sizes)
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_floating("D", args.D, "H", sizes)
    check_step_size_bias(args, "H", sizes)
    check_floating("gate", args.gate, "B T H*P", sizes | {"H*P": sizes["H"] * sizes["P"]})
    if args.cu_seqlens is not None:
        check_packing(args.cu_seqlens, sizes)
    check_states(args, "H P E", sizes)
    check_parents_shape_and_dtype(args, sizes)
    check_token_states_are_of_trees(args.parents, args.return_token_states)
    if args.use_gated_rmsnorm and args.gate is None:
        raise ValueError("gate: got None with use_gated_rmsnorm=True, wants [B, T, H*P]")
    _check_norm(args, sizes["H"] * sizes["P"])


def _check_norm(args: StateSpaceV2Arguments, channels: int) -> None:
    """Refuses options of a norm that the call does not have, and groups that do not fit."""
    if not args.use_gated_rmsnorm:
        for name, default in (("norm_before_gate", True), ("norm_group_size", None)):
            if (value := getattr(args, name)) != default:
                raise ValueError(f"{name}: got {value} without a norm, wants use_gated_rmsnorm=True")
    elif channels % (args.norm_group_size or 1):
        raise ValueError(f"norm_group_size: got {args.norm_group_size}, wants a divisor of the {channels} channels")


def lower(args: StateSpaceV2Arguments) -> LinearRecurrence:
    """Returns the family's record of a call: C reads what B writes, and dt scales both the decay and
    what is written.
    """
    dt = to_float32_or_wider(step_sizes(args))
    return LinearRecurrence(
        query=args.C,
        key=args.B,
        value=args.x,
        softmax_scale=1.0,
        decay=(to_float32_or_wider(args.A) * dt)[..., None],
        dt=dt,
        skip=None if args.D is None else to_float32_or_wider(args.D)[None, None],
        **_state_fields(args),
        **tree_fields(args, args.return_token_states),
        transposed_states=True,
        precision=args.precision,
    )


def _state_fields(args: StateSpaceV2Arguments) -> dict[str, Any]:
    """Returns the record's fields of states, [..., P, E]: those of rows, or of packed sequences."""
    if args.cu_seqlens is None:
        return {"initial_state": args.initial_state}
    states = {"sequence_state": args.initial_state, "state_slots": args.state_indices}
    return {"cu_seqlens": args.cu_seqlens, **states}


def finish(args: StateSpaceV2Arguments, output: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the public results: with the skip connection, the normalisation and the gate."""
    read, state = output
    function = _NormAndGate(
        norm=None if not args.use_gated_rmsnorm else "before" if args.norm_before_gate else "after",
        group_size=args.norm_group_size,
        epsilon=args.rmsnorm_eps,
        activates_gate=args.act_fn is None,
    )
    gate = None if args.gate is None else to_float32_or_wider(args.gate)
    if gate is not None and args.act_fn is not None:
        gate = args.act_fn(gate)  # it may read traced arrays, so it gets the whole array
    y = compute_rows(function, (read,) if gate is None else (read, gate), axes=2)
    return y.astype(args.x.dtype), state, args.conv_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NormAndGate:
    """What a layer does to the output of the recurrence, for any rows and tokens.

    Attributes:
        norm: Whether the norm comes before or after the gate; None for no norm.
        group_size: Channels of a group of the norm; None for one group of all.
        epsilon: Added to mean squares.
        activates_gate: Whether the gate still has to go through its activation.
    """

    norm: Literal["before", "after"] | None
    group_size: int | None
    epsilon: float
    activates_gate: bool

    def __call__(self, read: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """Returns read [B, T, H, P] as normalised and gated [B, T, H*P]."""
        y = to_float32_or_wider(read)
        rows, tokens, heads, size = y.shape
        y = y.reshape(rows, tokens, heads * size)
        if self.norm == "before":
            y = self._normalised(y)
        if gate is not None:
            y = y * (jax.nn.silu(gate) if self.activates_gate else gate)
        return self._normalised(y) if self.norm == "after" else y

    def _normalised(self, y: jax.Array) -> jax.Array:
        """Returns y [B, T, channels] over the root mean square of each group of channels."""
        groups = y.reshape(*y.shape[:2], -1, self.group_size or y.shape[2])
        return (groups * lax.rsqrt(jnp.mean(groups**2, axis=-1, keepdims=True) + self.epsilon)).reshape(y.shape)


def axes_of(args: StateSpaceV2Arguments) -> dict[str, Any]:
    """Returns the axis letters of the results of a call with trees, which has a state for every token."""
    has_token_states = args.parents is not None and args.return_token_states
    return {} if not has_token_states else {"output": ("b t h", "b t h v k", "b i c")}


def configure(args: StateSpaceV2Arguments, cfg: StateSpaceV2Config | None) -> StateSpaceV2Config | None:
    """Returns `cfg`; raises ValueError if a field of it contradicts an argument of the call."""
    repeated = {"use_gated_rmsnorm": args.use_gated_rmsnorm, "rmsnorm_eps": args.rmsnorm_eps}
    check_config_agrees_with_call(cfg, n_groups=args.n_groups or args.B.shape[-2], **repeated)
    return cfg


class StateSpaceV2(Kernel[StateSpaceV2Config, tuple[Array, Array, Any]]):
    """Wraps `state_space_v2` in an object that an `Executor` can call."""


OP = Op(
    arguments=StateSpaceV2Arguments,
    family=linear_recurrence.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions_of_trees(conditions_of_states("x")),
    axes_of=axes_of,
    cases=state_space_cases.cases(StateSpaceV2Arguments),
    tolerance=TOLERANCE,
    configure=configure,
    make_inputs=recurrence_cases.make_inputs,
    axes={
        "x": "b t h v",
        "B": "b t g k",
        "C": "b t g k",
        "gate": "b t h",
        "initial_state": "b h v k",
        "cu_seqlens": "n",
    },
    finish=finish,
    output=("b t h", "b h v k", "b i c"),
)
StateSpaceV2.op = OP
