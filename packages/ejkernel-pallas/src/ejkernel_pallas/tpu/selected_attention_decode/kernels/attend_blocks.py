"""The kernel of the decode step: softmax attention of a query to the blocks of keys that it lists.

SMEM  lists of blocks, page table ──► starts of copies
HBM   keys, values ── three buffers ─► the listed blocks of a step       [keys, D], [keys, Dv] of each KV head
MXU                                   scores of all query heads         [rows, keys]
VPU   copies' ranges of keys ───────► masked scores, online softmax
MXU                                   acc += weights x values           [rows, Dv]
HBM   output, lse ◄────────────────── after the last step of a list

The steps of the grid are lists, or chunks of lists, of each query. Several lists per step are independent chains of
products, which hide each other's latency.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, lane_groups, matrix_product, repeat_lanes
from ejkernel_pallas.tpu.selected_attention_decode.config import NUM_BUFFERS
from ejkernel_pallas.tpu.selected_attention_decode.kernels.block_copies import (
    PARTIAL,
    buffer_of_step,
    chunk_of_step,
    kv_head_of_list,
    start_copies,
    wait_for_copies,
)
from ejkernel_pallas.tpu.selected_attention_decode.kernels.load_rows import load_rows, zero_tokens
from ejkernel_pallas.tpu.selected_attention_decode.kernels.refs import SelectedDecodeRefs
from ejkernel_pallas.tpu.selected_attention_decode.spec import SelectedDecodeSpec


def attend_blocks(refs: SelectedDecodeRefs, *, spec: SelectedDecodeSpec) -> None:
    """Attends to the blocks of a step, and starts the copies of the next one."""
    step = pl.program_id(0)

    @pl.when(step == 0)
    def _() -> None:
        for n in range(NUM_BUFFERS - 1):
            start_copies(refs, spec, step + n, range(spec.copies_per_step))

    wait_for_copies(refs, spec, step)
    fori_loop(0, refs.counts[buffer_of_step(step), PARTIAL], lambda n, _: _zero_values(refs, spec, step, n), None)
    chunk = chunk_of_step(spec, step)
    _attend(refs, spec, step, chunk)


class ListInStep(NamedTuple):
    """A list of a step.

    Attributes:
        step: The step.
        list_index: Index of the list in the step.
        chunk: Index of the step among those of the list.
    """

    step: Any
    list_index: int
    chunk: Any


class RunningSoftmax(NamedTuple):
    """The softmax of a head's rows so far.

    Attributes:
        row_max: [rows, 128], the largest score.
        shift: The same, 0 where no score is finite.
        row_sum: [rows, 128], the sum of exponentials.
        acc: [rows, Dv], the sum of exponentials times values.
    """

    row_max: jax.Array
    shift: jax.Array
    row_sum: jax.Array
    acc: jax.Array


def _attend(refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, step: Any, chunk: Any) -> None:
    """Attends to the blocks of all lists of a step. Each product has a share of the starts of copies."""
    count = 2 * spec.heads_per_step * (spec.keys_per_step // spec.keys_per_product)
    ends = [spec.copies_per_step * n // count for n in range(count + 1)]
    shares = iter([range(*pair) for pair in itertools.pairwise(ends)])

    def start_some_copies() -> None:
        start_copies(refs, spec, step + NUM_BUFFERS - 1, next(shares))

    for index in range(spec.lists_per_step):
        at = ListInStep(step, index, chunk)
        masks = _masks(refs, spec, at)
        for head in range(spec.heads_per_list):
            _attend_head(refs, spec, at, head, masks, start_some_copies)


def _attend_head(
    refs: SelectedDecodeRefs,
    spec: SelectedDecodeSpec,
    at: ListInStep,
    head: int,
    masks: list[jax.Array],
    start_some_copies: Callable[[], None],
) -> None:
    """Attends to the blocks of a list for one of its KV heads."""
    index, slot, stored_head = at.list_index * spec.heads_per_list + head, buffer_of_step(at.step), head
    if spec.heads_per_list == 1:
        is_fixed = spec.lists_per_step % spec.heads_per_word == 0
        stored_head = at.list_index if is_fixed else kv_head_of_list(spec, at.step, at.list_index)
    buffers = [buffer.at[slot, at.list_index] for buffer in (refs.key_buffer, refs.value_buffer)]
    firsts = range(0, spec.keys_per_step, spec.keys_per_product)
    scores = list[jax.Array]()
    for first in firsts:
        start_some_copies()
        key = load_rows(buffers[0], spec, first, spec.keys_per_product, stored_head)
        scores.append(_masked_scores(refs.query[index], key, masks[first // LANES :], spec))
    largest = functools.reduce(jnp.maximum, scores)
    row_max = jnp.broadcast_to(jnp.max(largest, axis=1, keepdims=True), (spec.rows, LANES))
    if spec.steps_per_list > 1:
        row_max = jnp.maximum(row_max, jnp.where(at.chunk == 0, -jnp.inf, refs.row_max[index]))
    shift = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    row_sum, acc = jnp.zeros((spec.rows, 1), jnp.float32), jnp.zeros(refs.acc.shape[1:], jnp.float32)
    for first, x in zip(firsts, scores, strict=True):
        start_some_copies()
        weights = jnp.exp2(x - repeat_lanes(shift, spec.keys_per_product))
        row_sum += jnp.sum(weights, axis=1, keepdims=True)
        value = load_rows(buffers[1], spec, first, spec.keys_per_product, stored_head)
        acc += matrix_product(weights.astype(value.dtype), value, (1, 0), spec.precision)
    softmax = RunningSoftmax(row_max, shift, jnp.broadcast_to(row_sum, (spec.rows, LANES)), acc)
    if spec.steps_per_list > 1:
        softmax = _add_earlier_steps(refs, softmax, index, at.chunk)
    pl.when(at.chunk == spec.steps_per_list - 1)(lambda: _store_results(refs, softmax, index))


def _masked_scores(query: jax.Array, key: jax.Array, masks: Sequence[jax.Array], spec: SelectedDecodeSpec) -> jax.Array:
    """Returns the scores [rows, keys] of a product, as exponents of two; -inf where the query does not attend."""
    scores = matrix_product(query, key, (1, 1), spec.precision) * spec.log2_scale
    groups = [jnp.where(mask, x, -jnp.inf) for mask, x in zip(masks, lane_groups(scores), strict=False)]
    return jnp.concatenate(groups, axis=1)


def _add_earlier_steps(refs: SelectedDecodeRefs, softmax: RunningSoftmax, index: int, chunk: Any) -> RunningSoftmax:
    """Adds the sums of earlier steps of a list to those of this one, and keeps the totals."""
    alpha = jnp.where(chunk == 0, 0.0, jnp.exp2(refs.row_max[index] - softmax.shift))
    earlier_sum, earlier_acc = (jnp.where(chunk == 0, 0.0, x[index]) for x in (refs.row_sum, refs.acc))
    row_sum = softmax.row_sum + alpha * earlier_sum
    acc = softmax.acc + repeat_lanes(alpha, softmax.acc.shape[1]) * earlier_acc
    refs.row_max[index], refs.row_sum[index], refs.acc[index] = softmax.row_max, row_sum, acc
    return softmax._replace(row_sum=row_sum, acc=acc)


def _store_results(refs: SelectedDecodeRefs, softmax: RunningSoftmax, index: int) -> None:
    """Stores output and lse of a head; 0 and -inf where it attends to nothing."""
    attends = softmax.row_sum != 0  # also where it is NaN
    denominator = jnp.where(attends, softmax.row_sum, 1.0)
    output = softmax.acc / repeat_lanes(denominator, softmax.acc.shape[1])
    refs.output[index] = output.astype(refs.output.dtype)
    refs.lse[index] = jnp.where(attends, (jnp.log2(denominator) + softmax.shift) * (1 / LOG2E), -jnp.inf)


def _masks(refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, at: ListInStep) -> list[jax.Array]:
    """Returns for each 128 keys of a list which of them the query attends to, [rows, 128]."""
    lane, size = lax.broadcasted_iota(jnp.int32, (spec.rows, LANES), 1), spec.tokens_per_copy
    masks = list[jax.Array]()
    for first in range(0, spec.keys_per_step, LANES):
        copies = range(first // size, (first + LANES - 1) // size + 1)
        token = lane % size if size < LANES else lane + first % size
        masks.append(_attended(refs, spec, at, [at.list_index * spec.copies_per_list + n for n in copies], token))
    return masks


def _attended(
    refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, at: ListInStep, copies: list[int], token: jax.Array
) -> jax.Array:
    """Returns which tokens of consecutive copies a query attends to; `token` is each lane's index in its copy."""
    slot, lane = buffer_of_step(at.step), lax.broadcasted_iota(jnp.int32, token.shape, 1)

    def by_lane(values: list[Any]) -> Any:
        """Returns for each lane the value of its copy."""
        result = values[0]
        for n, value in enumerate(values[1:], 1):
            result = jnp.where(lane >= n * spec.tokens_per_copy, value, result)
        return result

    attended = token < by_lane([refs.valid_ends[slot, n] for n in copies])
    if spec.has_first_keys:
        attended &= token >= by_lane([refs.valid_firsts[slot, n] for n in copies])
    return attended


def _zero_values(refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, step: Any, n: Any) -> None:
    """Zeroes the values of a partial copy that the query does not attend to: a weight of 0 times NaN is NaN."""
    slot = buffer_of_step(step)
    copy = refs.partial_copies[slot, n]
    index = divide(copy, spec.copies_per_list)
    first, end = refs.valid_firsts[slot, copy], refs.valid_ends[slot, copy]

    def is_valid(token: jax.Array) -> jax.Array:
        return (token >= first) & (token < end)

    zero_tokens(refs.value_buffer.at[slot, index, copy - index * spec.copies_per_list], spec, is_valid)
