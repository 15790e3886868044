"""Calls of the recurrences in float64, for the loops, the references and the kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import linear_recurrence_loop as loop
import numpy as np
import rwkv_loop

from ejkernel.modules.operations import configs
from ejkernel.ops.model import Op
from ejkernel.ops.plugins import registry

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: its arrays by name, what is fixed, and the loop that says what it means.

    Attributes:
        name: Says what it is about.
        op: Name of the operation.
        arrays: Differentiable arrays by argument name.
        fixed: The other arguments.
        loop: (arrays and fixed arguments) -> results.
        cfg: A configuration with several short chunks.
    """

    name: str
    op: str
    arrays: dict[str, np.ndarray]
    fixed: dict[str, Any]
    loop: Callable[..., tuple[np.ndarray, ...]]
    cfg: Any

    @property
    def declared(self) -> Op:
        """The operation."""
        return registry().op(self.op)

    def record(self, given: dict[str, Any]) -> Any:
        """The argument record."""
        fixed = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in self.fixed.items()}
        return self.declared.arguments(**given, **fixed)

    def run(self, given: dict[str, Any], **options: Any) -> Any:
        """The public call on XLA."""
        every = {**given, **self.fixed}
        kinds = self.declared.signature.parameters
        positional = [every.pop(name) for name, kind in kinds.items() if kind.kind is kind.POSITIONAL_ONLY]
        return self.declared.function(*positional, **every, **{"platform": "xla", "cfg": self.cfg, **options})

    def expected(self) -> tuple[np.ndarray, ...]:
        """What the loop says."""
        return self.loop(**self.arrays, **self.fixed)


def tokens(rng, b, t, h, g, k, v, dtype=np.float64):
    """Normal query, key and value."""
    shapes = {"query": (b, t, h, k), "key": (b, t, g, k), "value": (b, t, g, v)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def gate(rng, *shape):
    """Log gates, some of them very strong."""
    return np.where(rng.random(shape) > 0.95, -300.0, -0.5 * rng.random(shape))


def _recurrent(query, key, value, return_state=True, **rest):
    return loop.recurrent(query, key, value, **rest)


def _lightning(query, key, value, layer_idx, num_layers, return_state=True, **rest):
    heads = query.shape[2]
    slopes = [-(8 / heads) * (1 - layer_idx / num_layers) * h for h in range(heads)]
    return loop.recurrent(query, key, value, g_gamma=np.array(slopes), **rest)


def _delta(return_state=True, **given):
    return loop.delta(**given)


def _ragged(recurrent_state, query_start_loc, state_indices, decay=None, **given):
    return loop.ragged_delta(**given, decay=decay, slots=recurrent_state, starts=query_start_loc, indices=state_indices)


def _space(x, A, B, C, D, dt, gate=None, initial_state=None, use_gated_rmsnorm=False, n_groups=None):
    eps = 1e-5 if use_gated_rmsnorm else None
    return loop.state_space(x, A, B, C, D, dt, gate, initial_state, lambda z: z / (1 + np.exp(-z)), eps)


def calls() -> list[Call]:
    """Calls of every operation, over lengths of 1, 21, 63 and 129 tokens, 1, 4 and 8 heads a KV head, K and V apart."""
    return [*_plain(), *_deltas(), *_raggeds(), *_spaces(), *_rwkv(), *_rwkv4()]


def _plain() -> list[Call]:
    rng, short = np.random.default_rng(0), configs.RecurrentAttentionConfig(block_q=8)
    packed = {"cu_seqlens": np.array([0, 5, 5, 40, 41, 60], np.int32)}
    everything = tokens(rng, 2, 21, 8, 1, 5, 3) | {
        "g": gate(rng, 2, 21, 8),
        "g_gamma": -rng.random((1, 8)),
        "gk": gate(rng, 2, 21, 8, 5),
        "gv": gate(rng, 2, 21, 8, 3),
        "initial_state": rng.normal(size=(2, 8, 5, 3)),
    }
    heads = tokens(rng, 1, 129, 4, 1, 60, 7) | {"g": gate(rng, 1, 129, 4)}
    backwards = tokens(rng, 1, 63, 4, 4, 6, 9) | {
        "g": gate(rng, 1, 63, 4, 6),
        "g_gamma": -rng.random(4),
        "initial_state": rng.normal(size=(5, 4, 6, 9)),
    }
    one = tokens(rng, 2, 1, 4, 4, 6, 9) | {"g": gate(rng, 2, 1, 4, 6), "initial_state": rng.normal(size=(2, 4, 6, 9))}
    slow = tokens(rng, 2, 21, 4, 2, 6, 9) | {"initial_state": rng.normal(size=(2, 4, 6, 9))}
    state, back = {"return_state": True}, {"reverse": True, "return_state": True}
    gla, light = configs.GLAttentionConfig(block_q=16), configs.LightningAttentionConfig(block_q=8)
    layer = {"layer_idx": 1, "num_layers": 3}
    return [
        Call("all gates", "recurrent_attention", everything, state, _recurrent, short),
        Call("long keys", "recurrent_attention", heads, {**state, "softmax_scale": 0.3}, _recurrent, short),
        Call("packed, reversed", "recurrent_attention", backwards, {**packed, **back}, _recurrent, short),
        Call("packed", "gated_linear_attention", backwards, {**packed, **state}, _recurrent, gla),
        Call("one token", "gated_linear_attention", one, state, _recurrent, gla),
        Call("states", "lightning_attention", slow, {**layer, **state}, _lightning, light),
    ]


def _deltas() -> list[Call]:
    rng = np.random.default_rng(1)
    kda, gdr = configs.KernelDeltaAttentionConfig(chunk_size=8), configs.GatedDeltaRuleConfig(chunk_size=16)

    def arrays(b, t, h, g, k, v, decay):
        given = tokens(rng, b, t, h, g, k, v) | {"beta": 2 * rng.random((b, t, h))}
        return given | {"decay": gate(rng, *decay), "initial_state": rng.normal(size=(b, h, k, v))}

    channels = arrays(2, 21, 8, 1, 5, 3, (2, 21, 8, 5))
    longer = arrays(1, 129, 4, 4, 6, 9, (1, 129, 4))
    rows = arrays(2, 63, 4, 1, 6, 9, (2, 63, 4))
    ids = np.stack([np.repeat([0, 1, -1, 1, 5, -1], [5, 20, 3, 4, 28, 3]), np.repeat([-1, 2, 7], [9, 50, 4])])
    one = arrays(2, 1, 4, 4, 6, 9, (2, 1, 4, 6))
    state = {"return_state": True}
    return [
        Call("channels", "kernel_delta_attention", channels, {**state, "softmax_scale": 0.4}, _delta, kda),
        Call("one token", "kernel_delta_attention", one, state, _delta, kda),
        Call("heads", "gated_delta_rule", longer, state, _delta, gdr),
        Call("segments", "gated_delta_rule", rows, {**state, "seg_ids": ids.astype(np.int32)}, _delta, gdr),
    ]


def _raggeds() -> list[Call]:
    rng, cfg = np.random.default_rng(2), configs.RaggedGatedDeltaRuleConfig(chunk_size=8)

    def arrays(t, decay):
        given = {name: x[0] for name, x in tokens(rng, 1, t, 4, 2, 6, 9).items()} | {"beta": rng.random((t, 4))}
        return given | {"decay": gate(rng, *decay), "recurrent_state": rng.normal(size=(7, 4, 6, 9))}

    def requests(starts, slots):
        named = {"query_start_loc": starts, "state_indices": slots}
        return {name: np.array(values, np.int32) for name, values in named.items()}

    mixed = requests([0, 1, 1, 20, 21, 60, 60], [3, 3, 0, -1, 5, 2])
    decode = requests([0, 1, 2, 2, 3], [6, 0, 6, 1])
    return [
        Call("mixed", "ragged_gated_delta_rule", arrays(63, (63, 4)), mixed, _ragged, cfg),
        Call("decode", "ragged_gated_delta_rule", arrays(4, (4, 4, 6)), decode, _ragged, cfg),
    ]


def _spaces() -> list[Call]:
    rng, cfg = np.random.default_rng(3), configs.StateSpaceV2Config(chunk_size=8)

    def arrays(b, t, h, g, p, e):
        return {
            "x": rng.normal(size=(b, t, h, p)),
            "A": -np.exp(rng.normal(size=h)),
            "B": rng.normal(size=(b, t, g, e)),
            "C": rng.normal(size=(b, t, g, e)),
            "D": rng.normal(size=h),
            "dt": rng.random((b, t, h)),
            "gate": rng.normal(size=(b, t, h * p)),
            "initial_state": rng.normal(size=(b, h, p, e)),
        }

    groups = arrays(2, 21, 8, 2, 5, 3)
    return [
        Call("groups", "state_space_v2", groups, {"use_gated_rmsnorm": True, "n_groups": 2}, _space, cfg),
        Call("one token", "state_space_v2", arrays(2, 1, 4, 1, 6, 9), {}, _space, cfg),
    ]


def _rwkv() -> list[Call]:
    rng, chunks = np.random.default_rng(4), configs.RWKV6Config(chunk_size=8)
    state, back = {"return_state": True}, {"reverse": True, "return_state": True}
    packed = {"cu_seqlens": np.array([0, 5, 5, 40, 41, 60], np.int32)}

    def arrays(b, t, h, g, k, v, states, **more):
        given = {name[0].replace("q", "r"): x for name, x in tokens(rng, b, t, h, g, k, v).items()}
        given |= {"w": gate(rng, b, t, h, k), "initial_state": rng.normal(size=(states, h, k, v))}
        return given | {name: rng.normal(size=shape) for name, shape in more.items()}

    rows, one = arrays(2, 21, 4, 2, 5, 3, 2, u=(4, 5)), arrays(2, 1, 4, 4, 6, 9, 2, u=(4, 6))
    sequences = arrays(1, 63, 4, 4, 6, 9, 5, u=(4, 6))

    def rwkv6(return_state=True, **given):
        return rwkv_loop.rwkv6(**given)

    return [
        Call("rows", "rwkv6", rows, {**state, "softmax_scale": 1.0}, rwkv6, chunks),
        Call("one token", "rwkv6", one, state, rwkv6, chunks),
        Call("reversed", "rwkv6", rows, back, rwkv6, chunks),
        Call("packed", "rwkv6", sequences, {**packed, **state}, rwkv6, chunks),
        Call("packed, reversed", "rwkv6", sequences, {**packed, **back}, rwkv6, chunks),
        *_rwkv7(rows, one, sequences, packed),
    ]


def _rwkv7(rows: Arrays, one: Arrays, sequences: Arrays, packed: Arrays) -> list[Call]:
    """Calls with the tokens of `rwkv6`; the vectors are short, so that states do not grow."""
    rng, chunks = np.random.default_rng(5), configs.RWKV7Config(chunk_size=8)
    state, back = {"return_state": True}, {"reverse": True, "return_state": True}

    def arrays(tokens, names):
        given = {name: x for name, x in tokens.items() if name != "u"}
        return given | {name: rng.normal(size=tokens["r"].shape) / tokens["r"].shape[3] ** 0.5 for name in names}

    def rwkv7(return_state=True, **given):
        return rwkv_loop.rwkv7(**given)

    def rwkv7_mul(return_state=True, **given):
        return rwkv_loop.rwkv7_mul(**given)

    mul = configs.RWKV7MulConfig(chunk_size=16)
    return [
        Call("rows", "rwkv7", arrays(rows, "ab"), {**state, "softmax_scale": 1.0}, rwkv7, chunks),
        Call("one token", "rwkv7", arrays(one, "ab"), state, rwkv7, chunks),
        Call("packed, reversed", "rwkv7", arrays(sequences, "ab"), {**packed, **back}, rwkv7, chunks),
        Call("packed", "rwkv7_mul", arrays(sequences, ("kk", "a")), {**packed, **state}, rwkv7_mul, mul),
        Call("reversed", "rwkv7_mul", arrays(rows, ("kk", "a")), back, rwkv7_mul, mul),
    ]


def _rwkv4() -> list[Call]:
    rng = np.random.default_rng(6)

    def arrays(b, t, c, size):
        given = {name: rng.normal(size=c) for name in "wu"}
        return given | {"k": size * rng.normal(size=(b, t, c)), "v": rng.normal(size=(b, t, c))}

    state = np.concatenate([0.5 + rng.random((2, 2, 5)), rng.normal(size=(2, 1, 5))], axis=1)

    def rwkv4(return_state=True, **given):
        return rwkv_loop.rwkv4(**given)

    cfg = configs.RWKV4Config(unroll=4)
    return [
        Call("rows", "rwkv4", arrays(1, 21, 3, 1.0), {"return_state": True}, rwkv4, cfg),
        Call("state", "rwkv4", arrays(2, 6, 5, 2.0) | {"state": state}, {"return_state": True}, rwkv4, cfg),
    ]


def results(output: Any) -> tuple[jax.Array, ...]:
    """The arrays that a call returns."""
    return tuple(jax.tree.leaves(output))
