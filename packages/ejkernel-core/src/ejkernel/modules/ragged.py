"""Recurrences of packed requests whose states live in slots, for servers: prefill and decode in one call.

`ragged_gated_delta_rule` is an operation; this module has the ragged forms of the other recurrences, as calls of the
operations that they are named for:

    states  = slots[state_indices]              zeros where an index is outside of the slots, such as -1
    y, last = recurrence(packed tokens, cu_seqlens=query_start_loc, initial_state=states)
    slots   = slots with `last` at state_indices     but for empty requests and indices outside

Request n owns tokens `query_start_loc[n] : query_start_loc[n + 1]`, and tokens of no request have output 0. Indices of
requests with tokens differ. Donate the slots under `jax.jit`, and the update is in place: where a kernel of the
operation takes slots, as that of decode steps does, no state moves but into the kernel and back.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.modules.operations.gated_linear_attention import gated_linear_attention
from ejkernel.modules.operations.lightning_attention import lightning_attention
from ejkernel.modules.operations.ragged_gated_delta_rule import ragged_gated_delta_rule
from ejkernel.modules.operations.shared.recurrences import check_token_states_are_of_trees
from ejkernel.modules.operations.shared.shapes import check_dtype, check_shape
from ejkernel.modules.operations.state_space_v1 import state_space_v1
from ejkernel.modules.operations.state_space_v2 import state_space_v2
from ejkernel.planning.trees import paths_of_tokens

__all__ = [
    "accept_states",
    "accepted_tokens",
    "ragged_gated_linear_attention",
    "ragged_kernel_delta_attention",
    "ragged_lightning_attention",
    "ragged_state_space_v1",
    "ragged_state_space_v2",
]


def ragged_gated_linear_attention(
    query: Float[Array, "t h k"],
    key: Float[Array, "t g k"],
    value: Float[Array, "t g v"],
    g: Float[Array, "t h"] | Float[Array, "t h k"] | None,
    recurrent_state: Float[Array, "slots h k v"],
    query_start_loc: Integer[Array, " n+1"],
    state_indices: Integer[Array, " n"],
    *,
    parents: Integer[Array, " t"] | None = None,
    return_token_states: bool = True,
    **options: Any,
) -> tuple[Float[Array, "t h v"], Float[Array, "slots h k v"] | Float[Array, "t h k v"]]:
    """Computes `gated_linear_attention` (Yang et al. 2023, arXiv:2312.06635) of packed requests, each with its own
    state.

    Args:
        query: [T, H, K] floating, packed.
        key: [T, Hk, K], dtype of query.
        value: [T, Hk, V], dtype of query.
        g: [T, H] or [T, H, K] log gates; None for none.
        recurrent_state: [slots, H, K, V] floating.
        query_start_loc: [N + 1] int cumulative lengths; may be traced.
        state_indices: [N] int.
        parents: [T] int, trees of draft tokens to verify, as in `gated_linear_attention`.
        return_token_states: With `parents`, return the states after every token; False returns the slots as they are.
        **options: Keyword arguments of `gated_linear_attention`, such as `g_gamma`, `softmax_scale`, `platform`.

    Returns:
        [T, H, V] in query's dtype, and the slots; with `parents` the states after every token, [T, H, K, V].

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules.ragged import ragged_gated_linear_attention

        query, key, value = jax.random.normal(jax.random.key(0), (3, 7, 2, 16))
        slots = jnp.zeros((4, 2, 16, 16))
        starts, indices = jnp.array([0, 5, 6, 7]), jnp.array([3, 0, 1])  # one prefill, two decodes
        gates = jnp.full((7, 2), -0.1)
        output, slots = ragged_gated_linear_attention(query, key, value, gates, slots, starts, indices)
        assert output.shape == (7, 2, 16) and not slots[2].any()
        ```
    """

    states = _checked_state_arguments(recurrent_state, query_start_loc, state_indices)
    tokens = {"query": query, "key": key, "value": value, "g": g}
    return _run_packed(gated_linear_attention, tokens | states, parents, return_token_states, options)


def ragged_lightning_attention(
    query: Float[Array, "t h k"],
    key: Float[Array, "t g k"],
    value: Float[Array, "t g v"],
    recurrent_state: Float[Array, "slots h k v"],
    query_start_loc: Integer[Array, " n+1"],
    state_indices: Integer[Array, " n"],
    *,
    layer_idx: int,
    num_layers: int,
    parents: Integer[Array, " t"] | None = None,
    return_token_states: bool = True,
    **options: Any,
) -> tuple[Float[Array, "t h v"], Float[Array, "slots h k v"] | Float[Array, "t h k v"]]:
    """Computes `lightning_attention` (Qin et al. 2024, arXiv:2401.04658) of packed requests, each with its own state.

    Args:
        query: [T, H, K] floating, packed.
        key: [T, Hk, K], dtype of query.
        value: [T, Hk, V], dtype of query.
        recurrent_state: [slots, H, K, V] floating.
        query_start_loc: [N + 1] int cumulative lengths; may be traced.
        state_indices: [N] int.
        layer_idx: Which layer of the model this is, from 0.
        num_layers: How many there are.
        parents: [T] int, trees of draft tokens to verify, as in `lightning_attention`.
        return_token_states: With `parents`, return the states after every token; False returns the slots as they are.
        **options: Keyword arguments of `lightning_attention`, such as `softmax_scale`, `platform`.

    Returns:
        [T, H, V] in query's dtype, and the slots; with `parents` the states after every token, [T, H, K, V].

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.
    """

    states = _checked_state_arguments(recurrent_state, query_start_loc, state_indices)
    tokens = {"query": query, "key": key, "value": value, "layer_idx": layer_idx, "num_layers": num_layers}
    return _run_packed(lightning_attention, tokens | states, parents, return_token_states, options)


def ragged_kernel_delta_attention(
    query: Float[Array, "t h k"],
    key: Float[Array, "t g k"],
    value: Float[Array, "t g v"],
    beta: Float[Array, "t h"],
    decay: Float[Array, "t h k"] | None,
    recurrent_state: Float[Array, "slots h k v"],
    query_start_loc: Integer[Array, " n+1"],
    state_indices: Integer[Array, " n"],
    **options: Any,
) -> tuple[Float[Array, "t h v"], Float[Array, "slots h k v"] | Float[Array, "t h k v"]]:
    """Computes `kernel_delta_attention` of packed requests, which is `ragged_gated_delta_rule` with a decay per key
    channel.

    Args:
        query: [T, H, K] floating, packed.
        key: [T, Hk, K], dtype of query.
        value: [T, Hk, V], dtype of query.
        beta: [T, H] floating, strength of the correction.
        decay: [T, H, K] log of the decay, or [T, H]; None is none.
        recurrent_state: [slots, H, K, V] floating.
        query_start_loc: [N + 1] int cumulative lengths; may be traced.
        state_indices: [N] int.
        **options: Keyword arguments of `ragged_gated_delta_rule`, such as `use_qk_l2norm`, `parents`, `platform`.

    Returns:
        [T, H, V] in query's dtype, and the slots; with `parents` the states after every token, [T, H, K, V].

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.
    """
    states = (recurrent_state, query_start_loc, state_indices)
    return ragged_gated_delta_rule(query, key, value, beta, decay, *states, **options)


def ragged_state_space_v1(
    hidden_states: Float[Array, "t i"],
    A: Float[Array, "i e"],
    B: Float[Array, "t e"],
    C: Float[Array, "t e"],
    D: Float[Array, " i"],
    dt: Float[Array, "t i"],
    recurrent_state: Float[Array, "slots i e"],
    query_start_loc: Integer[Array, " n+1"],
    state_indices: Integer[Array, " n"],
    *,
    gate: Float[Array, "t i"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "t i"], Float[Array, "slots i e"]]:
    """Computes `state_space_v1` (Mamba; Gu & Dao 2023, arXiv:2312.00752) of packed requests, each with its own state.

    Args:
        hidden_states: [T, I] floating, packed.
        A: [I, E] floating, real and negative.
        B: [T, E] floating.
        C: [T, E] floating.
        D: [I] floating.
        dt: [T, I] floating step sizes, after softplus.
        recurrent_state: [slots, I, E] floating.
        query_start_loc: [N + 1] int cumulative lengths; may be traced.
        state_indices: [N] int.
        gate: [T, I] floating, as in `state_space_v1`.
        **options: Keyword arguments of `state_space_v1`, such as `act_fn`, `platform`.

    Returns:
        [T, I] in the dtype of hidden_states, and the slots.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.
    """

    states = _checked_state_arguments(recurrent_state, query_start_loc, state_indices)
    rows = {"hidden_states": hidden_states[None], "B": B[None], "C": C[None], "dt": dt[None]}
    rows |= {} if gate is None else {"gate": gate[None]}
    y, slots, _ = state_space_v1(**rows, A=A, D=D, **states, **options)
    return y[0], slots


def ragged_state_space_v2(
    x: Float[Array, "t h p"],
    A: Float[Array, " h"],
    B: Float[Array, "t g e"],
    C: Float[Array, "t g e"],
    D: Float[Array, " h"],
    dt: Float[Array, "t h"],
    recurrent_state: Float[Array, "slots h p e"],
    query_start_loc: Integer[Array, " n+1"],
    state_indices: Integer[Array, " n"],
    *,
    gate: Float[Array, "t h*p"] | None = None,
    parents: Integer[Array, " t"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "t h*p"], Float[Array, "slots h p e"] | Float[Array, "t h p e"]]:
    """Computes `state_space_v2` (Mamba-2; Dao & Gu 2024, arXiv:2405.21060) of packed requests, each with its own state.

    Args:
        x: [T, H, P] floating, packed.
        A: [H] floating, real and negative.
        B: [T, G, E], dtype of x.
        C: [T, G, E], dtype of x.
        D: [H] floating.
        dt: [T, H] floating step sizes, after softplus.
        recurrent_state: [slots, H, P, E] floating.
        query_start_loc: [N + 1] int cumulative lengths; may be traced.
        state_indices: [N] int.
        gate: [T, H * P] floating, as in `state_space_v2`.
        parents: [T] int, trees of draft tokens to verify, as in `state_space_v2`.
        **options: Keyword arguments of `state_space_v2`, such as `act_fn`, `return_token_states`, `platform`.

    Returns:
        [T, H * P] in x's dtype, and the slots; with `parents` the states after every token, [T, H, P, E], unless
        `return_token_states` is False.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.
    """

    states = _checked_state_arguments(recurrent_state, query_start_loc, state_indices)
    rows = {"x": x[None], "B": B[None], "C": C[None], "dt": dt[None]}
    rows |= {} if gate is None else {"gate": gate[None]}
    if parents is None:
        y, slots, _ = state_space_v2(**rows, A=A, D=D, **states, **options)
        return y[0], slots
    y, after, _ = state_space_v2(**rows, A=A, D=D, **states, parents=parents[None], **options)
    return y[0], after[0] if options.get("return_token_states", True) else after


def accept_states(
    slots: Float[Array, "slots *state"],
    states: Float[Array, "t *state"],
    accepted: Integer[Array, " n"],
    query_start_loc: Integer[Array, " n+1"],
    state_indices: Integer[Array, " n"],
) -> Float[Array, "slots *state"]:
    """Stores the states after accepted draft tokens, the last step of speculative decoding.

    A call with `parents` verifies trees of draft tokens and returns the state after each, of which the newest accepted
    one of every request becomes the state of its slot. It serves the states of recurrences and of `causal_conv1d`.

    Args:
        slots: [slots, ...] floating; donate them under `jax.jit`, and the update is in place.
        states: [T, ...] floating, the state after every token.
        accepted: [N] int, the newest accepted token of each request, by its index among those of the request; -1 leaves
            its slot as it is, and so does an index past the request's tokens.
        query_start_loc: [N + 1] int cumulative lengths; may be traced.
        state_indices: [N] int, different for requests with accepted tokens; an index outside of the slots, such as -1,
            stores nothing.

    Returns:
        The slots, in their dtype.

    Raises:
        ValueError: A shape or dtype is wrong; the message names the argument.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import ragged, ragged_gated_delta_rule

        query, key, value = jax.random.normal(jax.random.key(0), (3, 7, 2, 16))
        beta, decay = jnp.full((7, 2), 0.5), jnp.full((7, 2), -0.1)
        slots, starts, indices = jnp.zeros((4, 2, 16, 16)), jnp.array([0, 4, 7]), jnp.array([3, 1])
        parents = jnp.array([-1, 0, 0, 2, -1, 0, 1])  # a tree of four tokens, and a chain of three
        output, states = ragged_gated_delta_rule(
            query, key, value, beta, decay, slots, starts, indices, parents=parents
        )
        slots = ragged.accept_states(slots, states, jnp.array([3, 0]), starts, indices)
        assert jnp.array_equal(slots[3], states[3]) and jnp.array_equal(slots[1], states[4])
        ```
    """
    sizes: dict[str, int] = {}
    check_shape("accepted", accepted, "N", sizes)
    check_shape("state_indices", state_indices, "N", sizes)
    check_shape("query_start_loc", query_start_loc, "N+1", {"N+1": sizes["N"] + 1})
    for name, array in (("accepted", accepted), ("query_start_loc", query_start_loc), ("state_indices", state_indices)):
        check_dtype(name, array, jnp.integer, "an integer dtype")
    if states.shape[1:] != slots.shape[1:]:
        raise ValueError(f"states: got shape {states.shape}, wants [T, {', '.join(map(str, slots.shape[1:]))}]")
    slots = jnp.asarray(slots)
    accepted, starts, state_indices = (jnp.asarray(x, jnp.int32) for x in (accepted, query_start_loc, state_indices))
    token = jnp.clip(starts[:-1] + accepted, 0, states.shape[0] - 1)
    stored = (accepted >= 0) & (accepted < jnp.diff(starts)) & (state_indices >= 0)
    target = jnp.where(stored, state_indices, slots.shape[0])  # after the last slot: dropped
    return slots.at[target].set(states[token].astype(slots.dtype), mode="drop")


def accepted_tokens(
    parents: Integer[Array, " t"], accepted: Integer[Array, " n"], query_start_loc: Integer[Array, " n+1"]
) -> tuple[Integer[Array, " t"], Integer[Array, " n+1"]]:
    """Lists the tokens on the accepted paths of trees, packed again: those whose states a server has not kept.

    A call with `parents` and `return_token_states=False` reads the states of requests and stores none. A call of the
    same operation without `parents` on the listed tokens alone then reads each state once more and stores the one after
    the accepted tokens, in place of a state for every draft token. Tokens of padding follow the paths.

    Args:
        parents: [T] int, the trees, as the call got them.
        accepted: [N] int, the newest accepted token of each request, by its index among those of the request; -1
            accepts none, and so does an index past the request's tokens.
        query_start_loc: [N + 1] int cumulative lengths; may be traced.

    Returns:
        The accepted tokens, [T] int32: the paths one after the other, the oldest token first; then zeros. The
        cumulative lengths of the paths, [N + 1] int32, from 0.

    Raises:
        ValueError: A shape or dtype is wrong; the message names the argument.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.modules import ragged

        parents, starts = jnp.array([-1, 0, 0, 2, -1, 0, 1]), jnp.array([0, 4, 7])
        tokens, lengths = ragged.accepted_tokens(parents, jnp.array([3, 0]), starts)
        assert tokens[:4].tolist() == [0, 2, 3, 4] and lengths.tolist() == [0, 3, 4]
        ```
    """
    check_shape("parents", parents, "T", {})
    sizes: dict[str, int] = {}
    check_shape("accepted", accepted, "N", sizes)
    check_shape("query_start_loc", query_start_loc, "N+1", {"N+1": sizes["N"] + 1})
    for name, array in (("parents", parents), ("accepted", accepted), ("query_start_loc", query_start_loc)):
        check_dtype(name, array, jnp.integer, "an integer dtype")
    return paths_of_tokens(*(jnp.asarray(x, jnp.int32) for x in (parents, accepted, query_start_loc)))


def _run_packed(
    operation: Any, fields: dict[str, Any], parents: Any, return_token_states: bool, options: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of an operation that returns its states with `return_state`, and its slots or the states
    after the tokens of trees.
    """
    check_token_states_are_of_trees(parents, return_token_states)
    if return_token_states:
        return operation(**fields, parents=parents, return_state=True, **options)
    return operation(**fields, parents=parents, **options), fields["initial_state"]


def _checked_state_arguments(slots: jax.Array, starts: jax.Array, indices: jax.Array) -> dict[str, jax.Array]:
    """Returns the states of a packed call under the names that the operations have for them.

    Raises:
        ValueError: One of them is wrong, by the name that it has here.
    """
    sizes: dict[str, int] = {}
    check_shape("state_indices", indices, "N", sizes)
    check_shape("query_start_loc", starts, "N+1", {"N+1": sizes["N"] + 1})
    for name, array in (("state_indices", indices), ("query_start_loc", starts)):
        check_dtype(name, array, jnp.integer, "an integer dtype")
    if not slots.shape or not slots.shape[0]:
        raise ValueError(f"recurrent_state: got shape {slots.shape}, wants at least one slot")
    return {"initial_state": slots, "cu_seqlens": starts, "state_indices": indices}
