"""Merging the parts of items that several programs worked on."""

import jax
import jax.numpy as jnp

from ejkernel_pallas.gpu.hopper.sizes import ROWS
from ejkernel_pallas.gpu.latent_attention.plan import Plan
from ejkernel_pallas.gpu.latent_attention.spec import Spec


def combined(
    spec: Spec, plan: Plan, output: jax.Array, lse: jax.Array, parts: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, 512] and lse [T, H] with the items that were cut.

    Args:
        spec: Constants.
        plan: Items and shares.
        output: [T, H, 512], without the items that were cut.
        lse: [T, tiles * 64], likewise.
        parts: [programs * 2 * tiles, 64, 512] float32.
        sums: [programs * 2 * tiles, 64] their log-sum-exps.
    """
    owner, cut = _owners(spec, plan)
    heads = spec.tiles * ROWS
    lined = sums.reshape(2 * spec.programs, heads)
    mine = owner[None] == cut[:, None]  # item of the cut, slot
    scores = jnp.where(mine[..., None], lined[None], -jnp.inf)
    row_max = jnp.max(scores, axis=1)
    row_max = jnp.where(row_max > -jnp.inf, row_max, 0)
    weights = jnp.exp(scores - row_max[:, None])
    total = jnp.sum(weights, axis=1)
    merged_lse = row_max + jnp.log(total)
    weights = weights / jnp.where(total > 0, total, 1)[:, None]
    # Slots that no program wrote hold anything.
    live = jnp.any(mine, axis=0)
    numerators = parts.reshape(2 * spec.programs, heads, -1)
    numerators = jnp.where(live[:, None, None], numerators, 0)
    merged = jnp.einsum("csh,shv->chv", weights, numerators)
    output = output.at[cut].set(merged[:, : spec.heads].astype(output.dtype), mode="drop")
    return output, lse.at[cut].set(merged_lse, mode="drop")[:, : spec.heads]


def _owners(spec: Spec, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The item of every slot, -1 for none; and the item that each program is the first to begin within, T for none."""
    begin, end = plan.shares[:-1, 1], plan.shares[1:, 1]
    first, last = plan.shares[:-1, 0], plan.shares[1:, 0]
    start, steps = plan.items[:, 2], plan.items[:, 3]
    works = begin < end
    # Begins within an item: its part is in the first slot.
    within = works & (begin > start[first])
    head = jnp.where(within, first, -1)
    # Ends within an item that it has the beginning of: its part is in the second slot.
    tail_cut = works & (end > start[last]) & (end < start[last] + steps[last]) & (start[last] >= begin)
    tail = jnp.where(tail_cut, last, -1)
    owner = jnp.stack((head, tail), axis=1).reshape(-1)
    earlier = jnp.concatenate((jnp.array([-1], jnp.int32), head[:-1]))
    cut = jnp.where(within & (head != earlier), head, spec.rows)
    return owner, cut
