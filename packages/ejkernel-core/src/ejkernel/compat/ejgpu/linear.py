"""Linear attention and pooling."""

from typing import cast

from jaxtyping import Array, Float, Integer

from ejkernel import modules

OutputAndStates = tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]


def recurrent(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g v"],
    g: Float[Array, "b t h"] | None = None,
    g_gamma: Float[Array, " h"] | None = None,
    gk: Float[Array, "b t h k"] | None = None,
    gv: Float[Array, "b t h v"] | None = None,
    scale: float | None = None,
    initial_state: Float[Array, "n h k v"] | None = None,
    reverse: bool = False,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
) -> OutputAndStates:
    """Calls `ejkernel.modules.recurrent_attention`, which documents the arguments, and returns the output and the
    states.

    Args:
        q: Its `query`.
        k: Its `key`.
        v: Its `value`.
        g: Gate of a head.
        g_gamma: Gate that is the same for all tokens.
        gk: Gate of each key channel.
        gv: Gate of each value channel.
        scale: Its `softmax_scale`.
        initial_state: States before the first token.
        reverse: Go from the last token to the first.
        cu_seqlens: Cumulative lengths of packed sequences.

    Returns:
        Output [B, T, H, V] and states [B, H, K, V], or [N, H, K, V] with cu_seqlens.

    Raises:
        ValueError: A shape, dtype or value is wrong.

    Example:
        ```python
        from ejkernel import ejgpu

        q, k, v = (ejgpu.numeric_gen(1, 32, 4, 16, dtype="float32", seed=seed) for seed in range(3))
        output, state = ejgpu.recurrent(q, k, v)
        assert output.shape == (1, 32, 4, 16) and state.shape == (1, 4, 16, 16)
        ```
    """
    result = modules.recurrent_attention(
        q,
        k,
        v,
        g,
        g_gamma,
        gk,
        gv,
        initial_state,
        cu_seqlens,
        softmax_scale=scale,
        reverse=reverse,
        return_state=True,
    )
    return cast(OutputAndStates, result)


def recurrent_gla(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g v"],
    g: Float[Array, "b t h"] | Float[Array, "b t h k"] | None = None,
    g_gamma: Float[Array, " h"] | None = None,
    scale: float | None = None,
    initial_state: Float[Array, "n h k v"] | None = None,
    reverse: bool = False,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
) -> OutputAndStates:
    """Calls `ejkernel.modules.gated_linear_attention`, which documents the arguments, and returns the output and the
    states.

    Args:
        q: Its `query`.
        k: Its `key`.
        v: Its `value`.
        g: Gate of a head or of its key channels.
        g_gamma: Gate that is the same for all tokens.
        scale: Its `softmax_scale`.
        initial_state: States before the first token.
        reverse: Go from the last token to the first.
        cu_seqlens: Cumulative lengths of packed sequences.

    Returns:
        Output [B, T, H, V] and states [B, H, K, V], or [N, H, K, V] with cu_seqlens.

    Raises:
        ValueError: A shape, dtype or value is wrong.
    """
    result = modules.gated_linear_attention(
        q, k, v, g, g_gamma, initial_state, cu_seqlens, softmax_scale=scale, reverse=reverse, return_state=True
    )
    return cast(OutputAndStates, result)


def lightning_attn(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g v"],
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Float[Array, "n h k v"] | None = None,
    reverse: bool = False,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
) -> OutputAndStates:
    """Calls `ejkernel.modules.lightning_attention`, which documents the arguments, and returns the output and the
    states.

    Args:
        q: Its `query`.
        k: Its `key`.
        v: Its `value`.
        layer_idx: Index of the layer.
        num_layers: Number of layers.
        scale: Its `softmax_scale`.
        initial_state: States before the first token.
        reverse: Go from the last token to the first.
        cu_seqlens: Cumulative lengths of packed sequences.

    Returns:
        Output [B, T, H, V] and states [B, H, K, V], or [N, H, K, V] with cu_seqlens.

    Raises:
        ValueError: A shape, dtype or value is wrong.
    """
    result = modules.lightning_attention(
        q,
        k,
        v,
        initial_state,
        cu_seqlens,
        layer_idx=layer_idx,
        num_layers=num_layers,
        softmax_scale=scale,
        reverse=reverse,
        return_state=True,
    )
    return cast(OutputAndStates, result)


def mean_pooling(
    x: Float[Array, "b t h d"], chunk_size: int, cu_seqlens: Integer[Array, " n+1"] | None = None
) -> Float[Array, "b m h d"]:
    """Returns the mean of every chunk of tokens: `ejkernel.modules.mean_pooling`, which documents the arguments.

    Args:
        x: [B, T, H, D] floating.
        chunk_size: Tokens of a chunk; the last one of a sequence is the mean of those it has.
        cu_seqlens: [N + 1] int, N sequences packed in the single row (B = 1). Their chunks follow one another.

    Returns:
        [B, ceil(T / chunk_size), H, D]. With cu_seqlens, as many chunks as N such sequences can have; those after the
        last are 0, and `ejkernel.xla_utils.prepare_chunk_offsets` says how many there are.

    Raises:
        ValueError: A shape, dtype or value is wrong.
    """
    return modules.mean_pooling(x, cu_seqlens, chunk_size=chunk_size)
