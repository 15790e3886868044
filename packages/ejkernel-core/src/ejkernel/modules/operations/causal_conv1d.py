"""The short causal convolution in front of state space models and linear recurrences."""

from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.families import causal_convolution
from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel.modules.operations.cases import causal_conv1d as cases
from ejkernel.modules.operations.configs import CausalConv1dConfig
from ejkernel.modules.operations.shared.conditions import of_bounds
from ejkernel.modules.operations.shared.recurrences import check_floating, check_packing, rank
from ejkernel.modules.operations.shared.shapes import as_flag, check_cumulative, check_not_empty, check_shape, got
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, Tolerance
from ejkernel.ops.operation import document_options, run_operation

LARGEST_WIDTH = 8


@document_options
def causal_conv1d(
    x: Float[Array, "b t i"],
    weight: Float[Array, "i w"],
    bias: Float[Array, " i"] | None = None,
    initial_state: Float[Array, "n i w-1"] | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    *,
    activation: str | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: CausalConv1dConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t i"] | tuple[Float[Array, "b t i"], Float[Array, "n i w-1"]]:
    """Computes the short depthwise convolution of Mamba and of gated linear recurrences, along time (arXiv:2312.00752).

    Shape letters: B rows, T tokens, I channels, W weights a channel, N packed sequences. The last weight of a channel
    meets the token itself, the first the token W - 1 before it. The formula is in
    `ejkernel.families.causal_convolution`.

    A state is the last W - 1 tokens, the oldest first, so one call for a prompt and one for every token after it give
    what a single call over all of them gives.

    Over devices, rows and channels can be split, tokens cannot.

    Args:
        x: [B, T, I] float16, bfloat16, float32 or float64.
        weight: [I, W] floating, with W from 2 to 8.
        bias: [I] floating, added before the activation.
        initial_state: [B, I, W - 1] floating, or [N, I, W - 1] with cu_seqlens: the tokens before the first; None is
            zeros. Differentiable. Read in x's dtype.
        cu_seqlens: [N + 1] int: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]` of the single row (B = 1),
            and sees no others. May be traced; values that are not are checked, for which an eager call waits. Sequences
            may be empty; padding tokens have output 0.
        activation: None, or `"silu"`.
        return_state: Also return the states after the last tokens.

    Returns:
        [B, T, I] in x's dtype; with `return_state` also the states, [B, I, W - 1] or [N, I, W - 1], in x's dtype,
        which they are copies in. Empty sequences keep their initial state.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.
        NoImplementationError: No backend serves the call; the message is the table of reasons.

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
            check_cumulative("cu_seqlens", self.cu_seqlens, 1, self.x.shape[1])


def validate(args: CausalConv1dArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    check_shape("x", args.x, "B T I", sizes)
    check_not_empty("x", args.x, "B T I", "T I")
    check_floating("x", args.x, "B T I", sizes)
    check_shape("weight", args.weight, "I W", sizes)
    check_floating("weight", args.weight, "I W", sizes)
    if not 2 <= sizes["W"] <= LARGEST_WIDTH:
        raise ValueError(f"weight: got shape {tuple(args.weight.shape)}, wants [I, W] with W from 2 to {LARGEST_WIDTH}")
    check_floating("bias", args.bias, "I", sizes)
    if args.cu_seqlens is not None:
        check_packing(args.cu_seqlens, sizes)
    sizes["W-1"] = sizes["W"] - 1
    check_floating("initial_state", args.initial_state, f"{'B' if args.cu_seqlens is None else 'N'} I W-1", sizes)


def lower(args: CausalConv1dArguments) -> CausalConvolution:
    """Returns the convolution record of a call."""
    packed = args.cu_seqlens is not None
    return CausalConvolution(
        x=args.x,
        weight=args.weight,
        bias=args.bias,
        initial_state=None if packed else args.initial_state,
        cu_seqlens=args.cu_seqlens,
        sequence_state=args.initial_state if packed else None,
        activation=args.activation,
    )


def finish(args: CausalConv1dArguments, output: tuple[jax.Array, jax.Array]) -> Any:
    """Returns what the public function returns."""
    return output if args.return_state else output[0]


def axes_of(args: CausalConv1dArguments) -> dict[str, Any]:
    """Returns the axis letters of the states of packed sequences, and of what comes back."""
    special = {} if args.cu_seqlens is None else {"initial_state": "r i s"}
    return {**special, "output": ("b t i", "b i s") if args.return_state else "b t i"}


class CausalConv1d(Kernel[CausalConv1dConfig, Array]):
    """`causal_conv1d` as an object."""


OP = Op(
    arguments=CausalConv1dArguments,
    family=causal_convolution.FAMILY,
    validate=validate,
    lower=lower,
    conditions=of_bounds("cu_seqlens", "x"),
    cases=cases.cases(CausalConv1dArguments),
    tolerance={
        "float64": Tolerance(rtol=1e-12, atol=1e-12),
        "float32": Tolerance(rtol=1e-5, atol=1e-5),
        "bfloat16": Tolerance(rtol=2e-2, atol=2e-2),
        "float16": Tolerance(rtol=3e-3, atol=3e-3),
    },
    make_inputs=cases.make_inputs,
    axes={"initial_state": "b i s", "cu_seqlens": "n"},
    finish=finish,
    axes_of=axes_of,
)
CausalConv1d.op = OP
