"""The short causal convolution in front of state space models and linear recurrences."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ejkernel.families import causal_convolution
from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel.modules.operations.cases import causal_conv1d as cases
from ejkernel.modules.operations.configs import CausalConv1dConfig
from ejkernel.modules.operations.shared import convolution_states
from ejkernel.modules.operations.shared.conditions import (
    conditions_of_cumulative_lengths,
    conditions_of_trees,
    slot_conditions,
)
from ejkernel.modules.operations.shared.recurrences import (
    check_floating,
    check_packing,
    check_parents_shape_and_dtype,
    rank,
)
from ejkernel.modules.operations.shared.shapes import (
    as_flag,
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition

MAX_FILTER_WIDTH = 8


@document_options
def causal_conv1d(
    x: Float[Array, "b t i"],
    weight: Float[Array, "i w"],
    bias: Float[Array, " i"] | None = None,
    initial_state: Float[Array, "n i w-1"] | Float[Array, "n i w"] | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    *,
    state_indices: Integer[Array, " n"] | None = None,
    parents: Integer[Array, "b t"] | None = None,
    activation: str | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: CausalConv1dConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> (
    Float[Array, "b t i"]
    | tuple[
        Float[Array, "b t i"],
        Float[Array, "n i w-1"] | Float[Array, "n i w"] | Float[Array, "b t i w-1"] | Float[Array, "b t i w"],
    ]
):
    """Computes the short depthwise convolution of Mamba and of gated linear recurrences, along time (arXiv:2312.00752).

    Shape letters: B rows, T tokens, I channels, W weights a channel, N packed sequences. The last weight of a channel
    meets the token itself, the first the token W - 1 before it. The formula is in
    `ejkernel.families.causal_convolution`.

    A state is the last W - 1 tokens, the oldest first, so one call for a prompt and one for every token after it give
    what a single call over all of them gives. Checkpoints' caches often hold W tokens, the oldest of which no weight
    meets: such states are taken and returned as they are.

    Over devices, rows, channels and tokens can be split.

    Args:
        x: [B, T, I] float16, bfloat16, float32 or float64.
        weight: [I, W] floating, with W from 2 to 8.
        bias: [I] floating, added before the activation.
        initial_state: [B, I, W - 1] floating, or [N, I, W - 1] with cu_seqlens: the tokens before the first; None is
            zeros. [B, I, W] and [N, I, W] hold one token more. Differentiable. Read in x's dtype.
        cu_seqlens: [N + 1] int: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]` of the single row (B = 1),
            and sees no others. May be traced; an eager call waits for the values and checks them. Sequences may be
            empty; padding tokens have output 0.
        state_indices: [B] int, or [N] int with cu_seqlens: initial_state is slots, [slots, I, W - 1] or [slots, I, W],
            and a row or sequence continues the state in its slot and stores it there. Those with tokens have different
            slots; an index that is no slot (such as -1) starts from zeros and stores nothing.
        parents: [B, T] int, a tree of draft tokens to verify: the token that each token continues, by its index among
            those of its row or packed sequence, which is below its own; -1 continues the state. A token then meets its
            ancestors, and a state is returned for each token, while slots do not change:
            `ejkernel.modules.ragged.accept_states` stores those of the accepted tokens. May be traced; values that are
            not are checked.
        activation: None, or `"silu"`.
        return_state: Also return the states after the last tokens; with `parents` those after every token.

    Returns:
        [B, T, I] in x's dtype; with `return_state` also the states, [B, I, W - 1] or [N, I, W - 1], in x's dtype,
        which they are copies in. Empty sequences keep their initial state. With state_indices all slots, in their own
        dtype: donate them, and the update is in place. States of W tokens where initial_state has such. With parents
        [B, T, I, W - 1] or [B, T, I, W], in x's dtype.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import causal_conv1d

        x = jax.random.normal(jax.random.key(0), (2, 100, 64))
        weight = jax.random.normal(jax.random.key(1), (64, 4))
        whole = causal_conv1d(x, weight, activation="silu")
        prompt, state = causal_conv1d(x[:, :99], weight, activation="silu", return_state=True)
        token = causal_conv1d(x[:, 99:], weight, initial_state=state, activation="silu")
        assert jnp.allclose(jnp.concatenate([prompt, token], axis=1), whole, atol=1e-6)
        ```
    """
    return run_operation(OP, locals())


class CausalConv1dArguments(ArgumentRecord, of=causal_conv1d):
    """The arguments of a call of `causal_conv1d`."""

    def __post_init__(self) -> None:
        if self.activation not in (None, "silu"):
            raise ValueError(f"activation: got {got(self.activation)}, wants None or 'silu'")
        object.__setattr__(self, "return_state", as_flag("return_state", self.return_state))
        if self.cu_seqlens is not None and rank(self.x) == 3:
            check_cumulative_lengths("cu_seqlens", self.cu_seqlens, 1, self.x.shape[1])


def validate(args: CausalConv1dArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    check_shape("x", args.x, "B T I", sizes)
    check_not_empty("x", args.x, "B T I", "T I")
    check_floating("x", args.x, "B T I", sizes)
    check_shape("weight", args.weight, "I W", sizes)
    check_floating("weight", args.weight, "I W", sizes)
    if not 2 <= sizes["W"] <= MAX_FILTER_WIDTH:
        raise ValueError(
            f"weight: got shape {tuple(args.weight.shape)}, wants [I, W] with W from 2 to {MAX_FILTER_WIDTH}"
        )
    check_floating("bias", args.bias, "I", sizes)
    if args.cu_seqlens is not None:
        check_packing(args.cu_seqlens, sizes)
    _check_states(args, sizes)
    check_parents_shape_and_dtype(args, sizes)


def _check_states(args: CausalConv1dArguments, sizes: dict[str, int]) -> None:
    rows, state, indices = "B" if args.cu_seqlens is None else "N", args.initial_state, args.state_indices
    if indices is not None:
        if state is None:
            raise ValueError("state_indices: got a value without initial_state, wants both or neither")
        check_shape("state_indices", indices, rows, sizes)
        check_dtype("state_indices", indices, jnp.integer, "an integer dtype")
        rows = "slots"
    sizes["W-1"] = sizes["W"] - 1
    held = "W" if rank(state) == 3 and state.shape[2] == sizes["W"] else "W-1"
    check_floating("initial_state", state, f"{rows} I {held}", sizes)
    if indices is not None:
        check_not_empty("initial_state", state, f"slots I {held}", "slots")


def conditions(args: CausalConv1dArguments) -> Iterable[Condition]:
    """Yields the conditions that cumulative lengths fit x, that sequences with tokens have distinct slots, and that
    parents come before their tokens.
    """
    yield from _tree_and_length_conditions(args)
    if args.state_indices is not None and rank(args.state_indices) == 1:
        each = np.arange(args.state_indices.shape[0] + 1)
        yield from slot_conditions(
            args.state_indices, each if args.cu_seqlens is None else args.cu_seqlens, args.initial_state
        )


_tree_and_length_conditions = conditions_of_trees(conditions_of_cumulative_lengths("cu_seqlens", "x"))


def lower(args: CausalConv1dArguments) -> CausalConvolution:
    """Returns the convolution record of a call; each token of a tree is a row of its own, after its ancestors."""
    if args.parents is not None:
        x, before, _ = convolution_states.tree_windows(args)
        before = before[..., before.shape[2] - (args.weight.shape[1] - 1) :]
        token = {"x": x[:, None], "initial_state": before}
        return CausalConvolution(weight=args.weight, bias=args.bias, activation=args.activation, **token)
    if convolution_states.kernels_update_slots(args):
        slots = {"cu_seqlens": args.cu_seqlens, "sequence_state": args.initial_state, "state_slots": args.state_indices}
        return CausalConvolution(x=args.x, weight=args.weight, bias=args.bias, activation=args.activation, **slots)
    packed, before = args.cu_seqlens is not None, convolution_states.tokens_before_first(args)
    return CausalConvolution(
        x=args.x,
        weight=args.weight,
        bias=args.bias,
        initial_state=None if packed else before,
        cu_seqlens=args.cu_seqlens,
        sequence_state=before if packed else None,
        activation=args.activation,
    )


def finish(args: CausalConv1dArguments, output: tuple[jax.Array, jax.Array]) -> Any:
    """Returns what the public function returns."""
    if args.parents is not None:
        y = output[0].reshape(args.x.shape)
        if args.cu_seqlens is not None:  # padding tokens have a bias too
            y = jnp.where(convolution_states.tree_windows(args).is_request_token[None, :, None], y, 0)
        return (y, convolution_states.states_after_tree_tokens(args)) if args.return_state else y
    return (output[0], convolution_states.updated_states(args, output[1])) if args.return_state else output[0]


def axes_of(args: CausalConv1dArguments) -> dict[str, Any]:
    """Returns the axis letters of the states of packed sequences or of slots, and of what comes back."""
    rows, states = "b", "b i s" if args.cu_seqlens is None else "r i s"
    if args.state_indices is not None:  # every row may be in every slot, so that devices cannot share the rows out
        rows, states = "q", "z i s"
    if args.parents is not None:  # a token may continue any other of its row, so that devices cannot share those out
        output = (f"{rows} q i", f"{rows} q i s") if args.return_state else f"{rows} q i"
        return {"x": f"{rows} q i", "parents": f"{rows} q", "initial_state": states, "output": output}
    returned = states if args.cu_seqlens is None or args.state_indices is not None else "b i s"
    output = (f"{rows} t i", returned) if args.return_state else f"{rows} t i"
    return {"x": f"{rows} t i", "initial_state": states, "output": output}


class CausalConv1d(Kernel[CausalConv1dConfig, Array]):
    """Wraps `causal_conv1d` in an object that an `Executor` can call."""


OP = Op(
    arguments=CausalConv1dArguments,
    family=causal_convolution.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=cases.cases(CausalConv1dArguments),
    tolerance=tolerances(float64=1e-12, float32=1e-5, bfloat16=2e-2, float16=3e-3),
    make_inputs=cases.make_inputs,
    axes={"initial_state": "b i s", "cu_seqlens": "n"},
    finish=finish,
    axes_of=axes_of,
)
CausalConv1d.op = OP
