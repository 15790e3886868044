"""RWKV-7 (Goose), from the removal key and the learning rate that its layers compute."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.modules.operations.cases import rwkv as rwkv_cases
from ejkernel.modules.operations.configs import RWKV7MulConfig
from ejkernel.modules.operations.shared import rwkv
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.planning import packing


@document_options
def rwkv7_mul(
    r: Float[Array, "b t h k"],
    w: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g v"],
    kk: Float[Array, "b t h k"],
    a: Float[Array, "b t h k"],
    *,
    softmax_scale: float | None = None,
    initial_state: Float[Array, "n h k v"] | None = None,
    reverse: bool = False,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    state_indices: Integer[Array, " n"] | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: RWKV7MulConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]:
    """Computes the time mixing of RWKV-7 from the vectors that its layers compute (Peng et al. 2025, arXiv:2503.14456).

    This is `rwkv7` with the vectors `kk * a` and `-kk`: each token removes what the state holds for kk, as far as a
    says for each key channel, and then writes:

        S   = (diag(exp(w_t)) - (kk_t * a_t) kk_t^T) S + k_t v_t^T
        o_t = softmax_scale * S^T r_t

    Over devices, batch, heads and tokens can be split.

    Args:
        r: [B, T, H, K] float16, bfloat16, float32 or float64, the receptance, which reads the state.
        w: [B, T, H, K] floating, log of the decay of each key channel, at most 0; -inf forgets. Differentiable, as are
            all floating arguments.
        k: [B, T, Hk, K], dtype of r; H is a multiple of Hk.
        v: [B, T, Hk, V], dtype of r.
        kk: [B, T, H, K] floating, the removal key, which RWKV's layers normalise to length 1.
        a: [B, T, H, K] floating, 0 to 1, how much of it is removed (the in-context learning rate).
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
        from ejkernel.modules import rwkv7_mul

        r, w, k, v, kk, a = jax.random.normal(jax.random.key(0), (6, 1, 128, 4, 32))
        kk = kk / jnp.linalg.norm(kk, axis=-1, keepdims=True)
        output = rwkv7_mul(r, -jnp.exp(w - 4), k, v, kk, jax.nn.sigmoid(a))
        assert output.shape == (1, 128, 4, 32)
        ```
    """
    return run_operation(OP, locals())


class RWKV7MulArguments(rwkv.CanonicalCall, ArgumentRecord, of=rwkv7_mul):
    """The arguments of a call of `rwkv7_mul`."""


def validate(args: RWKV7MulArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    rwkv.check_tokens(args, ("kk", "a"))


def lower(args: RWKV7MulArguments) -> LinearRecurrence:
    """Returns the family's record of a call."""
    kk, a = args.kk, args.a
    if args.cu_seqlens is not None:
        # The gradient of a product multiplies by the other factor, and padding may hold NaN: 0 x NaN is NaN.
        is_padding = packing.packed_ids(args.cu_seqlens, kk.shape[-3])[0][0, :, None, None] < 0
        kk, a = (jnp.where(is_padding, 0, x) for x in (kk, a))
    return rwkv.low_rank_record(args, kk * a, -kk)


class RWKV7Mul(Kernel[RWKV7MulConfig, Array]):
    """Wraps `rwkv7_mul` in an object that an `Executor` can call."""


OP = rwkv.declare_rwkv_recurrence(RWKV7MulArguments, rwkv_cases.rwkv7_mul_cases, validate=validate, lower=lower)
RWKV7Mul.op = OP
