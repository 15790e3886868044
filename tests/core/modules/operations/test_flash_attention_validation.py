"""Wrong calls of `flash_attention`: a ValueError that names the argument, what it got and what it wants."""

import re

import flash_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel.modules import FlashAttention, FlashAttentionConfig, create_default_executor, flash_attention
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments as Arguments
from ejkernel.types import MaskInfo

QUERY = jnp.ones((2, 8, 4, 16))
KEY = VALUE = jnp.ones((2, 6, 2, 16))
ROW = jnp.ones((1, 8, 4, 16))
GOOD = {"query": QUERY, "key": KEY, "value": VALUE}
SELF = {"query": ROW, "key": ROW, "value": ROW}


def ints(*values):
    return jnp.array(values, jnp.int32)


# id: (arguments that differ from GOOD, what the message holds, in this order)
MISTAKES = {
    # shapes
    "query without batch": ({"query": QUERY[0]}, ["query", "(8, 4, 16)", "[B, T, H, D]"]),
    "query no array": ({"query": 3.0}, ["query", "()", "[B, T, H, D]"]),
    "query None": ({"query": None}, ["query", "None", "[B, T, H, D]"]),
    "key of another batch": ({"key": KEY[:1]}, ["key", "(1, 6, 2, 16)", "[B=2, S, Hk, D=16]"]),
    "key of another head size": ({"key": KEY[..., :8]}, ["key", "(2, 6, 2, 8)", "[B=2, S, Hk, D=16]"]),
    "value of another length": ({"value": VALUE[:, :5]}, ["value", "(2, 5, 2, 16)", "[B=2, S=6, Hk=2, V]"]),
    "value with other heads": ({"value": VALUE[:, :, :1]}, ["value", "(2, 6, 1, 16)", "[B=2, S=6, Hk=2, V]"]),
    "heads that do not divide": ({"query": QUERY[:, :, :3]}, ["key", "(2, 6, 2, 16)", "2 heads", "divisor", "3"]),
    "no queries": ({"query": QUERY[:, :0]}, ["query", "(2, 0, 4, 16)", "T of at least 1"]),
    "no keys": ({"key": KEY[:, :0], "value": VALUE[:, :0]}, ["key", "(2, 0, 2, 16)", "S of at least 1"]),
    "no heads": ({"query": QUERY[:, :, :0]}, ["query", "(2, 8, 0, 16)", "H of at least 1"]),
    "no KV heads": ({"key": KEY[:, :, :0], "value": VALUE[:, :, :0]}, ["key", "(2, 6, 0, 16)", "Hk of at least 1"]),
    "no head size": ({"query": QUERY[..., :0], "key": KEY[..., :0]}, ["query", "(2, 8, 4, 0)", "D of at least 1"]),
    "bias of three axes": (
        {"bias": jnp.ones((4, 8, 6))},
        ["bias", "(4, 8, 6)", "[B=2 or 1, H=4 or 1, T=8 or 1,"],
    ),
    "bias transposed": (
        {"bias": jnp.ones((2, 4, 6, 8))},
        ["bias", "(2, 4, 6, 8)", "H=4 or 1, T=8 or 1, S=6 or 1]"],
    ),
    "sinks of other heads": ({"softmax_aux": jnp.ones((3, 2))}, ["softmax_aux", "(3, 2)", "[H=4, num_sinks]"]),
    "sinks of three axes": ({"softmax_aux": jnp.ones((1, 4, 2))}, ["softmax_aux", "(1, 4, 2)", "[num_sinks]"]),
    "no sinks": ({"softmax_aux": jnp.ones((4, 0))}, ["softmax_aux", "(4, 0)", "num_sinks of at least 1"]),
    # dtypes
    "integer query": ({"query": QUERY.astype(int)}, ["query", "int32", "floating"]),
    "complex query": ({"query": QUERY.astype(jnp.complex64)}, ["query", "complex64", "floating"]),
    "key of another dtype": ({"key": KEY.astype(jnp.bfloat16)}, ["key", "bfloat16", "query's float32"]),
    "boolean bias": ({"bias": jnp.ones((1, 1, 8, 6), bool)}, ["bias", "bool", "floating"]),
    "integer sinks": ({"softmax_aux": ints(1)}, ["softmax_aux", "int32", "floating"]),
    "floating lengths": ({"cum_seqlens_q": jnp.ones(3), "cum_seqlens_k": ints(0, 1, 2)}, ["cum_seqlens_q", "float32"]),
    # lengths
    "one vector for two lengths": ({"cum_seqlens_q": ints(0, 4, 8)}, ["cum_seqlens_k", "None", "8", "6", "[N + 1]"]),
    "only key lengths": ({"cum_seqlens_k": ints(0, 4, 8)}, ["cum_seqlens_q", "None", "cum_seqlens_k"]),
    "a list of lengths": ({**SELF, "cum_seqlens_q": [0, 4, 8]}, ["cum_seqlens_q", "list", "[N+1]"]),
    "a matrix of lengths": ({**SELF, "cum_seqlens_q": ints(0, 8)[None]}, ["cum_seqlens_q", "(1, 2)", "[N+1]"]),
    "no lengths": ({**SELF, "cum_seqlens_q": ints()}, ["cum_seqlens_q", "(0,)", "N+1 of at least 1"]),
    "other numbers of sequences": (
        {**SELF, "cum_seqlens_q": ints(0, 4, 8), "cum_seqlens_k": ints(0, 8)},
        ["cum_seqlens_k", "(2,)", "[N+1=3]"],
    ),
    "too few rows": ({"cum_seqlens_q": ints(0, 4), "cum_seqlens_k": ints(0, 4)}, ["cum_seqlens_q", "(2,)", "[B+1=3]"]),
    "lengths that fall": ({**SELF, "cum_seqlens_q": ints(0, 5, 3, 8)}, ["cum_seqlens_q", "[0, 5, 3, 8]", "never decr"]),
    "lengths that start late": ({**SELF, "cum_seqlens_q": ints(1, 8)}, ["cum_seqlens_q", "[1, 8]", "start at 0"]),
    "lengths beyond the row": ({**SELF, "cum_seqlens_q": ints(0, 9)}, ["cum_seqlens_q", "[0, 9]", "within 8 tokens"]),
    "rows beyond their length": (
        {"cum_seqlens_q": ints(0, 8, 17), "cum_seqlens_k": ints(0, 6, 12)},
        ["cum_seqlens_q", "[ 0,  8, 17]", "steps of at most 8 tokens"],
    ),
    "lengths in NumPy": ({**SELF, "cum_seqlens_q": np.array([0, 9])}, ["cum_seqlens_q", "[0, 9]", "within 8 tokens"]),
    # masks
    "a mask for mask_info": ({"mask_info": jnp.ones((2, 1, 8, 6), bool)}, ["mask_info", "bool[2,1,8,6]", "a MaskInfo"]),
    "mask of other lengths": (
        {"mask_info": MaskInfo(_attention_mask=jnp.ones((2, 1, 6, 8), bool))},
        ["mask_info.attention_mask", "(2, 1, 6, 8)", "[B=2 or 1, H=4 or 1, T=8 or 1, S=6 or 1]"],
    ),
    "segments of other lengths": (
        {"mask_info": MaskInfo.from_segments(jnp.zeros((2, 8), jnp.int32))},
        ["mask_info.kv_segment_ids", "(2, 8)", "[B=2 or 1, S=6]"],
    ),
    "segments of other rows": (
        {"mask_info": MaskInfo.from_segments(jnp.zeros((3, 8), jnp.int32), jnp.zeros((3, 6), jnp.int32))},
        ["mask_info.q_segment_ids", "(3, 8)", "[B=2 or 1, T=8]"],
    ),
    "positions of one token": (
        {"mask_info": MaskInfo(q_positions=jnp.zeros((1, 1), jnp.int32))},
        ["mask_info.q_positions", "(1, 1)", "[B=2 or 1, T=8]"],
    ),
    # plain values
    "scale of an array": ({"softmax_scale": jnp.float32(1)}, ["softmax_scale", "float32[]", "a Python number"]),
    "scale of text": ({"softmax_scale": "1"}, ["softmax_scale", "str '1'", "a Python number"]),
    "scale of nan": ({"softmax_scale": float("nan")}, ["softmax_scale", "nan", "finite"]),
    "cap of 0": ({"logits_soft_cap": 0}, ["logits_soft_cap", "got 0", "> 0"]),
    "infinite cap": ({"logits_soft_cap": float("inf")}, ["logits_soft_cap", "inf", "finite"]),
    "dropout of 1": ({"dropout_prob": 1.0, "dropout_seed": 1}, ["dropout_prob", "1.0", ">= 0 and < 1"]),
    "dropout below 0": ({"dropout_prob": -0.1, "dropout_seed": 1}, ["dropout_prob", "-0.1", ">= 0 and < 1"]),
    "floating seed": ({"dropout_prob": 0.1, "dropout_seed": 1.5}, ["dropout_seed", "an integer"]),
    "seed of an old key": (
        {"dropout_prob": 0.1, "dropout_seed": jax.random.PRNGKey(0)},
        ["dropout_seed", "uint32[2]", "an integer", "shape ()"],
    ),
    "seed of a new key": ({"dropout_prob": 0.1, "dropout_seed": jax.random.key(0)}, ["dropout_seed", "key", "integer"]),
    "causal of a number": ({"causal": 1}, ["causal", "int 1", "True or False"]),
    "normalize_output of None": ({"normalize_output": None}, ["normalize_output", "None", "True or False"]),
    "window of 0": ({"sliding_window": 0}, ["sliding_window", "int 0", "int >= 1", "(0, 0) is the diagonal"]),
    "negative window": ({"sliding_window": -4}, ["sliding_window", "int -4", "int >= 1"]),
    "window of a list": ({"sliding_window": [4, 4]}, ["sliding_window", "list [4, 4]", "a tuple (left, right)"]),
    "window with a negative side": ({"sliding_window": (-1, 0)}, ["sliding_window", "(-1, 0)", "ints >= 0"]),
    "window of three sides": ({"sliding_window": (1, 2, 3)}, ["sliding_window", "(1, 2, 3)", "(left, right)"]),
    "window of True": ({"sliding_window": True}, ["sliding_window", "True", "int >= 1"]),
    "floating window": ({"sliding_window": 4.0}, ["sliding_window", "4.0", "int >= 1"]),
    "precision of text": ({"precision": "exact"}, ["precision", "'exact'", "HIGHEST"]),
    "precision of a list": ({"precision": ["high"]}, ["precision", "['high']", "HIGHEST"]),
    "integer logits": ({"logits_dtype": jnp.int8}, ["logits_dtype", "int8", "a floating dtype"]),
    "logits of None": ({"logits_dtype": None}, ["logits_dtype", "None", "a floating dtype"]),
    "logits of text": ({"logits_dtype": "float31"}, ["logits_dtype", "'float31'", "a floating dtype"]),
    # call options
    "unknown platform": ({"platform": "gpu"}, ["platform", "'gpu'", "'triton', 'pallas', 'cuda', 'xla', 'auto'"]),
    "cfg of a dictionary": ({"cfg": {"platform": "xla"}}, ["cfg", "dict", "FlashAttentionConfig"]),
}


def call(arguments):
    rest = {**GOOD, **arguments}
    positional = [rest.pop(name, None) for name in flash_calls.POSITIONAL]
    return flash_attention(*positional, **rest)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_value_errors_that_name_the_argument_what_it_got_and_what_it_wants(mistake):
    arguments, said = MISTAKES[mistake]
    with pytest.raises(ValueError, match=".*".join(map(re.escape, said))) as caught:
        call(arguments)
    assert str(caught.value).startswith(said[0])


STATIC = {
    "softmax_scale": 0.5,
    "dropout_prob": 0.1,
    "causal": True,
    "sliding_window": 3,
    "logits_soft_cap": 2.0,
    "normalize_output": True,
}


@pytest.mark.parametrize("name", STATIC)
def test_options_that_shape_the_program_cannot_be_traced(name):
    with pytest.raises(ValueError, match=rf"^{name}: got a traced array"):
        jax.jit(lambda value: call({name: value}))(STATIC[name])


def test_mistakes_are_found_the_same_way_by_every_door():
    message = "^sliding_window: got int 0"
    wrong = {"sliding_window": 0}
    for door in (
        lambda: FlashAttention().run(QUERY, KEY, VALUE, **wrong),
        lambda: create_default_executor(enable_autotuning=False)(FlashAttention(), QUERY, KEY, VALUE, **wrong),
        lambda: ejkernel.explain(flash_attention, QUERY, KEY, VALUE, **wrong),
        lambda: jax.jit(lambda query: flash_attention(query, KEY, VALUE, **wrong))(QUERY),
    ):
        with pytest.raises(ValueError, match=message):
            door()
    with pytest.raises(ValueError, match=r"^key: got shape"):
        ejkernel.explain(flash_attention, QUERY, KEY[:1], VALUE)


def test_shapes_alone_can_be_explained():
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in SELF.items()}
    cum, ids = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((1, 8), jnp.int32)
    info = MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids)
    decision = ejkernel.explain(flash_attention, *shapes.values(), None, cum, mask_info=info)
    assert decision.forward.implementation.name == "xla"
    with pytest.raises(ValueError, match=r"^cum_seqlens_q: got shape \(3,\)"):
        ejkernel.explain(flash_attention, *[jax.ShapeDtypeStruct((3, 8, 4, 16), jnp.float32)] * 3, None, cum)


def test_concrete_lengths_are_checked_and_traced_ones_are_trusted():
    wrong = ints(0, 9)

    def compute(cum):
        return flash_attention(ROW, ROW, ROW, None, cum)

    with pytest.raises(ValueError, match=r"^cum_seqlens_q"):
        jax.jit(lambda: compute(wrong))()
    assert jnp.isfinite(jax.jit(compute)(wrong)).all()


def test_unusual_but_right_values_are_accepted():
    want = call({"softmax_scale": 0.5, "sliding_window": (2, 2), "precision": jax.lax.Precision.HIGHEST})
    for spelling in ("HIGHEST", "highest", "float32"):
        options = {"softmax_scale": np.float32(0.5), "sliding_window": np.int64(2), "precision": spelling}
        np.testing.assert_array_equal(call({**options, "causal": np.bool_(False)}), want)
    np.testing.assert_array_equal(call({"logits_dtype": "float64"}), call({}))
    assert call({"query": QUERY[:0], "key": KEY[:0], "value": VALUE[:0]}).shape == (0, 8, 4, 16)
    assert call({name: np.asarray(array) for name, array in GOOD.items()}).shape == (2, 8, 4, 16)


def test_equal_calls_spelt_differently_are_one_record():
    one = Arguments(**GOOD, sliding_window=2, precision="highest", logits_dtype="float32", softmax_scale=1)
    other = Arguments(
        **GOOD,
        sliding_window=(2, 2),
        precision=jax.lax.Precision.HIGHEST,
        logits_dtype=jnp.float32,
        softmax_scale=1.0,
    )
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(other))


SPLIT = P("dp", None, "tp", None)
# id: (in_specs, out_specs, what the message holds)
SHARDING_MISTAKES = {
    "too many": ((SPLIT,) * 9, SPLIT, "^in_specs: got 9 specs, wants 3 to 8"),
    "too few": ((SPLIT,), SPLIT, "^in_specs: got 1 specs, wants 3 to 8"),
    "one spec for all": (SPLIT, SPLIT, "^in_specs: got P.*wants a tuple"),
    "names for specs": (("dp", "dp", "dp"), SPLIT, "^in_specs: got 'dp' for query, wants a PartitionSpec or None"),
    "too many axes": (
        (P(*[None] * 5), P(), P()),
        P(),
        "^in_specs: got .* for query, wants at most one entry per axis of 'b t h d'",
    ),
    "unknown mesh axis": ((P("fsdp"),) * 3, P("fsdp"), "^in_specs: query names mesh axis 'fsdp', the mesh has"),
    "split keys": ((P(), P(None, "dp"), P()), P(), "^in_specs: axis 's' of key cannot be split"),
    "split head size": ((P(None, None, None, "tp"), P(), P()), P(), "^in_specs: axis 'd' of query cannot be split"),
    "batch split twice": ((P("dp"), P("tp"), P("dp")), P("dp"), "^in_specs: key splits 'b' over .*query splits it"),
    "heads split apart": ((P(None, None, "tp"), P(), P()), P(None, None, "tp"), "'h' and 'g' .* must be split alike"),
    "uneven": ((P("tp"), P("tp"), P("tp")), P("tp"), "^in_specs: axis 'b' of size 2 does not divide into 4 parts"),
    "output of another split": ((SPLIT,) * 3, P("dp"), "^out_specs: the inputs' specs make the output .*, got"),
    "output of a name": ((SPLIT,) * 3, "dp", "^out_specs: got 'dp', wants a PartitionSpec"),
}


@pytest.mark.parametrize("mistake", SHARDING_MISTAKES)
def test_mistakes_in_partition_specs_say_what_is_wrong(mistake):
    in_specs, out_specs, message = SHARDING_MISTAKES[mistake]
    mesh = jax.make_mesh((2, 4), ("dp", "tp"))
    heads = jnp.ones((2, 8, 4, 16))
    with pytest.raises(ValueError, match=message):
        flash_attention(heads, heads, heads, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@pytest.mark.parametrize("given", [{"mesh"}, {"in_specs"}, {"out_specs"}, {"mesh", "in_specs"}, {"mesh", "out_specs"}])
def test_mesh_and_specs_go_together(given):
    options = {"mesh": jax.make_mesh((2,), ("dp",)), "in_specs": (P("dp"),) * 3, "out_specs": P("dp")}
    missing = [name for name in options if name not in given]
    with pytest.raises(ValueError, match=f"^{', '.join(missing)}: .* go together"):
        flash_attention(QUERY, KEY, VALUE, **{name: options[name] for name in given})


def test_mesh_must_be_a_mesh():
    with pytest.raises(ValueError, match=r"^mesh: got int, wants a jax\.sharding\.Mesh"):
        flash_attention(QUERY, KEY, VALUE, mesh=2, in_specs=(P(),) * 3, out_specs=P())


def test_no_implementation_is_an_error_with_the_table():
    with pytest.raises(NotImplementedError, match=r"(?s)xla .*refused .*platform='triton' was asked for"):
        flash_attention(QUERY, KEY, VALUE, platform="triton")
    with pytest.raises(NotImplementedError, match="no implementation serves this call"):
        flash_attention(QUERY, KEY, VALUE, cfg=FlashAttentionConfig(platform="triton"))
