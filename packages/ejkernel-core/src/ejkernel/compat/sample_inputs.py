"""Random inputs that `ejkernel.utils` and `ejkernel.ejgpu` share."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from ejkernel.modules.operations.shared.shapes import as_count, as_float_dtype, as_number, check_dtype, check_shape

Layout = Literal["thd", "bshd", "bhsd"]
LAYOUTS: tuple[Layout, ...] = ("thd", "bshd", "bhsd")


@dataclasses.dataclass(kw_only=True, eq=False)
class AttentionMetadata:
    """The arguments of `ejkernel.ejgpu.flash_attn_varlen` that go with its arrays, filled in step by step.

    Each method changes this object and returns it, so that calls can be chained; this is the one mutable class of the
    library, because code written for it ignores what the methods return.

    Attributes:
        sm_scale: Factor on the scores; None means `D ** -0.5`.
        layout: `"thd"`, `"bshd"` or `"bhsd"`.
        causal: Whether a query sees only the keys up to its own place, both sides ending together.
        bias: Added to the scaled scores.
        alibi_slopes: [batch, H], or None.
        dropout_p: Probability of dropping a weight.
        dropout_seed: Seed of the dropped ones.
        varlen: Whether sequences are packed.
        num_contexts: Number of sequences.
        cu_seqlens_q: [N + 1] cumulative query lengths of packed sequences.
        cu_seqlens_k: The same for keys.
        max_seqlens_q: Bound of the query lengths.
        max_seqlens_k: The same for keys.
    """

    sm_scale: float | None = None
    layout: Layout = "bshd"
    causal: bool = False
    bias: Array | None = None
    alibi_slopes: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Array | None = None
    varlen: bool = False
    num_contexts: int = 0
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    max_seqlens_q: int = 0
    max_seqlens_k: int = 0

    def set_varlen_params(self, cu_seqlens_q: Array, cu_seqlens_k: Array) -> "AttentionMetadata":
        """Switches to packed sequences, whose longest ones are looked up.

        Args:
            cu_seqlens_q: [N + 1] int.
            cu_seqlens_k: [N + 1] int.

        Raises:
            ValueError: The cumulative lengths are not [N + 1] integers with the same N.
        """
        sizes: dict[str, int] = {}
        for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_shape(name, lengths, "N+1", sizes)
            check_dtype(name, lengths, jnp.integer, "an integer dtype")
        self.varlen, self.layout, self.num_contexts = True, "thd", sizes["N+1"] - 1
        self.cu_seqlens_q, self.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        self.max_seqlens_q, self.max_seqlens_k = (int(np.diff(x).max(initial=0)) for x in (cu_seqlens_q, cu_seqlens_k))
        return self

    def need_causal(self) -> "AttentionMetadata":
        """Makes the attention causal."""
        self.causal = True
        return self

    def need_bias(self, bias: Array) -> "AttentionMetadata":
        """Adds a bias [B|1, H|1, max_q|1, max_k|1].

        Raises:
            ValueError: The bias has another rank or is not floating.
        """
        check_shape("bias", bias, "B H T S", {})
        check_dtype("bias", bias, jnp.floating, "a floating dtype")
        self.bias = bias
        return self

    def need_alibi(self, alibi_slopes: Array) -> "AttentionMetadata":
        """Adds slopes [batch, H].

        Raises:
            ValueError: The slopes have another rank or are not floating.
        """
        check_shape("alibi_slopes", alibi_slopes, "B H", {})
        check_dtype("alibi_slopes", alibi_slopes, jnp.floating, "a floating dtype")
        self.alibi_slopes = alibi_slopes
        return self

    def need_dropout(self, dropout_p: float, dropout_seed: int | Array = 0) -> "AttentionMetadata":
        """Drops weights.

        Args:
            dropout_p: Probability in [0, 1).
            dropout_seed: Integer; equal seeds drop alike.

        Raises:
            ValueError: `dropout_p` is no such number.
        """
        self.dropout_p = as_number("dropout_p", dropout_p, minimum=0, less_than=1)
        self.dropout_seed = dropout_seed
        return self

    def check_args(self, q: Array, k: Array, v: Array) -> None:
        """Checks that arrays fit.

        Args:
            q: Queries in this layout.
            k: Keys.
            v: Values.

        Raises:
            ValueError: A shape is wrong, or packed sequences and the layout do not go together.
        """
        if self.layout not in LAYOUTS or self.varlen != (self.layout == "thd"):
            wants = "thd" if self.varlen else "bshd or bhsd; thd needs set_varlen_params"
            raise ValueError(f"layout: got {self.layout!r} with varlen={self.varlen}, wants {wants}")
        axes = {"thd": "{} {} D", "bshd": "B {} {} D", "bhsd": "B {1} {0} D"}[self.layout]
        sizes: dict[str, int] = {}
        for name, array, names in (("q", q, "T H"), ("k", k, "S Hk"), ("v", v, "S Hk")):
            check_shape(name, array, axes.format(*names.split()), sizes)
        if sizes["H"] % max(1, sizes["Hk"]):
            raise ValueError(f"k: got shape {k.shape} with {sizes['Hk']} heads, wants a divisor of q's {sizes['H']}")


def varlen_input_helper(
    batch_size: int,
    qheads: int,
    kvheads: int,
    qseqlen: int,
    kseqlen: int,
    head_dim: int,
    dtype: DTypeLike = "f2",
    equal_seqlens: bool = False,
    debug_mode: bool = False,
    seed: int = 0,
) -> tuple[Array, Array, Array, AttentionMetadata]:
    """Returns packed queries, keys and values of sequences of random length.

    Args:
        batch_size: Number of sequences N.
        qheads: Query heads H.
        kvheads: KV heads Hk.
        qseqlen: Query tokens that all sequences have at most together; each has 1 to `qseqlen // batch_size`.
        kseqlen: The same for keys. The two lengths of a sequence are drawn independently, so that there may be more
            queries than keys.
        head_dim: Head size D.
        dtype: Floating dtype; the default is float16.
        equal_seqlens: Give every sequence the largest length instead.
        debug_mode: Fill the arrays with the number of each token instead of normal random numbers.
        seed: Equal seeds give equal inputs.

    Returns:
        q [total_q, H, D], k and v [total_k, Hk, D], and their metadata with layout `"thd"`, the cumulative lengths and
        the scale `D ** -0.5`.

    Raises:
        ValueError: A size is too small, or `dtype` is no floating dtype.

    Example:
        ```python
        from ejkernel.utils import varlen_input_helper

        q, k, v, metadata = varlen_input_helper(3, 8, 2, 96, 192, 64, dtype="float32")
        assert metadata.cu_seqlens_q[-1] == q.shape[0] <= 96 and q.shape[1:] == (8, 64)
        assert k.shape == v.shape == (int(metadata.cu_seqlens_k[-1]), 2, 64)
        ```
    """
    sequences = as_count("batch_size", batch_size, minimum=1)
    generator = np.random.default_rng(seed)
    cumulative: list[np.ndarray] = []
    for name, tokens in (("qseqlen", qseqlen), ("kseqlen", kseqlen)):
        longest = as_count(name, tokens, minimum=sequences) // sequences
        lengths = generator.integers(longest if equal_seqlens else 1, longest, sequences, endpoint=True)
        cumulative.append(np.cumsum([0, *lengths]).astype(np.int32))
    cu_q, cu_k = cumulative
    shapes = ((cu_q[-1], qheads), (cu_k[-1], kvheads), (cu_k[-1], kvheads))
    q, k, v = _make_arrays([(int(tokens), heads, head_dim) for tokens, heads in shapes], 0, dtype, debug_mode, seed)
    metadata = AttentionMetadata(sm_scale=head_dim**-0.5)
    return q, k, v, metadata.set_varlen_params(jnp.array(cu_q), jnp.array(cu_k))


def input_helper(
    batch_size: int,
    qheads: int,
    kvheads: int,
    qseqlen: int,
    kseqlen: int,
    head_dim: int,
    dtype: DTypeLike = "f2",
    layout: Layout = "bshd",
    debug_mode: bool = False,
    seed: int = 0,
) -> tuple[Array, Array, Array, AttentionMetadata]:
    """Returns dense queries, keys and values.

    Args:
        batch_size: Rows.
        qheads: Query heads H.
        kvheads: KV heads Hk.
        qseqlen: Queries per row.
        kseqlen: Keys per row.
        head_dim: Head size D.
        dtype: Floating dtype; the default is float16.
        layout: `"bshd"` or `"bhsd"`.
        debug_mode: As of `varlen_input_helper`.
        seed: Equal seeds give equal inputs.

    Returns:
        q [B, T, H, D], k and v [B, S, Hk, D] (the middle axes swapped for `"bhsd"`), and their metadata.

    Raises:
        ValueError: The layout is another, or `dtype` is no floating dtype.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout: got {layout!r}, wants 'bshd' or 'bhsd'; varlen_input_helper makes 'thd'")
    sides = ((qseqlen, qheads), (kseqlen, kvheads), (kseqlen, kvheads))
    arrays = _make_arrays(
        [(batch_size, tokens, heads, head_dim) for tokens, heads in sides], 1, dtype, debug_mode, seed
    )
    q, k, v = arrays if layout == "bshd" else [x.swapaxes(1, 2) for x in arrays]
    metadata = AttentionMetadata(sm_scale=head_dim**-0.5, layout=layout, num_contexts=batch_size)
    metadata.max_seqlens_q, metadata.max_seqlens_k = qseqlen, kseqlen
    return q, k, v, metadata


def _make_arrays(
    shapes: Sequence[tuple[int, ...]], axis: int, dtype: DTypeLike, fill_with_token_index: bool, seed: int
) -> list[jax.Array]:
    """Returns one array a shape: normal, or filled with the index along the axis of the tokens."""
    kind = as_float_dtype("dtype", dtype)
    if fill_with_token_index:
        return [jax.lax.broadcasted_iota(jnp.float32, shape, axis).astype(kind) for shape in shapes]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(kind) for key, shape in zip(keys, shapes, strict=True)]


def random_blocks(
    key: jax.Array, num_available_blocks: jax.Array, blocks: int, sizes: tuple[int, int, int]
) -> Int32[Array, "b q h s"]:
    """Returns a random subset of the first blocks for every query, in ascending order.

    Args:
        key: PRNG key.
        num_available_blocks: [Q] int, how many blocks each query may choose from.
        blocks: Blocks there are; also stands in the slots that are left over, at the end.
        sizes: Rows, heads and slots per query.
    """
    names = ("batch", "heads", "selected_blocks")
    batch, heads, slots = (as_count(name, size, minimum=1) for name, size in zip(names, sizes, strict=True))
    order = jax.random.uniform(key, (batch, num_available_blocks.shape[0], heads, blocks))
    allowed = jnp.arange(blocks) < num_available_blocks[:, None, None]
    ranked = jnp.argsort(jnp.where(allowed, order, 2), axis=-1)[..., :slots]
    chosen = jnp.where(jnp.take_along_axis(jnp.broadcast_to(allowed, order.shape), ranked, axis=-1), ranked, blocks)
    spare = ((0, 0), (0, 0), (0, 0), (0, slots - chosen.shape[-1]))
    return jnp.pad(jnp.sort(chosen, axis=-1), spare, constant_values=blocks).astype(jnp.int32)
