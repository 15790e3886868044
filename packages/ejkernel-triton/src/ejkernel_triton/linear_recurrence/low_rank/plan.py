"""The arguments that the launches of a recurrence with a low-rank term share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.linear_recurrence.config import MIN_TILE
from ejkernel_triton.linear_recurrence.low_rank.config import MIN_CHUNK, LowRankConfig
from ejkernel_triton.linear_recurrence.plan import ChunkTables, make_chunk_tables
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec, make_spec
from ejkernel_triton.sizes import pad_to_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankCall:
    """What the launches of one call share. The letters are those of `RecurrenceSpec`.

    Attributes:
        record: The canonical arguments.
        spec: Constants.
        config: Chunks and tiles.
        chunk_tables: The index of packed sequences' chunks.
        gate_sum_matrices: From `make_pair_gate_sum_matrices`.
    """

    record: LinearRecurrence
    spec: RecurrenceSpec
    config: LowRankConfig
    chunk_tables: ChunkTables
    gate_sum_matrices: jax.Array

    @property
    def token_arrays(self) -> tuple[jax.Array | None, ...]:
        """Returns the arrays of tokens, in the order of the kernels' parameters."""
        record = self.record
        vectors = (record.low_rank_write, record.low_rank_read)
        return record.query, record.key, record.value, record.decay, *vectors

    @property
    def block_k(self) -> int:
        """Returns the padded key channels, which every program has."""
        return pad_to_power_of_two(self.spec.K, MIN_TILE)

    @property
    def block_v(self) -> int:
        """Returns the padded value channels, which programs of one chunk have."""
        return pad_to_power_of_two(self.spec.V, MIN_TILE)

    @property
    def scan_block_v(self) -> int:
        """Returns the value channels of programs that pass states: all of them where padding would be in one of several
        tiles.
        """
        return min(self.config.scan_block_v, self.block_v) if self.block_v == self.spec.V else self.block_v

    @property
    def chunk_options(self) -> dict[str, Any]:
        """Returns the options of launches with a program per chunk and head."""
        batch = self.record.query.shape[0]
        grid = batch * self.spec.NUM_CHUNKS * self.spec.H
        return {"batch": batch, "grid": grid, "num_warps": self.config.chunk_warps, "num_stages": 1}

    @property
    def scan_options(self) -> dict[str, Any]:
        """Returns the options of launches with a program per sequence, head and tile of value channels."""
        batch = self.record.query.shape[0]
        return {
            "batch": batch,
            "grid": batch * self.spec.NUM_SEQUENCES * self.spec.H * (self.block_v // self.scan_block_v),
            "num_warps": self.config.scan_warps,
            "num_stages": self.config.scan_stages,
        }

    @property
    def chunk_constants(self) -> dict[str, Any]:
        """Returns the constants of launches with a program per chunk and head."""
        assert self.record.decay is not None  # the implementation refuses records without gates
        return {"DECAY_TOKENS": self.record.decay.shape[1], **self.block_constants}

    @property
    def block_constants(self) -> dict[str, Any]:
        """Returns the constants of all launches."""
        return {"spec": self.spec, "BLOCK_K": self.block_k, "BLOCK_V": self.block_v}

    def chunk_blocks(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the shape of an array with a block [rows, columns] for each chunk of each head."""
        return (self.record.query.shape[0], self.spec.H, self.spec.NUM_CHUNKS, rows, columns)


def make_call(record: LinearRecurrence, config: LowRankConfig) -> LowRankCall:
    """Returns the call of a record with a low-rank term."""
    if is_interpreting():
        chunk, record = config.chunk, _widen_bfloat16(record)
    else:
        chunk = max(MIN_CHUNK, config.chunk)
    spec = make_spec(record, chunk)
    return LowRankCall(
        record=record,
        spec=spec,
        config=config,
        chunk_tables=make_chunk_tables(record, spec),
        gate_sum_matrices=make_pair_gate_sum_matrices(spec, record.query.dtype),
    )


def _widen_bfloat16(record: LinearRecurrence) -> LinearRecurrence:
    """Returns a record with vectors and values in float32 in place of bfloat16, to which Triton's interpreter truncates
    where devices round: the errors of a chunk's products would add up.
    """
    names = ("query", "key", "value", "low_rank_write", "low_rank_read")
    arrays = {name: getattr(record, name) for name in names}
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items() if x.dtype == jnp.bfloat16}
    return dataclasses.replace(record, **wide)


def make_pair_gate_sum_matrices(spec: RecurrenceSpec, dtype: Any) -> jax.Array:
    """Returns the matrices whose products with a chunk's gates are the sums that kernels read.

    Rows are tokens, columns the gates of the chunk's tokens. All but the second come in two versions, one after the
    other: the sum including the token's gate, and the sum without it, for vectors that read the state before the
    token's decay. In order:

    - the sum from the chunk's first token to each token;
    - the sum after each token, to the chunk's end;
    - the sum from the chunk's middle to each token, negative before it;
    - the sum from the middle of each token's sub-chunk, which is halfway through the gate of its second half's first
      token: with four tokens a sum has at most 1.5 gates;
    - for each level the sum from the cut of each token's block of 2 ** (level + 1) tokens, after its first half.

    Args:
        spec: Constants.
        dtype: Of the queries.

    Returns:
        [1, 7 + 2 levels, CHUNK_SIZE, CHUNK_SIZE], float32 for calls in float32, else bfloat16.
    """
    token, gate = np.ogrid[: spec.CHUNK_SIZE, : spec.CHUNK_SIZE]
    up_to_token, before_token = (gate <= token) * 1.0, (gate < token) * 1.0
    sub_chunk, middle = spec.SUB_CHUNK_SIZE, spec.SUB_CHUNK_SIZE // 2
    before_middle = np.where(gate % sub_chunk == middle, 0.5, gate % sub_chunk < middle)
    in_sub_chunk = (token // sub_chunk == gate // sub_chunk) & (sub_chunk > 1)
    matrices = [up_to_token, before_token, (gate > token) * 1.0]
    for is_in_block, before_cut in (
        (True, gate < spec.CHUNK_SIZE // 2),
        (in_sub_chunk, before_middle),
        *(
            (token >> (level + 1) == gate >> (level + 1), (gate >> level) % 2 == 0)
            for level in range(spec.LOG2_SUB_CHUNK, spec.LOG2_CHUNK)
        ),
    ):
        matrices += [is_in_block * (sums - before_cut) for sums in (up_to_token, before_token)]
    return jnp.asarray(np.stack(matrices)[None], jnp.float32 if dtype == jnp.float32 else jnp.bfloat16)
