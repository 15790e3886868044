"""Expert routing: the experts of every token, and the order of the experts' rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ejkernel.families import expert_routing as family
from ejkernel.modules.operations.cases import expert_routing as cases
from ejkernel.modules.operations.configs import ExpertRoutingConfig
from ejkernel.modules.operations.shared.paged_arguments import settle
from ejkernel.modules.operations.shared.shapes import as_count, check_dtype, check_not_empty, check_shape
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, Tolerance
from ejkernel.ops.operation import operation
from ejkernel.types.arguments import arguments, static


@arguments
class ExpertRoutingArguments:
    """The arguments of `expert_routing`, which documents them; canonical from the moment they are made."""

    logits: jax.Array
    top_k: int = static()

    def __post_init__(self) -> None:
        settle(self, top_k=as_count("top_k", self.top_k, least=1))


@operation(lambda: OP)
def expert_routing(
    logits: Float[Array, "t e"],
    top_k: int,
    *,
    platform: str | None = None,
    cfg: ExpertRoutingConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Int32[Array, "t k"], Int32[Array, "t k"], Int32[Array, " r"], Int32[Array, " e"]]:
    """The experts with the largest logits of every token, and the rows sorted by expert.

    Shape letters: T tokens, E experts, K experts a token, R = T * K rows of the experts' matrices, one for each pair of
    a token and one of its experts. The order is stable and the same in every run. Results are integers, and have no
    gradient; the weights, which have one, are made of the logits of the experts:

        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=1))

    Args:
        logits: [T, E] floating.
        top_k: K, from 1 to E.

    Returns:
        Four int32 arrays, which `gather_reduce` and `grouped_matmul` take:

        - experts [T, K], the largest logit first, of equal ones the first; -0 equals 0, NaN is above infinity;
        - places [T, K], the row of each pair;
        - order [R], the pair of each row, `t * K + n`;
        - sizes [E], how many rows each expert has.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.
        NoImplementationError: No backend serves the call; the message is the table of reasons.

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
    ...


def validate(args: ExpertRoutingArguments) -> None:
    """Raises ValueError for arguments that are wrong on every backend."""
    sizes: dict[str, int] = {}
    check_shape("logits", args.logits, "T E", sizes)
    check_not_empty("logits", args.logits, "T E", "E")
    check_dtype("logits", args.logits, jnp.floating, "a floating dtype")
    if args.top_k > sizes["E"]:
        raise ValueError(f"top_k: got {args.top_k}, wants at most the {sizes['E']} experts")
    if sizes["T"] * args.top_k >= 2**31:
        raise ValueError(f"logits: got shape {tuple(args.logits.shape)}, wants fewer than 2**31 rows of experts")


def lower(args: ExpertRoutingArguments) -> family.ExpertRouting:
    """The record of a call: integers have no gradient, so a layer around the call is differentiated without it."""
    return family.ExpertRouting(logits=jax.lax.stop_gradient(args.logits), top_k=args.top_k)


def reference(args: ExpertRoutingArguments) -> family.Routing:
    """The operation's meaning in plain jnp."""
    return family.reference(lower(args))[0]


class ExpertRouting(Kernel[ExpertRoutingConfig, tuple[Array, Array, Array, Array]]):
    """`expert_routing` as an object."""


OP = Op(
    name="expert_routing",
    function=expert_routing,
    arguments=ExpertRoutingArguments,
    family=family.FAMILY,
    config=ExpertRoutingConfig,
    validate=validate,
    lower=lower,
    reference=reference,
    cases=cases.cases(ExpertRoutingArguments),
    # Integers, all equal.
    tolerance={name: Tolerance(rtol=0.0, atol=0.0) for name in ("float64", "float32", "bfloat16", "float16")},
    make_inputs=cases.make_inputs,
    axes={"logits": "t e"},
)
ExpertRouting.op = OP
