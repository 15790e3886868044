"""Backward pass of tiled softmax attention on Hopper.

With p = exp(s - lse), do the output's cotangent and delta_i = <do_i, o_i>:

    dv_j    = sum_i p_ij do_i
    ds_ij   = p_ij (<do_i, v_j> - delta_i), through the soft cap
    dq_i    = scale sum_j ds_ij k_j
    dk_j    = scale sum_i ds_ij q_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i

Delta and the sink's gradient are sums over rows that XLA is left to do.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ejkernel.families.tiled_attention import sinks_gradient
from ejkernel.ops.config.params import BwdParams
from ejkernel.ops.pullback import Pullback
from ejkernel_pallas.gpu.tiled_attention import schedule
from ejkernel_pallas.gpu.tiled_attention.backward_kernels import Call, keys_kernel, queries_kernel
from ejkernel_pallas.gpu.tiled_attention.launch import launch, matrix, whole
from ejkernel_pallas.gpu.tiled_attention.spec import LOG2E, Spec, make_spec
from ejkernel_pallas.gpu.tiled_attention.tiles import ROWS, BackwardTile, backward_tiles
from ejkernel_pallas.gpu.tiled_attention.visits import key_visits, padded_ids, query_visits, tiles, without_padding

Operands = dict[str, jax.Array]


def backward(pullback: Pullback, params: BwdParams) -> dict[str, jax.Array]:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the wanted names.
        params: Tile sizes and stages. A block for keys owns `kv_blocksize` of them and visits tiles of `q_blocksize`
            queries, with `num_stages` of them in shared memory; one for queries owns `blocksize_m` of them and visits
            tiles of `blocksize_n` keys, with `blocksize_k` stages.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    wanted, spec = pullback.wanted, make_spec(pullback.record)
    keys, queries = backward_tiles(params, spec)
    operands, delta = _operands(pullback, spec, keys, queries)
    gradients: dict[str, jax.Array] = {}
    if wanted & {"key", "value"}:
        dk, dv = _run(keys_kernel, spec, keys, operands)
        gradients |= {"key": dk[:, : spec.keys], "value": dv[:, : spec.keys]}
    if "query" in wanted:
        (dq,) = _run(queries_kernel, spec, queries, operands)
        gradients["query"] = dq[:, : spec.queries]
    if "softmax_aux" in wanted:
        gradients["softmax_aux"] = sinks_gradient(pullback, delta)
    return {name: gradients[name] for name in sorted(wanted)}


def _operands(pullback: Pullback, spec: Spec, keys: BackwardTile, queries: BackwardTile) -> tuple[Operands, jax.Array]:
    """What the kernels read, in whole tiles where it is one number a row; and delta as it is, [B, H, T]."""
    record, lse = pullback.record, pullback.residuals.lse
    cotangent = pullback.cotangent.astype(spec.dtype)
    matrices = {"q": record.query, "do": cotangent, "k": record.key, "v": record.value}
    ids: Operands = {}
    if spec.segments:
        ids = {"q": record.q_segment_ids, "k": record.kv_segment_ids}
        ids |= {"do": ids["q"], "v": ids["k"]}
        matrices = {name: without_padding(x, ids[name]) for name, x in matrices.items()}
    delta = jnp.sum(matrices["do"].astype(jnp.float32) * pullback.output.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    rows = {"q": max(keys.visit, queries.own), "k": max(keys.own, queries.visit)}
    padding = ((0, 0), (0, 0), (0, -spec.queries % rows["q"]))
    # A row that attends to nothing has no weights: they are powers of two of minus infinity.
    shift = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    least = {"q": keys.visit, "do": keys.visit, "k": queries.visit, "v": queries.visit}
    operands = {name: whole(x, max(ROWS, least[name])) for name, x in matrices.items()}
    operands |= {"shift": jnp.pad(shift, padding, constant_values=jnp.inf), "delta": jnp.pad(delta, padding)}
    if spec.segments:
        operands |= {f"{name}_ids": padded_ids(ids[name], rows[name], {"q": -1, "k": -2}[name]) for name in "qk"}
    return operands, delta


def _run(kernel: Any, spec: Spec, tile: BackwardTile, operands: Operands) -> Any:
    """Launches one of the kernels."""
    of_keys = tile.owner == "keys"
    blocks = (tile.visit, tile.own) if of_keys else (tile.own, tile.visit)
    ids = None
    if spec.segments:
        cut = [tiles(n, block) * block for n, block in zip((spec.queries, spec.keys), blocks, strict=True)]
        ids = (operands["q_ids"][:, : cut[0]], operands["k_ids"][:, : cut[1]])
    group = spec.group if of_keys else 1
    table = jnp.asarray((query_visits if of_keys else key_visits)(spec, ids, *blocks))
    plan = schedule.make_plan(
        table.shape[1],
        batch=spec.batch,
        heads=spec.kv_heads if of_keys else spec.heads,
        reverse=not of_keys and spec.right is not None,
        head_bytes=4 * (spec.queries * group if of_keys else spec.keys) * spec.size,
        group=1 if of_keys else spec.group,
        dealt=False,
    )
    owned = [operands[name] for name in (("k", "v") if of_keys else ("q",))]
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in owned]

    def body(given: Operands, made: Any, buffers: Any) -> None:
        kernel(Call(spec, tile, plan, given, made, buffers))

    return launch(body, operands | {"table": table}, outputs, _scratch(spec, tile), plan.blocks, tile.warpgroups)


def _scratch(spec: Spec, tile: BackwardTile) -> dict[str, Any]:
    """Shared memory and barriers, by the names that the kernels know."""
    made: dict[str, Any] = {}
    sides = (("own", tile.owned, tile.warpgroups, ROWS), ("visit", tile.visited, tile.stages, tile.visit))
    for side, names, count, rows in sides:
        for name in names:
            made[f"{side}_{name}"] = matrix((count, rows, spec.size), spec.dtype)
            for extra in tile.extras(spec, name):
                dtype = jnp.int32 if extra.endswith("ids") else jnp.float32
                made[f"{side}_{extra}"] = plgpu.SMEM((count, rows), dtype)
    arrivals = {name: 1 + len(tile.extras(spec, name)) for name in (*tile.owned, *tile.visited)}
    barrier = functools.partial(plgpu.Barrier, num_barriers=tile.stages)
    made |= {f"{name}_full": barrier(num_arrivals=arrivals[name]) for name in tile.visited}
    made["visit_free"] = barrier(num_arrivals=tile.warpgroups)
    own = sum(arrivals[name] for name in tile.owned)
    made["own_full"] = plgpu.Barrier(num_arrivals=own, num_barriers=tile.warpgroups)
    return made
