"""The gated delta rule, with several sequences in a row if asked for."""

from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.families import linear_recurrence
from ejkernel.modules.operations.cases import delta as delta_cases
from ejkernel.modules.operations.cases import recurrence as recurrence_cases
from ejkernel.modules.operations.configs import GatedDeltaRuleConfig
from ejkernel.modules.operations.shared import delta_rule
from ejkernel.modules.operations.shared.conditions import conditions_of_cumulative_lengths, conditions_of_trees
from ejkernel.modules.operations.shared.paged_arguments import set_canonical_fields, with_tuning_arguments
from ejkernel.modules.operations.shared.recurrences import TOLERANCE, check_and_canonicalise_packing, rank
from ejkernel.modules.operations.shared.shapes import as_count, as_flag, as_number, got
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


@document_options
def gated_delta_rule(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b t g k"],
    value: Float[Array, "b t g v"],
    beta: Float[Array, "b t h"],
    decay: Float[Array, "b t h"] | Float[Array, "b t h k"] | None = None,
    seg_ids: Integer[Array, "b t"] | Float[Array, "b h k v"] | None = None,
    initial_state: Float[Array, "b h k v"] | None = None,
    *,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    parents: Integer[Array, "b t"] | None = None,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = True,
    use_chunked: bool = True,
    return_state: bool = False,
    autotune_chunk_candidates: tuple[int, ...] | None = None,
    platform: str | None = None,
    cfg: GatedDeltaRuleConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | tuple[Float[Array, "b t h v"], Float[Array, "b h k v"] | Float[Array, "b t h k v"]]:
    """Computes the gated delta rule chunk by chunk (Yang et al. 2024, arXiv:2412.06464).

    Every head carries a state S of shape [K, V]. Each token first decays it by `exp(decay)`, then corrects what it
    holds for its key, `S += key (beta (value - S^T key))^T`, then reads `softmax_scale * S^T query`. Query head h reads
    KV head `h // (H // Hk)`. The formula is in `ejkernel.families.linear_recurrence`.

    Over devices, batch, heads and tokens can be split.

    Args:
        query: [B, T, H, K] float16, bfloat16, float32 or float64.
        key: [B, T, Hk, K], dtype of query; H is a multiple of Hk.
        value: [B, T, Hk, V], dtype of query. With more value heads than key heads it is [B, T, H, V], and queries have
            the heads of keys, [B, T, Hk, K]: value head h reads query and key head `h // (H // Hk)`.
        beta: [B, T, H] floating, strength of the correction, 0 to 1 (2 with negative eigenvalues). Differentiable.
        decay: [B, T, H] or [B, T, H, K] floating, log of the decay of a head or of each of its key channels, at most 0;
            -inf forgets. Differentiable.
        seg_ids: [B, T] int of any dtype. A token whose id differs from that of the last real token before it starts
            from a zero state; a row's first segment continues from `initial_state`. Negative ids are padding, which
            leaves the state alone and has output 0. A floating [B, H, K, V] in its place is `initial_state`.
        initial_state: [B, H, K, V] floating, the state before the first token; None is zeros. Differentiable.
        cu_seqlens: [N + 1] int cumulative lengths of N packed sequences, with B = 1; each has a separate state,
            [N, H, K, V]. May be traced; an eager call waits for the values and checks them. Sequences may be empty;
            padding tokens have output 0. Not with seg_ids.
        parents: [B, T] int, a tree of draft tokens to verify: the token that each token continues, by its index among
            those of its row or packed sequence, which is below its own; -1 continues the initial state. An output then
            depends on the token's ancestors alone, and a state is returned for each token. May be traced; values that
            are not are checked. Not with seg_ids.
        softmax_scale: Factor on the output; None means `K ** -0.5`.
        use_qk_l2norm: Divide query and key by their lengths, `x * rsqrt(sum x^2 + 1e-6)`.
        use_chunked: False goes token by token: slower, with the same results.
        return_state: Also return the states after the last token; with `parents` those after every token.
        autotune_chunk_candidates: One chunk size, short for that of `cfg`. Several are refused: tuning measures the
            candidates of the kernels.

    Returns:
        [B, T, H, V] in query's dtype; with `return_state` also the states [B, H, K, V], or [B, T, H, K, V] with
        `parents`, float32 (float64 for float64 inputs).

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import gated_delta_rule

        query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32))
        beta, gate = jax.nn.sigmoid(jax.random.normal(jax.random.key(1), (2, 1, 128, 4)))
        output, state = gated_delta_rule(query, key, value, beta, jnp.log(gate), return_state=True)
        assert output.shape == (1, 128, 4, 32) and state.shape == (1, 4, 32, 32)
        ```
    """
    return run_operation(OP, locals())


class GatedDeltaRuleArguments(ArgumentRecord, of=gated_delta_rule):
    """The arguments of a call of `gated_delta_rule`."""

    def __post_init__(self) -> None:
        for name in ("use_qk_l2norm", "use_chunked", "return_state"):
            object.__setattr__(self, name, as_flag(name, getattr(self, name)))
        sizes = self.autotune_chunk_candidates
        if sizes is not None:
            set_canonical_fields(
                self, autotune_chunk_candidates=tuple(as_count("autotune_chunk_candidates", n, 1) for n in sizes)
            )
            if len(sizes) != 1:
                raise NotImplementedError(
                    f"autotune_chunk_candidates: got {sizes}; `ejkernel tune` measures the candidates of the kernels, "
                    "and cfg=GatedDeltaRuleConfig(chunk_size=...) fixes one"
                )
        if rank(self.seg_ids) == 4:  # a state, where calls without segments have it
            if self.initial_state is not None:
                raise ValueError(f"seg_ids: got {got(self.seg_ids)} with initial_state given, wants [B, T] ints")
            object.__setattr__(self, "initial_state", self.seg_ids)
            object.__setattr__(self, "seg_ids", None)
        check_and_canonicalise_packing(self)
        scale = self.softmax_scale
        set_canonical_fields(self, softmax_scale=None if scale is None else as_number("softmax_scale", scale))


gdr_attention = gated_delta_rule


def _route_state_spec(args: GatedDeltaRuleArguments, options: dict[str, Any]) -> tuple[Op, Any, dict[str, Any]]:
    """Routes a call with a state and no segments: if it has six specs, the sixth is the spec of the state instead of
    that of the segments.
    """
    specs = options["in_specs"]
    if isinstance(specs, tuple | list) and len(specs) == 6 and args.seg_ids is None:
        options = {**options, "in_specs": (*specs[:5], None, specs[5])}
    return OP, args, options


def _configure(args: GatedDeltaRuleArguments, cfg: Any) -> Any:
    if args.autotune_chunk_candidates is not None:
        cfg = with_tuning_arguments(GatedDeltaRuleConfig, cfg, chunk_size=args.autotune_chunk_candidates[0])
    return delta_rule.configure(OP, args, cfg)


class GatedDeltaRule(Kernel[GatedDeltaRuleConfig, Array]):
    """Wraps `gated_delta_rule` in an object that an `Executor` can call."""


OP = Op(
    arguments=GatedDeltaRuleArguments,
    family=linear_recurrence.FAMILY,
    validate=delta_rule.validate,
    lower=delta_rule.lower,
    conditions=conditions_of_trees(conditions_of_cumulative_lengths("cu_seqlens", "query")),
    axes_of=delta_rule.axes_of,
    cases=delta_cases.gated_delta_rule_cases(GatedDeltaRuleArguments),
    tolerance=TOLERANCE,
    make_inputs=recurrence_cases.make_inputs,
    axes={"decay": "b t h k"},
    finish=delta_rule.finish,
    configure=_configure,
    route=_route_state_spec,
)
GatedDeltaRule.op = OP
