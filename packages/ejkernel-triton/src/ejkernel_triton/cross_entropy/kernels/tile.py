"""Device helpers of the cross-entropy kernels: loads of logits, statistics of a token, and the gradient of its logits.

A program has one token and loops over its logits in tiles of [STRIPS, LANES] entries:

    entries    |---- strip 0 ----|---- strip 1 ----| ... |---- strip 0 ----|---- strip 1 ----| ...
                 lane 0, 1, 2 ..                           the next tile

A thread has the same lanes of every strip. Each lane keeps its own largest logit and its own sums, so that no number
moves between threads until the last tile, and a tile needs one exponential per entry and one per lane.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, batch_row_address, minus_inf_to_zero, tanh


@triton.jit
def locate_token(spec: tl.constexpr):
    """Returns (batch row, token) of a program, in 64 bits."""
    program = tl.cast(tl.program_id(0), tl.int64)
    return program // spec.T, program % spec.T


@triton.jit
def token_row(array, batch, token, PER: tl.constexpr, spec: tl.constexpr):
    """Returns the address of a token's row of V entries."""
    return batch_row_address(array, batch, PER, spec.T * spec.V) + token * spec.V


@triton.jit
def load_token(array, batch, token, PER: tl.constexpr, spec: tl.constexpr):
    """Returns a token's number."""
    return tl.load(batch_row_address(array, batch, PER, spec.T) + token)


@triton.jit
def store_token(array, batch, token, value, spec: tl.constexpr):
    """Stores a token's number, in float32."""
    tl.store(array + batch * spec.T + token, value.to(tl.float32))


@triton.jit
def entries_of_tile(start, spec: tl.constexpr):
    """Returns the entries of the tile from `start` on, [STRIPS, LANES]; `start` may be a vector over lanes."""
    lanes = tl.arange(0, spec.LANES)
    return tl.arange(0, spec.STRIPS)[:, None] * spec.LANES + (start + lanes)[None, :]


@triton.jit
def load_entries(row, entries, IS_MASKED: tl.constexpr, OTHER: tl.constexpr, spec: tl.constexpr):
    """Loads entries in float32; OTHER past the last one, if IS_MASKED."""
    if IS_MASKED:
        return tl.load(row + entries, mask=entries < spec.V, other=OTHER).to(tl.float32)
    else:
        return tl.load(row + entries).to(tl.float32)


@triton.jit
def load_logits(logits, bias, entries, IS_MASKED: tl.constexpr, spec: tl.constexpr):
    """Returns logits with bias and soft cap; -inf past the last one, if IS_MASKED."""
    values = load_entries(logits, entries, IS_MASKED, 0.0, spec)
    if spec.HAS_BIAS:
        values += load_entries(bias, entries, IS_MASKED, 0.0, spec)
    if spec.SOFT_CAP is not None:
        values = spec.SOFT_CAP * tanh(values / spec.SOFT_CAP, False)
    if IS_MASKED:
        values = tl.where(entries < spec.V, values, float("-inf"))
    return values


@triton.jit
def load_targets(soft_targets, entries, IS_MASKED: tl.constexpr, spec: tl.constexpr):
    """Returns the distribution to predict, with smoothing; 0 past the last entry, if IS_MASKED."""
    targets = spec.TARGET_PART * load_entries(soft_targets, entries, IS_MASKED, 0.0, spec) + spec.EVEN_PART
    if IS_MASKED:
        targets = tl.where(entries < spec.V, targets, 0.0)
    return targets


@triton.jit
def add_tile(largest, tile_of_largest, total, expected, mass, rows, start, IS_MASKED: tl.constexpr, spec: tl.constexpr):
    """Returns the statistics of lanes with those of the tile from `start` on.

    The statistics are the largest logit, the start of the first tile that has it, the sum of exponentials relative to
    it, and the sums of targets times logits and of targets: with hard targets, the former only sums what smoothing
    needs, and the latter is not used.
    """
    logits, bias, soft_targets = rows
    entries = entries_of_tile(start, spec)
    values = load_logits(logits, bias, entries, IS_MASKED, spec)
    tile_largest = tl.max(values, axis=0)
    new_largest = tl.maximum(largest, tile_largest)
    relative = minus_inf_to_zero(new_largest)
    weights = tl.exp2(values * LOG2E - (relative * LOG2E)[None, :])
    total = total * tl.exp2((largest - relative) * LOG2E) + tl.sum(weights, axis=0)
    tile_of_largest = tl.where(tile_largest > largest, start, tile_of_largest)
    if spec.HAS_SOFT_TARGETS:
        targets = load_targets(soft_targets, entries, IS_MASKED, spec)
        # Where a target is 0, a logit of -inf counts nothing.
        expected += tl.sum(tl.where(targets != 0.0, targets * values, 0.0), axis=0)
        mass += tl.sum(targets, axis=0)
    else:
        if spec.EVEN_PART != 0.0:
            expected += tl.sum(tl.where(entries < spec.V, spec.EVEN_PART * values, 0.0), axis=0)
    return new_largest, tile_of_largest, total, expected, mass


@triton.jit
def token_statistics(rows, target, active, spec: tl.constexpr):
    """Returns a token's log-sum-exp, largest logit, the first entry that has it, and the sums of targets times logits
    and of targets. Tokens that are not active are not read.
    """
    V: tl.constexpr = spec.V
    LANES: tl.constexpr = spec.LANES
    TILE: tl.constexpr = spec.STRIPS * spec.LANES
    WHOLE: tl.constexpr = V // TILE * TILE
    logits, bias, _ = rows
    largest = tl.full([LANES], float("-inf"), tl.float32)
    tile_of_largest = tl.zeros([LANES], tl.int32)
    total = tl.zeros([LANES], tl.float32)
    expected = tl.zeros([LANES], tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, tl.where(active, WHOLE, 0), TILE):
        largest, tile_of_largest, total, expected, mass = add_tile(
            largest, tile_of_largest, total, expected, mass, rows, start, False, spec
        )
    # At most one tile, which ends past the last entry.
    for start in tl.range(WHOLE, tl.where(active, V, WHOLE), TILE):
        largest, tile_of_largest, total, expected, mass = add_tile(
            largest, tile_of_largest, total, expected, mass, rows, start, True, spec
        )
    row_largest = tl.max(largest, axis=0)
    relative = minus_inf_to_zero(row_largest)
    lse = tl.log(tl.sum(total * tl.exp2((largest - relative) * LOG2E), axis=0)) + relative
    # Only lanes that have the largest logit load their tile again.
    entries = entries_of_tile(tile_of_largest, spec)
    candidates = (entries < tl.where(active, V, 0)) & (largest == row_largest)[None, :]
    values = load_entries(logits, tl.where(candidates, entries, 0), False, 0.0, spec)
    if spec.HAS_BIAS:
        values += load_entries(bias, tl.where(candidates, entries, 0), False, 0.0, spec)
    if spec.SOFT_CAP is not None:
        values = spec.SOFT_CAP * tanh(values / spec.SOFT_CAP, False)
    largest_entry = tl.min(tl.min(tl.where(candidates & (values >= row_largest), entries, V), axis=1), axis=0)
    row_expected, row_mass = tl.sum(expected, axis=0), tl.sum(mass, axis=0)
    if not spec.HAS_SOFT_TARGETS:
        row_expected, row_mass = add_hard_target(row_expected, logits, bias, target, active, spec)
    return lse, row_largest, largest_entry, row_expected, row_mass


@triton.jit
def add_hard_target(expected, logits, bias, target, active, spec: tl.constexpr):
    """Returns the sum of targets times logits with that of the target's entry, and the sum of targets."""
    exists = (target >= 0) & (target < spec.V)
    at = tl.where(exists, target, 0)
    value = tl.load(logits + at).to(tl.float32)
    if spec.HAS_BIAS:
        value += tl.load(bias + at).to(tl.float32)
    if spec.SOFT_CAP is not None:
        value = spec.SOFT_CAP * tanh(value / spec.SOFT_CAP, False)
    mass = tl.where(exists, spec.TARGET_PART, 0.0) + spec.EVEN_PART * spec.V
    # A part of 0 counts nothing, whatever the logit.
    if spec.TARGET_PART != 0.0:
        expected += tl.where(exists, spec.TARGET_PART * value, 0.0)
    return expected, mass


@triton.jit
def store_statistics(outputs, batch, token, statistics, weight, spec: tl.constexpr):
    """Stores a token's loss, log-sum-exp, largest logit and its entry; 0 for a token of weight 0."""
    loss, lses, largest_logits, largest_entries = outputs
    lse, largest, entry, expected, mass = statistics
    active = weight != 0.0
    value = weight * (lse * mass - expected + spec.Z_LOSS * lse * lse)
    store_token(loss, batch, token, tl.where(active, value, 0.0), spec)
    store_token(lses, batch, token, tl.where(active, lse, 0.0), spec)
    store_token(largest_logits, batch, token, tl.where(active, largest, 0.0), spec)
    store_token(largest_entries, batch, token, tl.where(active, entry, 0), spec)


@triton.jit
def store_gradient_tile(gradient, rows, target, start, factors, IS_MASKED: tl.constexpr, spec: tl.constexpr):
    """Computes the gradient of the logits from `start` on. `gradient` may be the memory of the logits."""
    logits, bias, soft_targets = rows
    lse, softmax_factor, target_factor = factors
    entries = entries_of_tile(start, spec)
    values = load_logits(logits, bias, entries, IS_MASKED, spec)
    result = tl.exp2(values * LOG2E - lse * LOG2E) * softmax_factor
    if spec.HAS_SOFT_TARGETS:
        result -= load_targets(soft_targets, entries, IS_MASKED, spec) * target_factor
    else:
        hard = tl.where(entries == target, spec.TARGET_PART, 0.0) + spec.EVEN_PART
        result -= hard * target_factor
    if spec.SOFT_CAP is not None:
        capped = values / spec.SOFT_CAP
        result *= 1.0 - capped * capped
    result = result.to(gradient.dtype.element_ty)
    if IS_MASKED:
        tl.store(gradient + entries, result, mask=entries < spec.V)
    else:
        tl.store(gradient + entries, result)


@triton.jit
def store_gradient(gradient, rows, target, active, factors, spec: tl.constexpr):
    """Writes the gradient of a token's logits; 0 for a token that is not active, which is not read."""
    V: tl.constexpr = spec.V
    STRIPS: tl.constexpr = spec.STRIPS
    LANES: tl.constexpr = spec.LANES
    TILE: tl.constexpr = STRIPS * LANES
    WHOLE: tl.constexpr = V // TILE * TILE
    for start in tl.range(0, tl.where(active, WHOLE, 0), TILE):
        store_gradient_tile(gradient, rows, target, start, factors, False, spec)
    for start in tl.range(WHOLE, tl.where(active, V, WHOLE), TILE):
        store_gradient_tile(gradient, rows, target, start, factors, True, spec)
    zeros = tl.zeros([STRIPS, LANES], gradient.dtype.element_ty)
    for start in tl.range(0, tl.where(active, 0, V), TILE):
        entries = entries_of_tile(start, spec)
        tl.store(gradient + entries, zeros, mask=entries < V)
