"""Expert routing: the experts of every token, and the order of the experts' rows."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ejkernel.arithmetic import is_symbolic
from ejkernel.families import expert_routing as family
from ejkernel.modules.operations.cases import expert_routing as cases
from ejkernel.modules.operations.configs import ExpertRoutingConfig
from ejkernel.modules.operations.shared import expert_scores
from ejkernel.modules.operations.shared.paged_arguments import as_choice, set_canonical_fields
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_flag,
    as_number,
    check_dtype,
    check_not_empty,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, Tolerance
from ejkernel.ops.operation import document_options, run_operation


@document_options
def expert_routing(
    logits: Float[Array, "t e"],
    top_k: int,
    *,
    scores: Literal["softmax", "sigmoid"] | None = None,
    selection_bias: Float[Array, " e"] | None = None,
    n_groups: int | None = None,
    top_groups: int | None = None,
    group_score_experts: int = 2,
    normalise: bool = False,
    scale: float = 1.0,
    platform: str | None = None,
    cfg: ExpertRoutingConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Int32[Array, "t k"], Int32[Array, "t k"], Int32[Array, " r"], Int32[Array, " e"]] | tuple[Any, ...]:
    """Returns the experts with the largest logits of every token, and the rows sorted by expert.

    Shape letters: T tokens, E experts, K experts a token, R = T * K rows of the experts' matrices, one for each pair of
    a token and one of its experts. The order is stable and the same in every run. Results are integers, and have no
    gradient. With `scores` the call returns the weights of the experts too, which have one. DeepSeek V3's routing:

        expert_routing(logits, 8, scores="sigmoid", selection_bias=bias, n_groups=8, top_groups=4, normalise=True,
                       scale=2.5)

    Mixtral, GPT-OSS and Qwen3 take `scores="softmax", normalise=True`, and Llama 4 `scores="sigmoid"`.

    Args:
        logits: [T, E] floating.
        top_k: K, from 1 to E.
        scores: `"softmax"` over all experts, or `"sigmoid"` of each logit: what weights are made of, in float32. None
            returns no weights; the arguments below then have no meaning and are refused.
        selection_bias: [E] floating, added to the scores to choose experts, and not part of the weights. Has no
            gradient.
        n_groups: Groups of neighbouring experts, a divisor of E; experts come from the best groups of a token alone.
        top_groups: How many groups those are; goes with n_groups.
        group_score_experts: How many of a group's best biased scores are summed up as the score of the group: 2 in
            DeepSeek V3, 1 in V2.
        normalise: Divide the weights of a token by their sum.
        scale: Factor on the weights, after that.

    Returns:
        Four int32 arrays, which `gather_reduce` and `grouped_matmul` take, and with `scores` a fifth array:

        - experts [T, K], the largest logit first, of equal ones the first; -0 equals 0, NaN is above infinity;
        - places [T, K], the row of each pair;
        - order [R], the pair of each row, `t * K + n`;
        - sizes [E], how many rows each expert has;
        - weights [T, K] of the experts, float32 (float64 for float64), with `scores`.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.modules import expert_routing

        logits = jnp.array([[0.0, 3.0, 2.0], [5.0, 1.0, 4.0]])
        experts, places, order, sizes = expert_routing(logits, 2)
        assert experts.tolist() == [[1, 2], [0, 2]]
        assert order.tolist() == [2, 0, 1, 3]  # expert 0 has a row of token 1, expert 1 one of token 0, expert 2 two
        assert places.tolist() == [[1, 2], [0, 3]] and sizes.tolist() == [1, 1, 2]
        ```
    """
    return run_operation(OP, locals())


class ExpertRoutingArguments(ArgumentRecord, of=expert_routing):
    """The arguments of a call of `expert_routing`."""

    def __post_init__(self) -> None:
        if self.scores is not None:
            as_choice("scores", self.scores, expert_scores.SCORE_FUNCTIONS)
        counts = {name: getattr(self, name) for name in ("top_k", "n_groups", "top_groups", "group_score_experts")}
        set_canonical_fields(
            self,
            normalise=as_flag("normalise", self.normalise),
            scale=as_number("scale", self.scale),
            **{name: as_count(name, n, minimum=1) for name, n in counts.items() if n is not None},
        )


def validate(args: ExpertRoutingArguments) -> None:
    """Raises ValueError for arguments that are wrong on every backend."""
    sizes: dict[str, int] = {}
    check_shape("logits", args.logits, "T E", sizes)
    check_not_empty("logits", args.logits, "T E", "E")
    check_dtype("logits", args.logits, jnp.floating, "a floating dtype")
    if args.top_k > sizes["E"]:
        raise ValueError(f"top_k: got {args.top_k}, wants at most the {sizes['E']} experts")
    if not is_symbolic(sizes["T"]) and sizes["T"] * args.top_k >= 2**31:
        raise ValueError(f"logits: got shape {tuple(args.logits.shape)}, wants fewer than 2**31 rows of experts")
    if args.scores is None:
        for name, default in _SCORE_ARGUMENT_DEFAULTS.items():
            if (value := getattr(args, name)) is not default and value != default:
                raise ValueError(f"{name}: got {got(value)} without scores, wants scores='softmax' or 'sigmoid'")
    if args.selection_bias is not None:
        check_shape("selection_bias", args.selection_bias, "E", sizes)
        check_dtype("selection_bias", args.selection_bias, jnp.floating, "a floating dtype")
    _check_groups(args, sizes["E"])


_SCORE_ARGUMENT_DEFAULTS = {
    "selection_bias": None,
    "n_groups": None,
    "group_score_experts": 2,
    "normalise": False,
    "scale": 1.0,
}
"""Arguments that only calls with scores have, and their defaults."""


def _check_groups(args: ExpertRoutingArguments, num_experts: int) -> None:
    """Raises ValueError unless `n_groups` divides the experts and the `top_groups` groups have `top_k` experts."""
    groups, best = args.n_groups, args.top_groups
    if (groups is None) != (best is None):
        raise ValueError(f"top_groups: got {best} with n_groups={groups}, wants both or neither")
    if groups is None or best is None:
        return
    if num_experts % groups:
        raise ValueError(f"n_groups: got {groups}, wants a divisor of the {num_experts} experts")
    if best > groups:
        raise ValueError(f"top_groups: got {best}, wants at most the {groups} groups")
    if args.top_k > best * (num_experts // groups):
        raise ValueError(
            f"top_k: got {args.top_k}, wants at most the {best * (num_experts // groups)} experts of the groups"
        )
    if args.group_score_experts > num_experts // groups:
        raise ValueError(
            f"group_score_experts: got {args.group_score_experts}, "
            f"wants at most a group's {num_experts // groups} experts"
        )


def lower(args: ExpertRoutingArguments) -> family.ExpertRouting:
    """Returns the record of a call. Its logits are constants to JAX's differentiation, since integer results have no
    gradient.
    """
    return family.ExpertRouting(logits=jax.lax.stop_gradient(expert_scores.selection_scores(args)), top_k=args.top_k)


def finish(args: ExpertRoutingArguments, output: Any) -> Any:
    """Returns the public results: with the weights of the chosen experts if the call has scores."""
    return output if args.scores is None else (*output, expert_scores.weights(args, output[0]))


def _axes_of(args: ExpertRoutingArguments) -> dict[str, Any]:
    """Returns the axis letters of the results, where the weights are among them."""
    return {} if args.scores is None else {"output": ("t k", "t k", "r", "e", "t k")}


class ExpertRouting(Kernel[ExpertRoutingConfig, tuple[Array, Array, Array, Array]]):
    """Wraps `expert_routing` in an object that an `Executor` can call."""


OP = Op(
    arguments=ExpertRoutingArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    cases=cases.cases(ExpertRoutingArguments),
    # The integer results of all backends are equal, and every backend computes the weights with the same jnp code.
    tolerance={name: Tolerance(rtol=1e-6, atol=0.0) for name in ("float64", "float32", "bfloat16", "float16")},
    make_inputs=cases.make_inputs,
    finish=finish,
    axes_of=_axes_of,
)
ExpertRouting.op = OP
