"""RWKV-7 (Goose): a gated linear recurrence whose transitions are diagonal plus low rank."""

from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.modules.operations.cases import rwkv as rwkv_cases
from ejkernel.modules.operations.configs import RWKV7Config
from ejkernel.modules.operations.shared import rwkv
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.operation import document_options, run_operation


@document_options
def rwkv7(
    r: Float[Array, "b t h k"],
    w: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g v"],
    a: Float[Array, "b t h k"],
    b: Float[Array, "b t h k"],
    *,
    softmax_scale: float | None = None,
    initial_state: Float[Array, "n h k v"] | None = None,
    reverse: bool = False,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    state_indices: Integer[Array, " n"] | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: RWKV7Config | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]:
    """Computes the time mixing of RWKV-7, chunk by chunk (Peng et al. 2025, arXiv:2503.14456).

    Every head carries a state S of shape [K, V]. Each token first decays S and adds `a` times what `b` reads of S, then
    writes, then reads:

        S   = (diag(exp(w_t)) + a_t b_t^T) S + k_t v_t^T
        o_t = softmax_scale * S^T r_t

    b reads the state before the decay. FLA's `chunk_rwkv7(a=x, b=y)` is `rwkv7` with `a=y` and `b=x`. The delta rule is
    a special case: `kernel_delta_attention` with keys k has `a = -beta k` and `b = exp(w) k`, and writes `beta k v^T`.
    Head h of r reads head `h // (H // Hk)` of k and v.

    Over devices, batch, heads and tokens can be split.

    Args:
        r: [B, T, H, K] float16, bfloat16, float32 or float64, the receptance, which reads the state.
        w: [B, T, H, K] floating, log of the decay of each key channel, at most 0; -inf forgets. Differentiable, as are
            all floating arguments.
        k: [B, T, Hk, K], dtype of r; H is a multiple of Hk.
        v: [B, T, Hk, V], dtype of r.
        a: [B, T, H, K] floating, the vector with which the low-rank term writes.
        b: [B, T, H, K] floating, the vector with which it reads. States grow unless the transitions are contractions,
            as those of `rwkv7_mul` with a from 0 to 1 and kk of length 1.
        softmax_scale: Factor on the output; None means `K ** -0.5`. RWKV's own layers have 1.
        initial_state: [B, H, K, V] floating, or [N, H, K, V] with cu_seqlens: the state before the first token; None
            is zeros.
        reverse: Go from the last token of each sequence to the first.
        cu_seqlens: [N + 1] int: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]` of the single row (B = 1, or
            arrays without the axis B), and has a separate state. May be traced; an eager call waits for the values and
            checks them. Sequences may be empty; padding tokens have output 0.
        state_indices: [N] int, with cu_seqlens: initial_state is slots, [slots, H, K, V], and sequence n continues the
            state in slot `state_indices[n]` and stores it there. Sequences with tokens have different slots; a sequence
            whose index is out of range, such as -1, starts from zeros, and its state is not kept. The states that are
            returned are the slots, in their dtype; donate them under `jax.jit`.
        return_state: Also return the states after the last token taken.

    Returns:
        [B, T, H, V] in r's dtype; with `return_state` also the states, [B, H, K, V] or [N, H, K, V], float32
        (float64 for float64 inputs). Empty sequences keep their initial state.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import rwkv7

        r, w, k, v, x = jax.random.normal(jax.random.key(0), (5, 1, 128, 4, 32))
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        output, state = rwkv7(r, -jnp.exp(w - 4), k, v, 0.5 * x, -x, return_state=True)
        assert output.shape == (1, 128, 4, 32) and state.shape == (1, 4, 32, 32)
        ```
    """
    return run_operation(OP, locals())


class RWKV7Arguments(rwkv.CanonicalCall, ArgumentRecord, of=rwkv7):
    """The arguments of a call of `rwkv7`."""


def validate(args: RWKV7Arguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    rwkv.check_tokens(args, ("a", "b"))


def lower(args: RWKV7Arguments) -> LinearRecurrence:
    """Returns the family's record of a call."""
    return rwkv.low_rank_record(args, args.a, args.b)


class RWKV7(Kernel[RWKV7Config, Array]):
    """Wraps `rwkv7` in an object that an `Executor` can call."""


OP = rwkv.declare_rwkv_recurrence(RWKV7Arguments, rwkv_cases.rwkv7_cases, validate=validate, lower=lower)
RWKV7.op = OP
