"""The gated delta rule over packed requests whose states live in slots: prefill and decode in one call."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families import linear_recurrence
from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.modules.operations.cases import delta as delta_cases
from ejkernel.modules.operations.cases import recurrence as recurrence_cases
from ejkernel.modules.operations.configs import RaggedGatedDeltaRuleConfig
from ejkernel.modules.operations.shared import delta_rule
from ejkernel.modules.operations.shared.conditions import conditions_of_states, conditions_of_trees
from ejkernel.modules.operations.shared.recurrences import (
    TOLERANCE,
    check_floating,
    check_parents_shape_and_dtype,
    check_token_states_are_of_trees,
    rank,
    tree_fields,
)
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_flag,
    check_cumulative_lengths,
    check_dtype,
    check_shape,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


@document_options
def ragged_gated_delta_rule(
    query: Float[Array, "t h k"],
    key: Float[Array, "t g k"],
    value: Float[Array, "t g v"],
    beta: Float[Array, "t h"],
    decay: Float[Array, "t h"] | Float[Array, "t h k"] | None,
    recurrent_state: Float[Array, "slots h k v"],
    query_start_loc: Integer[Array, " n+1"],
    state_indices: Integer[Array, " n"],
    *,
    parents: Integer[Array, " t"] | None = None,
    return_token_states: bool = True,
    chunk_size: int | None = None,
    use_qk_l2norm: bool = True,
    platform: str | None = None,
    cfg: RaggedGatedDeltaRuleConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "t h v"], Float[Array, "slots h k v"] | Float[Array, "t h k v"]]:
    """Computes the gated delta rule of packed requests (Yang et al. 2024, arXiv:2412.06464), each continuing its own
    state.

    Request n owns tokens `query_start_loc[n] : query_start_loc[n + 1]`. Its state is read from slot `state_indices[n]`
    and stored there afterwards. The formula is that of `gated_delta_rule`, with scale `K ** -0.5`.

    Over devices, heads and tokens can be split.

    Args:
        query: [T, H, K] float16, bfloat16, float32 or float64.
        key: [T, Hk, K], dtype of query; H is a multiple of Hk.
        value: [T, Hk, V], dtype of query. With more value heads than key heads it is [T, H, V], and queries have the
            heads of keys, [T, Hk, K]: value head h reads query and key head `h // (H // Hk)`.
        beta: [T, H] floating, strength of the correction.
        decay: [T, H] or [T, H, K] floating, log of the decay of a head or of each of its key channels; None is none.
        recurrent_state: [slots, H, K, V] floating.
        query_start_loc: [N + 1] int cumulative lengths; may be traced. Requests may be empty: an empty one leaves all
            slots as they are. Tokens of no request have output 0.
        state_indices: [N] int, slots, different for requests with tokens. An index outside the slots (such as -1)
            means none: the request starts from zeros and its state is not kept.
        parents: [T] int, trees of draft tokens to verify: the token that each token continues, by its index among those
            of its request, which is below its own; -1 continues the request's state. An output then depends on the
            token's ancestors alone, a state is returned for each token, and the slots do not change:
            `ejkernel.modules.ragged.accept_states` stores those of the accepted tokens. May be traced; values that are
            not are checked.
        return_token_states: With `parents`, return the states after every token. False returns the slots as they are,
            and stores no state: `ejkernel.modules.ragged.accepted_tokens` lists the tokens to process again for the
            states after the accepted ones.
        chunk_size: Tokens per chunk, in place of the configuration's; changes speed, not results.
        use_qk_l2norm: Divide query and key by their lengths, `x * rsqrt(sum x^2 + 1e-6)`.

    Returns:
        [T, H, V] in query's dtype, and the slots with the states of the requests that had tokens, in
        recurrent_state's dtype. With `parents` not the slots but the states after every token, [T, H, K, V], float32
        (float64 for float64 inputs), zeros for tokens of no request; the slots again without `return_token_states`.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import ragged_gated_delta_rule

        query, key, value = jax.random.normal(jax.random.key(0), (3, 7, 2, 16))
        beta, decay = jnp.full((7, 2), 0.5), jnp.full((7, 2), -0.1)
        slots = jnp.zeros((4, 2, 16, 16))
        starts, indices = jnp.array([0, 5, 6, 7]), jnp.array([3, 0, 1])  # one prefill, two decodes
        output, slots = ragged_gated_delta_rule(query, key, value, beta, decay, slots, starts, indices)
        assert output.shape == (7, 2, 16) and not slots[2].any()
        ```
    """
    return run_operation(OP, locals())


class RaggedGatedDeltaRuleArguments(ArgumentRecord, of=ragged_gated_delta_rule):
    """The arguments of a call of `ragged_gated_delta_rule`."""

    def __post_init__(self) -> None:
        size = self.chunk_size
        object.__setattr__(self, "chunk_size", None if size is None else as_count("chunk_size", size, 1))
        for name in ("use_qk_l2norm", "return_token_states"):
            object.__setattr__(self, name, as_flag(name, getattr(self, name)))
        starts: Any = self.query_start_loc
        if starts is not None and rank(self.query) == 3:
            check_cumulative_lengths("query_start_loc", starts, 1, self.query.shape[0])


def validate(args: RaggedGatedDeltaRuleArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes = delta_rule.check_delta_rule_arguments(args, "")
    check_shape("recurrent_state", args.recurrent_state, "slots H K V", sizes)
    check_floating("recurrent_state", args.recurrent_state, "slots H K V", sizes)
    check_shape("state_indices", args.state_indices, "N", sizes)
    check_shape("query_start_loc", args.query_start_loc, "N+1", {"N+1": sizes["N"] + 1})
    for name in ("query_start_loc", "state_indices"):
        check_dtype(name, getattr(args, name), jnp.integer, "an integer dtype")
    check_parents_shape_and_dtype(args, sizes, "T")
    check_token_states_are_of_trees(args.parents, args.return_token_states)
    for name in ("slots", "N"):
        if sizes[name] == 0:
            argument = "recurrent_state" if name == "slots" else "state_indices"
            raise ValueError(f"{argument}: got shape {getattr(args, argument).shape}, wants {name} of at least 1")


def lower(args: RaggedGatedDeltaRuleArguments) -> LinearRecurrence:
    """Returns the family's record of a call: one row of packed sequences, with their states in slots."""
    row = delta_rule.delta_rule_record(
        args,
        cu_seqlens=args.query_start_loc,
        sequence_state=args.recurrent_state,
        state_slots=args.state_indices,
        **tree_fields(args, args.return_token_states),
    )
    tokens = {name: getattr(row, name) for name in ("query", "key", "value", "decay", "beta", "parents")}
    # The gate's channel axis is the last either way, so a row axis in front completes all of them.
    return dataclasses.replace(row, **{name: None if x is None else x[None] for name, x in tokens.items()})


def finish(args: RaggedGatedDeltaRuleArguments, output: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens' outputs, and the slots with the states of the requests that had tokens and have a slot; or
    the states after all tokens of trees.
    """
    read, states = output
    return read[0], states[0] if _has_token_states(args) else states


def axes_of(args: RaggedGatedDeltaRuleArguments) -> dict[str, Any]:
    """Returns the axis letters of a call with shared queries, and those of its results if it has trees."""
    letters: dict[str, Any] = delta_rule.axes_of_packed_call(args)
    return letters | {"output": ("t h v", "t h k v")} if _has_token_states(args) else letters


def _has_token_states(args: RaggedGatedDeltaRuleArguments) -> bool:
    """Returns whether a call returns the states after every token."""
    return args.parents is not None and args.return_token_states


def _configure(args: RaggedGatedDeltaRuleArguments, cfg: Any) -> Any:
    return delta_rule.configure(OP, args, cfg)


class RaggedGatedDeltaRule(Kernel[RaggedGatedDeltaRuleConfig, tuple[Array, Array]]):
    """Wraps `ragged_gated_delta_rule` in an object that an `Executor` can call."""


OP = Op(
    arguments=RaggedGatedDeltaRuleArguments,
    family=linear_recurrence.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions_of_trees(
        conditions_of_states("query", 0, "query_start_loc", "recurrent_state"), "query_start_loc"
    ),
    cases=delta_cases.ragged_gated_delta_rule_cases(RaggedGatedDeltaRuleArguments),
    tolerance=TOLERANCE,
    make_inputs=recurrence_cases.make_inputs,
    axes={"decay": "t h k", "recurrent_state": "slots h k v", "query_start_loc": "n"},
    finish=finish,
    output=("t h v", "slots h k v"),
    axes_of=axes_of,
    configure=_configure,
)
RaggedGatedDeltaRule.op = OP
